"""Fused operators do what the model's own do, in fewer launches."""

import json
import threading
from typing import Any

import pytest
import torch

from headstart.heads import OptionError, UnsupportedTarget
from headstart.heads.core import FusedLayers, fused, fused_products
from headstart.infer import Speculator
from headstart.infer.target import Target
from tests.support.families import TREES, drafter, target
from tests.support.interpreter import run_interpreted, without_triton
from tests.support.tape import SAMPLED, decode
from tests.support.tiny import CONFIGS, one_line, tiny


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
    layers = tiny(name).config.num_hidden_layers
    assert found.found["projections"] == (0 if name == "gpt2" else layers)
    ids = torch.arange(9).view(1, -1)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    expected = tiny(name).generate(ids, **options)
    assert torch.equal(Speculator(tiny(name), fused=True).generate(ids, **options), expected)


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
    from headstart.heads.core import product_kernels

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
    states = torch.randn(2, 9, 40)
    for sizes, bias in (((70, 20, 33), True), ((16, 16, 16), False)):
        weights = [torch.randn(size, 40) / 8 for size in sizes]
        biases = [torch.randn(size) for size in sizes] if bias else []
        pairs = zip(
            product_kernels.three_layers(states, weights, biases),
            fused_products.three_layers(states, weights, biases, 0),
            strict=True,
        )
        found[f"three {bias}"] = torch.stack([(a - b).abs().max() for a, b in pairs])
        weights, biases = [weights[0], weights[0].flip(0)], biases[:1] * 2
        found[f"gated layers {bias}"] = product_kernels.gated_layers(
            states[:1, :1], weights, biases
        ) - fused_products.gated_layers(states[:1, :1], weights, biases, 0)
    found["write"] = torch.stack([(a - b).abs().max() for a, b in zip(ours, theirs, strict=True)])
    return {name: float(each.abs().max()) for name, each in found.items()}


@without_triton
def test_kernels_in_the_interpreter() -> None:
    off = run_interpreted(__name__)
    assert len(off) == 9 and all(each <= 3e-5 for each in off.values()), off


if __name__ == "__main__":
    print(json.dumps(worst()))
