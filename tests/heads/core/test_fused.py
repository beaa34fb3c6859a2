"""Fused operators do what the model's own do, in fewer launches."""

import copy
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headstart.heads import OptionError, UnsupportedTarget
from headstart.heads.core import FusedLayers, fused, tree_attention
from headstart.infer import Speculator
from headstart.infer.target import Target
from tests.support.families import TREES, drafter, target
from tests.support.interpreter import run_interpreted, without_triton
from tests.support.tape import SAMPLED, decode
from tests.support.tiny import CONFIGS, one_line, tiny


class Launches(TorchDispatchMode):
    """Counts operators that a GPU would launch a kernel for: all but views and empty tensors."""

    count, _paused = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [entry.alias_info for entry in func._schema.returns]
        views = bool(aliases) and all(a is not None and not a.is_write for a in aliases)
        name = func.overloadpacket.__name__
        self.count += not (views or self._paused or name.startswith(("empty", "new_empty")))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def as_many(self, launches: int) -> Iterator[None]:
        """Count what is done meanwhile as so many."""
        self.count, self._paused = self.count + launches, True
        try:
            yield
        finally:
            self._paused = False


def launches(runner: Target, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of a plain token's forward behind three others; tree attention is a kernel and a merge."""
    counted, true = Launches(), tree_attention.tree_attention

    def attend(*given: Any) -> Tensor:
        with counted.as_many(2):
            return true(*given)

    monkeypatch.setattr(tree_attention, "tree_attention", attend)
    from headstart.heads import TokenTree
    from headstart.infer.request import ROOT_ONLY

    with torch.no_grad():
        runner.prefill(torch.tensor([[5, 6, 7]]), [3], 8)
        topology, row = ROOT_ONLY.shape(1, torch.device("cpu"))
        tree = TokenTree(torch.tensor([[8]]), topology, None, row)
        with counted:
            runner.verify(tree, torch.tensor([3]), 3)
    monkeypatch.undo()
    return counted.count


def test_a_plain_token_takes_fewer_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each layer of a Llama: of two norms 14, of rotary 9, of writes 1, of gated products 1."""
    model = target("tiny")
    plain, fewer = (
        launches(Target(model, (), "tree", fused=fused), monkeypatch) for fused in (False, True)
    )
    layers = model.config.num_hidden_layers
    assert fewer <= 0.6 * plain, (plain, fewer)
    assert plain - fewer == 25 * layers + 7, (plain, fewer)  # and the last norm


@pytest.mark.parametrize("name", ["medusa", "draft_model"])
def test_the_text_is_the_same(name: str) -> None:
    """In float64, greedy and sampled."""
    made = [
        Speculator(
            target("tiny"), drafter(name, "tiny"), tree=TREES[1], attention="tree", fused=fused
        )
        for fused in (True, False)
    ]
    for turn, options in enumerate(({}, SAMPLED)):
        texts = [decode(each, 4, turn, **options) for each in made]
        assert torch.equal(*texts)
        assert made[0].stats.counts.tolist() == made[1].stats.counts.tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_not_alike_stays_what_it_is(name: str) -> None:
    """Gemma's norm adds one to its weights, GPT-2 has none of these layers."""
    found = Target(tiny(name), fused=True).fused
    assert found is not None
    norms = {"llama": 5, "mistral": 5, "qwen3": 9, "gemma3": 0, "gpt2": 0}
    gated = {"llama": 2, "mistral": 2, "qwen3": 2, "gemma3": 0, "gpt2": 0}
    assert (found.found["norms"], found.found["gated layers"]) == (norms[name], gated[name])
    ids = torch.arange(9).view(1, -1)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    expected = tiny(name).generate(ids, **options)
    assert torch.equal(Speculator(tiny(name), fused=True).generate(ids, **options), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_on_a_cpu_fewer_operators_compute_the_same(name: str, dtype: torch.dtype) -> None:
    """Beside packed weights too; no further from float64 than the model itself."""
    model = copy.deepcopy(tiny(name)).to(dtype)
    runner = Target(model, fused=True, compile=True)
    assert runner.fused is not None and runner.fused.found["rotary"] == 1
    ids = torch.arange(24).view(2, -1)
    with torch.no_grad():
        true = copy.deepcopy(model).double()(ids).logits
        own = runner.runner(ids).logits
        with runner.fused:
            found = runner.runner(ids).logits
    assert not torch.equal(found, own)  # it ran
    off, most = ((each.double() - true).abs().mean() for each in (found, own))
    assert off <= 1.5 * most
    assert "forward" not in vars(model.model.norm) or runner.runner is model


def test_another_thread_runs_the_model_as_it_is() -> None:
    model, seen = target("tiny"), []
    with FusedLayers(model):
        assert fused.is_fused()
        thread = threading.Thread(target=lambda: seen.append(fused.is_fused()))
        thread.start()
        thread.join()
    assert seen == [False] and not fused.is_fused()


def test_a_fused_layer_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="fused and compile") as caught:
        Speculator(target("tiny"), fused=True, compile="default")
    one_line(caught.value)
    monkeypatch.setattr(fused, "rotate", lambda query, key, cos, sin: (query, key))
    with pytest.raises(UnsupportedTarget, match="other logits with fused layers") as refused:
        Target(target("tiny"), fused=True)
    one_line(refused.value)


def worst() -> dict[str, float]:
    """The largest difference of each kernel from its definition, and its launches."""
    from headstart.heads.core import fused_kernels as kernels

    torch.manual_seed(0)
    found = {}
    states, weight = torch.randn(2, 3, 48), torch.randn(48)
    found["norm"] = kernels.rms_norm(states, weight, 1e-5) - fused.rms_norm(states, weight, 1e-5)
    gate, up = torch.randn(2, 3, 700), torch.randn(2, 3, 700)
    found["gated"] = kernels.gated(gate, up) - fused.gated(gate, up)
    query, key = (torch.randn(2, 3, heads, 24).transpose(1, 2) for heads in (4, 2))
    angles = torch.randn(2, 1, 3, 24)
    for rows in (2, 1):
        given: list[Any] = [query[:rows], key[:rows]]
        given += [angle.expand(rows, -1, -1) for angle in angles]
        plain: Any = fused.rotate(*given)
        pairs = zip(kernels.rotate(*given), plain, strict=True)
        found[f"rotate {rows}"] = torch.stack([(a - b).abs().max() for a, b in pairs])
    slots, value = torch.tensor([3, 4, 5, 12, 9, 8]), torch.randn(2, 2, 3, 10)
    ours, theirs = ([torch.zeros(16, 2, 24), torch.zeros(16, 2, 10)] for _ in range(2))
    kernels.write(ours[0], ours[1], slots, key, value)
    fused.write(theirs[0], theirs[1], slots, key, value)
    found["write"] = torch.stack([(a - b).abs().max() for a, b in zip(ours, theirs, strict=True)])
    return {name: float(each.abs().max()) for name, each in found.items()}


@without_triton
def test_kernels_in_the_interpreter() -> None:
    off = run_interpreted(__name__)
    assert len(off) == 5 and all(each <= 1e-5 for each in off.values()), off


@without_triton
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_gpus_that_are_not_here(
    capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import triton  # type: ignore[import-not-found]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]

    from headstart.heads.core import fused_kernels as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # so that it does compile
    types = {"slots": "*i64", "eps": "fp32"}
    pointers = {"states", "weight", "out", "gate", "up", "q", "k", "v", "q_out", "k_out", "cos"}
    types |= dict.fromkeys(pointers | {"sin", "keys", "values"}, "*bf16")
    sizes = {"BLOCK": 1024, "HALF": 64}
    for kernel in (kernels._norm, kernels._gated, kernels._turn, kernels._write):
        names: list[str] = kernel.arg_names  # type: ignore[attr-defined]
        signature = {n: "constexpr" if n in sizes else types.get(n, "i32") for n in names}
        constants = {name: size for name, size in sizes.items() if name in names}
        made = triton.compile(
            triton.compiler.ASTSource(kernel, signature, constants),
            target=GPUTarget("cuda", capability, 32),
        )
        assert ".entry" in made.asm["ptx"] and made.metadata.shared <= 4096


if __name__ == "__main__":
    print(json.dumps(worst()))
