"""The kernels for few rows on AMX compute what torch's own operators do, and are had or not."""

import copy
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from headstart.heads.core import amx
from headstart.heads.core.amx import AmxLinear

needs_amx = pytest.mark.skipif(amx.kernels() is None, reason="needs AMX and a C compiler")


def off(found: Tensor, true: Tensor) -> float:
    return ((found.double() - true).norm() / true.norm()).item()


def layers(size: int, outputs: tuple[int, ...], bias: bool) -> list[nn.Linear]:
    torch.manual_seed(0)
    made = [nn.Linear(size, each, bias=bias, dtype=torch.bfloat16) for each in outputs]
    return [each.requires_grad_(False) for each in made]


@needs_amx
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 33, 64])
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_as_exact_as_torchs(rows: int, bias: bool) -> None:
    """One to three layers, of which the second has fewer outputs; and a gated product."""
    for size, outputs in ((768, (768, 64, 256)), (96, (16,)), (32, (48, 48))):
        own = layers(size, outputs, bias)
        states = torch.randn(1, rows, size).bfloat16()
        ours = [AmxLinear(each) for each in own]
        assert amx.together(ours, states)
        true = [wide(each)(states.double()) for each in own]
        for found, each, exact in zip(amx.products(ours, states), own, true, strict=True):
            assert found.shape == exact.shape and found.dtype == torch.bfloat16
            assert off(found, exact) <= 1.02 * off(each(states), exact)
        if len(own) == 2:
            found, exact = amx.gated(ours[0], ours[1], states), F.silu(true[0]) * true[1]
            assert off(found, exact) <= 1.05 * off(F.silu(own[0](states)) * own[1](states), exact)


def wide(layer: nn.Linear) -> nn.Linear:
    return copy.deepcopy(layer).double()


@needs_amx
def test_a_layer_is_torchs_own_where_the_kernels_do_not_fit() -> None:
    (own,) = layers(64, (32,), True)
    ours = AmxLinear(own)
    assert ours.weight is own.weight and ours.bias is own.bias
    for shape in ((65, 64), (0, 64), (2, 80, 64), (64,)):
        states = torch.randn(shape).bfloat16()
        torch.testing.assert_close(ours(states), own(states), rtol=2e-2, atol=2e-2)
    assert not amx.together([ours], torch.randn(65, 64).bfloat16())
    assert not amx.together([ours], torch.randn(2, 64))
    learns = torch.randn(2, 64).bfloat16().requires_grad_()
    ours(learns).sum().backward()
    assert learns.grad is not None
    assert torch.equal(wide(ours)(learns.double()), wide(own)(learns.double()))
    for size, outputs in ((33, 32), (32, 17)):
        assert not amx.fits_amx(nn.Linear(size, outputs, dtype=torch.bfloat16))
    assert not amx.fits_amx(nn.Linear(32, 32)) and amx.fits_amx(own) and not amx.fits_amx(ours)


@needs_amx
def test_layers_that_somebody_listens_to_are_called_one_by_one() -> None:
    ours: list[Any] = [AmxLinear(each) for each in layers(64, (32, 32), False)]
    states = torch.randn(2, 64).bfloat16()
    assert amx.together(ours, states)
    ours[1].register_forward_hook(lambda *_: None)
    assert not amx.together(ours, states) and amx.together(ours[:1], states)


@needs_amx
def test_norm_and_rotary_embedding_are_transformers_own() -> None:
    torch.manual_seed(0)
    states, norm = torch.randn(2, 3, 96).bfloat16() * 4, LlamaRMSNorm(96, eps=1e-5).bfloat16()
    norm.weight.data = torch.randn(96).bfloat16()
    with torch.no_grad():
        found = amx.norm(states, norm.weight, 1e-5)
        assert found is not None
        true = copy.deepcopy(norm).double()(states.double())
        assert off(found, true) <= 1.02 * off(norm(states), true)
        assert amx.norm(states.float(), norm.weight, 1e-5) is None
    query, key = (torch.randn(2, 3, heads, 64).bfloat16().transpose(1, 2) for heads in (4, 2))
    angle = torch.randn(2, 3, 64)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    turned = amx.rotate((query, key), cos, sin)
    wide: Any = [each.double() for each in (query, key, cos, sin)]
    own = apply_rotary_pos_emb(query, key, cos, sin)
    assert turned is not None
    for found, each, exact in zip(turned, own, apply_rotary_pos_emb(*wide), strict=True):
        assert off(found, exact) <= off(each, exact)
    assert amx.rotate((query.contiguous(), key), cos, sin) is None


@needs_amx
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("nodes", [1, 5])
@pytest.mark.parametrize("slots", [1, 16, 70, 130])
def test_attention_is_torchs(groups: int, nodes: int, slots: int) -> None:
    """Keys and values of a cache, whose heads stand behind one another; masks of one or each."""
    torch.manual_seed(0)
    slab = torch.randn(2, 2, 140, 2, 64).bfloat16()
    key, value = slab.transpose(2, 3).narrow(3, 0, slots).unbind(0)
    query = torch.randn(2, nodes, 2 * groups, 64).bfloat16().transpose(1, 2)
    hidden = torch.rand(2, 1, nodes, 2 * slots) < 0.4
    hidden[..., :slots][..., 0] = hidden[..., slots:][..., 0] = False
    lowest = torch.finfo(torch.bfloat16).min
    mask = torch.zeros(hidden.shape).bfloat16().masked_fill(hidden, lowest).narrow(3, slots, slots)
    for given in (None, mask, mask[:1]):
        found = amx.attend(query, key, value, given, 0.3)
        wide: Any = [None if each is None else each.double() for each in (query, key, value, given)]
        narrow: Any = query, key, value, given
        own, true = (
            F.scaled_dot_product_attention(
                each[0], each[1], each[2], each[3], scale=0.3, enable_gqa=True
            ).transpose(1, 2)
            for each in (narrow, wide)
        )
        assert found is not None and found.is_contiguous()
        assert off(found, true) <= 1.05 * off(own, true)
    assert amx.attend(query.float(), key, value, None, 0.3) is None
    assert amx.attend(query[..., :16], key[..., :16], value, None, 0.3) is None


@needs_amx
def test_threads_run_the_kernels_at_once() -> None:
    (layer,) = layers(256, (512,), True)
    ours = AmxLinear(layer)
    given = [torch.randn(rows, 256).bfloat16() for rows in (1, 7, 16, 40)]
    expected, wrong = [ours(each) for each in given], list[int]()

    def run(number: int) -> None:
        for _ in range(50):
            if not torch.equal(ours(given[number]), expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


_ASK = "from headstart.heads.core import amx; print(amx.kernels() is not None)"


@needs_amx
def test_kernels_are_compiled_once_for_a_user(tmp_path: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    ask = [sys.executable, "-c", _ASK]
    assert subprocess.run(ask, env=env, capture_output=True, text=True).stdout == "True\n"
    assert len(list(tmp_path.glob("headstart/*"))) == 1
    found = subprocess.run(ask, env={**env, "CC": "false"}, capture_output=True, text=True)
    assert found.stdout == "True\n" and not found.stderr
    env |= {"XDG_CACHE_HOME": str(tmp_path / "other"), "CC": "false"}
    found = subprocess.run(ask, env=env, capture_output=True, text=True)
    assert found.stdout == "False\n" and found.stderr.count("\n") == 1
    assert "packed for oneDNN" in found.stderr


def test_without_amx_nothing_is_compiled_or_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(amx, "_has_tiles", lambda: False)
    monkeypatch.setattr(amx, "_compile", lambda into: pytest.fail("it compiles"))
    with caplog.at_level(logging.DEBUG):
        assert amx.kernels.__wrapped__() is None
    assert not caplog.text


def test_huge_pages_change_no_number() -> None:
    tensor = torch.arange(3 << 20)
    address, before = tensor.data_ptr(), tensor.clone()
    amx.use_huge_pages([tensor, tensor[:0]])
    assert tensor.data_ptr() == address and torch.equal(tensor, before)
