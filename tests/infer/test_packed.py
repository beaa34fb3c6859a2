"""Decoding on packed weights writes the same text, and changes nothing of what was passed in."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.heads import DrafterGroup
from headstart.heads.core import PackedLinear, Packing, packing
from headstart.infer import Speculator
from tests.support.families import TREES, UNIONS, drafter
from tests.support.tiny import prompts, tiny

IDS, _ = prompts([7, 7, 7])
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
FAMILIES = [
    "medusa", "medusa2", "redrafter", "hydra", "eagle", "eagle3", "draft_model", "lookup",
    *UNIONS,
]  # fmt: skip


@pytest.fixture(autouse=True)
def small_layers_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_LEAST", dict.fromkeys(packing._LEAST, 0))


def own(name: str | None, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A target and drafters that no other test shares."""
    model = copy.deepcopy(tiny("llama")).to(dtype)
    if name is None:
        return model, None
    given: Any = DrafterGroup.of(drafter(name, "tiny")).drafters
    found = [copy.deepcopy(each).to(dtype) for each in given]
    group = DrafterGroup(found)
    group.bind(model)
    return model, group


def packed_in(module: Any) -> list[Any]:
    return [part for part in module.modules() if isinstance(part, PackedLinear)]


def state(module: Any) -> list[Any]:
    """What a packed copy could change of a module."""
    parts = [(name, type(part), vars(part).keys()) for name, part in module.named_modules()]
    hooks = [len(part._forward_hooks) for part in module.modules()]
    weights = [(name, w.data_ptr(), w._version) for name, w in module.named_parameters()]
    return [parts, hooks, weights]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_text_is_that_of_generate(name: str) -> None:
    model, group = own(name)
    before = [state(each) for each in (model, *group.drafters)]
    tree = "+".join([TREES[0]] * len(group.drafters)) if name in UNIONS else TREES[1]
    ours = Speculator(model, group, tree=tree, compile=True)
    assert torch.equal(ours.generate(IDS, **GREEDY), model.generate(IDS, **GREEDY))
    eager = Speculator(model, group, tree=tree)
    for options in (GREEDY, {**GREEDY, "do_sample": True, "seed": 3}):
        text = ours.generate(IDS, **options)
        assert torch.equal(text, eager.generate(IDS, **options))
        assert ours.stats.counts.tolist() == eager.stats.counts.tolist()
    del eager
    if "draft" in name or "eagle" in name:
        assert any(packed_in(each) for each in ours.decoding_drafters.drafters)
    after = [state(each) for each in (model, *group.drafters)]
    assert before == after
    assert not any(map(packed_in, (model, *group.drafters)))


def test_every_linear_layer_of_the_target_runs_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none of them as it was: the text does not come from the model's own layers."""
    model, _ = own(None)
    ours, expected = Speculator(model, compile=True), model.generate(IDS, **GREEDY)
    called = list[torch.nn.Module]()

    def refuse(self: Any, input: Tensor) -> Tensor:
        called.append(self)
        raise AssertionError("a layer that is not packed")

    monkeypatch.setattr(torch.nn.Linear, "forward", refuse)
    assert torch.equal(ours.generate(IDS, **GREEDY), expected) and not called
    with pytest.raises(AssertionError, match="not packed"):
        Speculator(model, compile=False)


def test_a_trained_weight_and_a_moved_model_are_packed_anew() -> None:
    model, group = own("eagle3")
    ours = Speculator(model, group, tree="chain:2", compile=True)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for each in (model, *group.drafters):
            each.to(dtype)
        text, eager = (
            each.generate(IDS, **GREEDY)
            for each in (ours, Speculator(model, group, tree="chain:2"))
        )
        assert torch.equal(text, eager)
        copies = packed_in(ours.target.runner)
        assert bool(copies) == packing.packable(model.lm_head) == (dtype != torch.float64)
        assert all(each.weight.dtype == dtype for each in copies)


def test_float64_is_run_as_it_is() -> None:
    model, group = own("medusa", torch.float64)
    ours = Speculator(model, group, compile=True)
    assert ours.target.runner is model and ours.decoding_drafters.drafters == group.drafters


def test_a_layer_that_errs_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: with products that lose some digits, the trial leaves every layer as it is."""
    model, _ = own(None)
    true = packing._product
    monkeypatch.setattr(packing, "_product", lambda x, *rest: true(x.bfloat16().float(), *rest))
    assert not packed_in(Packing().copy(model))
    monkeypatch.setattr(packing, "_product", true)
    assert len(packed_in(Packing().copy(model))) == sum(
        type(part) is torch.nn.Linear for part in model.modules()
    )


def test_a_layer_whose_call_costs_more_than_its_product_is_not_packed() -> None:
    sizes = {torch.float32: 384, torch.bfloat16: 128}
    for dtype, size in sizes.items():
        packing._LEAST[dtype] = size * 128 * dtype.itemsize
        assert packing.packable(torch.nn.Linear(128, size, dtype=dtype))
        assert not packing.packable(torch.nn.Linear(128, size - 1, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_packed_layer_is_as_exact(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(96, 200, dtype=dtype)
    if not packing.packable(layer):
        pytest.skip(f"this processor packs no {dtype}")
    ours = PackedLinear(layer)
    assert ours.weight is layer.weight and ours.bias is layer.bias
    with torch.no_grad():
        for shape in ((96,), (1, 96), (3, 5, 96), (0, 96)):
            rows = torch.randn(shape).to(dtype)
            true = torch.nn.functional.linear(
                rows.double(), layer.weight.double(), layer.bias.double()
            )
            found = ours(rows)
            assert found.shape == true.shape and found.dtype == dtype
            close = torch.finfo(dtype).eps
            torch.testing.assert_close(found.double(), true, rtol=4 * close, atol=4 * close)
