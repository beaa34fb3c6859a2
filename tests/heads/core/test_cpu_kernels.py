"""The kernels for few rows on a CPU compute what torch's own operators do, and are had or not."""

import copy
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from headstart.heads.core import cpu_compile, cpu_kernels
from headstart.heads.core.cache import plain_move
from headstart.heads.core.cpu_compile import kernels
from headstart.heads.core.cpu_kernels import CpuLinear

SLACK = {torch.bfloat16: 1.02, torch.float32: 1.5}
"""How many times as far from float64 as torch's own: in float32 sums have another order."""

LEAST = 2 * torch.finfo(torch.float32).eps
"""So far off is exact enough; of few numbers torch's own may all but be exact."""


def off(found: Tensor, true: Tensor) -> float:
    return ((found.double() - true).norm() / true.norm()).item()


def layers(size: int, outputs: tuple[int, ...], bias: bool, dtype: torch.dtype) -> list[nn.Linear]:
    torch.manual_seed(0)
    made = [nn.Linear(size, each, bias=bias, dtype=dtype) for each in outputs]
    return [each.requires_grad_(False) for each in made]


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 33, 64])
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_as_exact_as_torchs(rows: int, bias: bool, kernel_type: torch.dtype) -> None:
    """One to three layers, of which the second has fewer outputs; and a gated product."""
    for size, outputs in ((768, (768, 64, 256)), (96, (16,)), (32, (48, 48))):
        own = layers(size, outputs, bias, kernel_type)
        states = torch.randn(1, rows, size).to(kernel_type)
        ours = [CpuLinear(each) for each in own]
        assert cpu_kernels.together(ours, states)
        true = [wide(each)(states.double()) for each in own]
        for found, each, exact in zip(cpu_kernels.products(ours, states), own, true, strict=True):
            assert found.shape == exact.shape and found.dtype == kernel_type
            assert off(found, exact) <= SLACK[kernel_type] * off(each(states), exact)
        if len(own) == 2:
            found, exact = cpu_kernels.gated(ours[0], ours[1], states), F.silu(true[0]) * true[1]
            torchs = F.silu(own[0](states)) * own[1](states)
            allowed = 1.03 * SLACK[kernel_type] * off(torchs, exact)
            assert off(found, exact) <= max(allowed, LEAST)


@pytest.mark.parametrize("rows", [1, 3, 64, 65])
def test_products_by_weights_of_their_own(rows: int, kernel_type: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = torch.randn(3, 48, 96).to(kernel_type)
    for states in (torch.randn(3, rows, 96), torch.randn(1, rows, 96).expand(3, -1, -1)):
        states = states.to(kernel_type)
        found, exact = (
            cpu_kernels.each_product(states, weights),
            states.double() @ weights.double().mT,
        )
        assert (found is None) == (rows > cpu_kernels.MOST_ROWS)
        if found is not None:
            assert off(found, exact) <= SLACK[kernel_type] * off(
                torch.bmm(states, weights.mT), exact
            )
    assert cpu_kernels.each_product(states[..., :90].contiguous(), weights[..., :90]) is None


def test_a_gate_is_exact_however_large_its_numbers(kernel_type: torch.dtype) -> None:
    own = [CpuLinear(each) for each in layers(32, (32, 32), False, kernel_type)]
    for each in own:
        each.weight.data = torch.eye(32, dtype=kernel_type)
    states = torch.linspace(-200, 200, 64 * 32).view(64, 32).to(kernel_type)
    true = F.silu(states.double()) * states.double()
    found = cpu_kernels.gated(own[0], own[1], states).double()
    slack = {torch.bfloat16: 2**-7, torch.float32: 5e-7}[kernel_type]
    torch.testing.assert_close(found, true, rtol=slack, atol=1e-30)


def wide(layer: nn.Linear) -> nn.Linear:
    return copy.deepcopy(layer).double()


def test_a_layer_is_torchs_own_where_the_kernels_do_not_fit(kernel_type: torch.dtype) -> None:
    (own,) = layers(64, (32,), True, kernel_type)
    ours = CpuLinear(own)
    assert ours.weight is own.weight and ours.bias is own.bias
    for shape in ((65, 64), (0, 64), (2, 80, 64), (64,)):
        states = torch.randn(shape).to(kernel_type)
        torch.testing.assert_close(ours(states), own(states), rtol=2e-2, atol=2e-2)
    assert not cpu_kernels.together([ours], torch.randn(65, 64).to(kernel_type))
    assert not cpu_kernels.together([ours], torch.randn(2, 64).half())
    learns = torch.randn(2, 64).to(kernel_type).requires_grad_()
    ours(learns).sum().backward()
    assert learns.grad is not None
    assert torch.equal(wide(ours)(learns.double()), wide(own)(learns.double()))
    for size, outputs in ((33, 32), (32, 17)):
        assert not cpu_kernels.fits_kernels(nn.Linear(size, outputs, dtype=kernel_type))
    assert not cpu_kernels.fits_kernels(nn.Linear(32, 32, dtype=torch.float64))
    assert cpu_kernels.fits_kernels(own) and not cpu_kernels.fits_kernels(ours)


def test_layers_that_somebody_listens_to_are_called_one_by_one(kernel_type: torch.dtype) -> None:
    ours: list[Any] = [CpuLinear(each) for each in layers(64, (32, 32), False, kernel_type)]
    states = torch.randn(2, 64).to(kernel_type)
    assert cpu_kernels.together(ours, states)
    ours[1].register_forward_hook(lambda *_: None)
    assert not cpu_kernels.together(ours, states) and cpu_kernels.together(ours[:1], states)


def test_norm_and_rotary_embedding_are_transformers_own(kernel_type: torch.dtype) -> None:
    torch.manual_seed(0)
    states = torch.randn(2, 3, 96).to(kernel_type) * 4
    norm = LlamaRMSNorm(96, eps=1e-5).to(kernel_type)
    norm.weight.data = torch.randn(96).to(kernel_type)
    with torch.no_grad():
        found = cpu_kernels.norm(states, norm.weight, 1e-5)
        assert found is not None
        true = F.rms_norm(states.double(), (96,), norm.weight.double(), 1e-5)
        assert off(found, true) <= SLACK[kernel_type] * off(norm(states), true)
        assert cpu_kernels.norm(states.half(), norm.weight, 1e-5) is None
    query, key = (torch.randn(2, 3, heads, 64).to(kernel_type).transpose(1, 2) for heads in (4, 2))
    angle = torch.randn(2, 3, 64)
    cos, sin = angle.cos().to(kernel_type), angle.sin().to(kernel_type)
    turned = cpu_kernels.rotate((query, key), cos, sin)
    wide: Any = [each.double() for each in (query, key, cos, sin)]
    own = apply_rotary_pos_emb(query, key, cos, sin)
    assert turned is not None
    for found, each, exact in zip(turned, own, apply_rotary_pos_emb(*wide), strict=True):
        assert off(found, exact) <= off(each, exact)
    assert cpu_kernels.rotate((query.contiguous(), key), cos, sin) is None


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("nodes", [1, 5, 21])
@pytest.mark.parametrize("slots", [1, 3, 16, 70, 131])
def test_attention_is_torchs(groups: int, nodes: int, slots: int, kernel_type: torch.dtype) -> None:
    """Of keys and wider values whose heads stand behind one another; masks of one or each."""
    torch.manual_seed(0)
    slab = torch.randn(2, 140, 2, 160).to(kernel_type)
    key, value = slab.transpose(1, 2).narrow(2, 0, slots).split([64, 96], -1)
    query = torch.randn(2, nodes, 2 * groups, 64).to(kernel_type).transpose(1, 2)
    hidden = torch.rand(2, 1, nodes, 2 * slots) < 0.4
    hidden[..., :slots][..., 0] = hidden[..., slots:][..., 0] = False
    lowest = torch.finfo(kernel_type).min
    mask = torch.zeros(hidden.shape).to(kernel_type).masked_fill(hidden, lowest)
    mask = mask.narrow(3, slots, slots)
    for given in (None, mask, mask[:1]):
        found = cpu_kernels.attend(query, key, value, given, 0.3)
        wide: Any = [None if each is None else each.double() for each in (query, key, value, given)]
        narrow: Any = query, key, value, given
        own, true = (
            F.scaled_dot_product_attention(
                each[0], each[1], each[2], each[3], scale=0.3, enable_gqa=True
            ).transpose(1, 2)
            for each in (narrow, wide)
        )
        assert found is not None and found.is_contiguous()
        assert off(found, true) <= max(1.03 * SLACK[kernel_type] * off(own, true), LEAST)
    assert cpu_kernels.attend(query.half(), key, value, None, 0.3) is None
    assert cpu_kernels.attend(query[..., :16], key[..., :16], value, None, 0.3) is None


def test_threads_run_the_kernels_at_once(kernel_type: torch.dtype) -> None:
    (layer,) = layers(256, (512,), True, kernel_type)
    ours = CpuLinear(layer)
    given = [torch.randn(rows, 256).to(kernel_type) for rows in (1, 7, 16, 40)]
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


_ASK = """
import torch
from headstart.heads.core.cpu_compile import kernels
print([kernels(dtype) is not None for dtype in (torch.bfloat16, torch.float32) * 2])
"""


@pytest.mark.skipif(kernels(torch.float32) is None, reason="needs AVX2 and a C compiler")
def test_kernels_are_compiled_once_for_a_user(tmp_path: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    ask = [sys.executable, "-c", _ASK]
    had, none = "[True, True, True, True]\n", "[False, False, False, False]\n"
    assert subprocess.run(ask, env=env, capture_output=True, text=True).stdout == had
    assert len(list(tmp_path.glob("headstart/*"))) == 2
    found = subprocess.run(ask, env={**env, "CC": "false"}, capture_output=True, text=True)
    assert found.stdout == had and not found.stderr
    env |= {"XDG_CACHE_HOME": str(tmp_path / "other"), "CC": "false"}
    found = subprocess.run(ask, env=env, capture_output=True, text=True)
    assert found.stdout == none and found.stderr.count("\n") == 1
    assert "packed for oneDNN" in found.stderr


def test_a_set_that_fails_gives_way_to_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As tiles that the system does not grant; and what the processor lacks is not tried."""
    tried, asked = list[str](), cpu_compile._library.__wrapped__

    def load(chosen: Any, dtype: torch.dtype) -> str:
        tried.append(chosen.name)
        if chosen.name == "avx512":
            raise OSError("not granted")
        return chosen.name

    monkeypatch.setattr(cpu_compile, "_load", load)
    able = dict.fromkeys(("_is_avx512_supported", "_is_avx2_supported"), lambda: True)
    monkeypatch.setattr(torch, "cpu", SimpleNamespace(**able))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with caplog.at_level(logging.DEBUG):
        assert asked(torch.bfloat16, None) == "avx2" and tried == ["avx512", "avx2"]
        assert asked(torch.float16, None) is None
        monkeypatch.setattr(torch, "cpu", SimpleNamespace())
        assert asked(torch.bfloat16, None) is None
    assert len(tried) == 2 and not caplog.text


@pytest.mark.parametrize("batch", [1, 3])
def test_accepted_paths_are_moved_as_torch_moves_them(batch: int, kernel_type: torch.dtype) -> None:
    slots = 40
    rows = torch.arange(5 * batch * slots * 6).view(5, batch * slots, 2, 3).to(kernel_type)
    paths = torch.tensor([[0, 2, 4, 4], [3, 2, 1, 0], [1, 1, 5, 3]])[:batch]
    firsts = torch.arange(batch).unsqueeze(1) * slots
    even = firsts + torch.arange(7, 13)  # as `range(7, 13)` says it
    uneven = even + torch.tensor([[3], [0], [21]])[:batch]
    strided = uneven.mT.contiguous().mT
    for given, flat in ((range(7, 13), even), (uneven, uneven), (strided, uneven)):
        plain, ours = rows.clone(), rows.clone()
        plain_move(plain, flat, paths)
        assert cpu_kernels.move_path(ours, given, paths) and torch.equal(ours, plain)
    assert not cpu_kernels.move_path(rows.mT, even, paths)
    assert not cpu_kernels.move_path(rows.double(), even, paths)


def test_huge_pages_change_no_number() -> None:
    tensor = torch.arange(3 << 20)
    address, before = tensor.data_ptr(), tensor.clone()
    cpu_kernels.use_huge_pages([tensor, tensor[:0]])
    assert tensor.data_ptr() == address and torch.equal(tensor, before)


def huge_bytes() -> int:
    """Of this process, what the system keeps in huge pages."""
    found = re.search(r"AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    return 0 if found is None else int(found[1]) << 10


def test_small_weights_share_huge_pages() -> None:
    """Of weights smaller than a huge page, each of which is first written to what fits in it."""
    if sys.platform != "linux":
        pytest.skip("other systems are not told")
    size, before = 1200 << 10, huge_bytes()
    plain = [torch.zeros(size, dtype=torch.uint8).fill_(7) for _ in range(40)]
    cpu_kernels.use_huge_pages(plain)
    if huge_bytes() - before < 20 * size:
        pytest.skip("this system keeps none on demand")
    before = huge_bytes()
    given = torch.full((size,), 7, dtype=torch.uint8)
    made = [cpu_kernels.in_huge_pages(given) for _ in range(40)]
    cpu_kernels.use_huge_pages(made)
    assert huge_bytes() - before > 20 * size
    assert all(torch.equal(each, given) for each in made)
