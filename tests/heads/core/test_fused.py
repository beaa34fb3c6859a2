"""Fused operators do what the model's own do, in fewer launches."""

import copy
import json
import threading
from collections import Counter
from typing import Any

import pytest
import torch

from headstart.heads import TokenTree, UnsupportedTarget, group
from headstart.heads.core import (
    FusedLayers,
    fused,
    fused_angles,
    fused_norms,
    fused_products,
    fused_writes,
)
from headstart.heads.core.cache import SlabCache
from headstart.infer import Speculator
from headstart.infer.target import Target
from headstart.infer.trees.static import StaticTree
from tests.support.families import TREES, drafter, target
from tests.support.interpreter import run_interpreted, without_triton
from tests.support.operators import Names
from tests.support.tape import SAMPLED, decode, on_tape
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


@pytest.mark.parametrize(
    "name", ["draft_model", "eagle", "hydra", "mtp", "dflash", "pard", "redrafter"]
)
def test_fused_layers_of_drafters_draft_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where they are fused; in float64, in rounds that are replayed."""
    plain = Speculator(target("tiny"), copy.deepcopy(drafter(name, "tiny")), tree=TREES[1])
    texts = [decode(plain, 4, turn) for turn in range(2)]
    counts = plain.stats.counts.tolist()
    monkeypatch.setattr(group, "has_kernels_for", lambda model: True)
    monkeypatch.setattr(fused, "has_kernels", lambda tensor: True)
    ours = Speculator(target("tiny"), copy.deepcopy(drafter(name, "tiny")), tree=TREES[1])
    on_tape(ours)
    written = Names()
    with written:
        assert all(torch.equal(decode(ours, 4, turn), text) for turn, text in enumerate(texts))
    assert ours.stats.counts.tolist() == counts
    assert written.seen["one_layer"]
    if name != "redrafter":
        assert written.seen["three_layers"] and written.seen["rms_norm"]
        assert written.seen["rotate_and_write"] > written.seen["rotate"]


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
        assert fused.fused_writes() is not None
        thread = threading.Thread(target=lambda: seen.append(fused.fused_writes() is not None))
        thread.start()
        thread.join()
    assert seen == [False] and fused.fused_writes() is None


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_layers_stay_what_they_are(dtype: torch.dtype) -> None:
    """Their weights are of a type that no states have."""

    class Quantised(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(input, self.weight.to(input.dtype))

    model = type(tiny("llama"))(tiny("llama").config).eval()  # none of whose layers was fused yet
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(layer.mlp, name).__class__ = Quantised
            weight = (20 * getattr(layer.mlp, name).weight.detach()).to(dtype)
            getattr(layer.mlp, name).weight = torch.nn.Parameter(weight, False)
    found = Target(model, fused=True, attention="tree").fused
    assert found is not None and found.found["gated layers"] == 0 and found.found["norms"] == 5


@pytest.mark.parametrize("timed", [0, 1, 2, 3, 4])
def test_launches_stay_apart_where_there_is_no_memory_to_time_them(
    timed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [1.0, 2.0] * timed  # one launch is faster each time

    def milliseconds(run: Any, states: torch.Tensor) -> float:
        if not left:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return left.pop(0)

    monkeypatch.setattr(fused_products, "has_kernels", lambda states: True)
    monkeypatch.setattr(fused_products, "_milliseconds", milliseconds)
    found = fused_products.rows_together(list, list, torch.ones(1, 8))
    assert found == (0, 1, 16, 64, fused_products.MOST_ROWS)[timed]


@pytest.mark.parametrize("most", [0, 1, 16])
def test_layers_alone_are_left_to_a_kernel_for_as_many_rows_as_that_is_faster(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, with the kernel's definition in its place."""
    monkeypatch.setattr(fused, "has_kernels", lambda states: True)
    monkeypatch.setattr(fused, "rows_together", lambda *given: most)
    model = copy.deepcopy(target("tiny"))
    for module in model.modules():  # other tests may have fused it
        vars(module).pop("forward", None)
    count = 2 * model.config.num_hidden_layers + 1  # the output layer, too
    found = FusedLayers(model)
    assert found.found.get("layers alone", 0) == count * (most > 0)
    size, inner = model.config.hidden_size, model.config.intermediate_size
    assert found.rows[f"{size} x {inner}"] == found.rows[f"{size} x {size}"] == most
    ids = torch.arange(34).view(2, -1)
    for tokens in (ids[:1, :1], ids[:, :8], ids):
        expected, names = model(tokens).logits, Names()
        with found, names:
            assert torch.equal(model(tokens).logits, expected)
        assert names.seen["one_layer"] == count * (tokens.numel() <= most)
    again = FusedLayers(model)
    assert again.found.get("layers alone", 0) == count * (most > 0)


def test_a_fused_layer_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_writes, "rotate", lambda q, k, cos, sin: (q.clone(), k.clone()))
    with pytest.raises(UnsupportedTarget, match="other logits with fused layers") as refused:
        Target(target("tiny"), fused=True)
    one_line(refused.value)


def logits_of(runner: Target) -> tuple[torch.Tensor, Counter[str]]:
    ids = torch.arange(10).view(2, -1)
    topology, row = StaticTree([[0], [1], [0, 0]]).shape(2, ids.device)
    tree = TokenTree(ids[:, :4], topology, None, row)
    with torch.no_grad():
        runner.prefill(ids, [5, 3], 16)
        with Names() as names:
            logits, _ = runner.verify(tree, torch.tensor([5, 3]), 5)
        runner.commit(torch.tensor([[0, 1, 3], [0, 2, 2]]))
        again, _ = runner.verify(tree, torch.tensor([6, 5]), 6)
    return torch.cat([logits, again]), names.seen


CHANGES = {
    "another tensor": lambda key, value: (key.clone(), value),
    "in place": lambda key, value: (key.mul_(2), value),
    "values in place": lambda key, value: (key, value.add_(1)),
    "a layer's heads in another order": lambda key, value: (key, value.flip(1)),
}


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_cache_is_written_with_the_rotary_embedding(name: str) -> None:
    model = copy.deepcopy(tiny(name)).double()
    layers = model.config.num_hidden_layers
    found, seen = logits_of(Target(model, fused=True, attention="tree"))
    expected, _ = logits_of(Target(model, attention="tree"))
    assert torch.equal(found, expected)
    assert (seen["rotate_and_write"], seen["rotate"], seen["write"]) == (layers, 0, 0)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("late", [False, True])
def test_what_a_model_changes_is_written_as_it_is(
    change: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first forward on, and once it was known that it changes nothing."""
    model = copy.deepcopy(tiny("llama")).double()
    runner, plain = Target(model, fused=True, attention="tree"), Target(model, attention="tree")
    layers = [layer.self_attn.q_proj.forward.args[-1] for layer in model.model.layers]
    assert all(layer.hands_on for layer in layers)
    for layer in layers:
        layer.hands_on = late
    true = SlabCache.update

    def update(cache: SlabCache, key: Any, value: Any, layer: int, *args: Any, **more: Any) -> Any:
        return true(cache, *CHANGES[change](key, value), layer, *args)

    monkeypatch.setattr(SlabCache, "update", update)
    found, seen = logits_of(runner)
    assert torch.equal(found, logits_of(plain)[0])
    assert seen["write"] == len(layers)
    assert seen["rotate_and_write"] == (len(layers) if late else 0)
    assert not any(layer.hands_on for layer in layers)


def worst() -> dict[str, float]:
    """The largest difference of each kernel from its definition, and its launches."""
    from headstart.heads.core import fused_kernels as kernels
    from headstart.heads.core import product_kernels

    torch.manual_seed(0)
    found = {}
    states, weight = torch.randn(2, 3, 48), torch.randn(48)
    found["norm"] = kernels.rms_norm(states, weight, 1e-5) - fused_norms.rms_norm(
        states, weight, 1e-5
    )
    pairs = zip(
        kernels.add_norm(states, states.flip(0), weight, 1e-5),
        fused_norms.add_norm(states, states.flip(0), weight, 1e-5),
        strict=True,
    )
    found["add and norm"] = torch.stack([(a - b).abs().max() for a, b in pairs])
    gate, up = torch.randn(2, 3, 700), torch.randn(2, 3, 700)
    found["gated"] = kernels.gated(gate, up) - fused.gated(gate, up)
    frequencies, positions = 1e4 ** -torch.linspace(0, 1, 12), torch.tensor([[0, 5, 4096, 131_071]])
    for at in (positions[:, 1:], positions.expand(2, -1)):
        pairs = zip(
            kernels.angles(at, frequencies, 1.25, torch.float32),
            fused_angles.angles(at, frequencies, 1.25, states),
            strict=True,
        )
        found[f"angles {at.numel()}"] = torch.stack([(a - b).abs().max() for a, b in pairs])
    query, key = (torch.randn(2, 3, heads, 24).transpose(1, 2) for heads in (4, 2))
    angles = torch.randn(2, 1, 3, 24)
    for rows in (2, 1):
        given: list[Any] = [query[:rows], key[:rows]]
        given += [angle.expand(rows, -1, -1) for angle in angles]
        plain: Any = fused_writes.rotate(*given)
        pairs = zip(kernels.rotate(*given), plain, strict=True)
        found[f"rotate {rows}"] = torch.stack([(a - b).abs().max() for a, b in pairs])
    three = torch.randn(2, 3, 8 * 24).unflatten(-1, (-1, 24)).transpose(1, 2)  # as Phi-3's layer
    given = [*three.split([4, 2, 2], 1)[:2], *(angle.expand(2, -1, -1) for angle in angles)]
    pairs = zip(kernels.rotate(*given), fused_writes.rotate(*given), strict=True)
    found["rotate parts"] = torch.stack([(a - b).abs().max() for a, b in pairs])
    slots, value = torch.tensor([3, 4, 5, 12, 9, 8]), torch.randn(2, 2, 3, 10)
    ours, theirs = ([torch.zeros(16, 2, 24), torch.zeros(16, 2, 10)] for _ in range(2))
    kernels.write(ours[0], ours[1], slots, key, value)
    fused_writes.write(theirs[0], theirs[1], slots, key, value)
    found["write"] = torch.stack([(a - b).abs().max() for a, b in zip(ours, theirs, strict=True)])
    written = [[torch.zeros(16, 2, 24), torch.zeros(16, 2, 10)] for _ in range(2)]
    both: list[list[Any]] = [
        [query, key, *(angle.expand(2, -1, -1) for angle in angles), *each, slots, value]
        for each in written
    ]
    query, key, cos, sin, *given = both[0]
    turned: list[Any] = [
        kernels.rotate(query, key, cos, sin, tuple(given)), fused_writes.rotate_and_write(*both[1])
    ]  # fmt: skip
    pairs = zip([*turned[0], *written[0]], [*turned[1], *written[1]], strict=True)
    found["rotate and write"] = torch.stack([(a - b).abs().max() for a, b in pairs])
    assert all(bool(each.any()) for each in written[0])
    for sizes, width, bias in (((70, 20, 33), 40, True), ((64, 64, 32), 128, False)):
        states = torch.randn(2, 35, width)
        weights = [torch.randn(size, width) / 8 for size in sizes]
        biases = [torch.randn(size) for size in sizes] if bias else []
        for some in (states, states[:, :9], states[:1, :1]):
            pairs = zip(
                product_kernels.three_layers(some, weights, biases),
                fused_products.three_layers(some, weights, biases, 0),
                strict=True,
            )
            off = torch.stack([(a - b).abs().max() for a, b in pairs])
            found[f"three {some.shape[:2].numel()} {bias}"] = off
        weights, biases = [weights[0], weights[0].flip(0)], biases[:1] * 2
        for rows in (1, 9, 70):
            some = states.flatten(0, 1)[:rows]
            found[f"one layer of {rows} {bias}"] = product_kernels.one_layer(
                some, weights[:1], biases[:1]
            ) - fused_products.one_layer(some, weights[:1], biases[:1], 0)
            found[f"gated layers of {rows} {bias}"] = product_kernels.gated_layers(
                some, weights, biases
            ) - fused_products.gated_layers(some, weights, biases, 0)
    return {name: float(each.abs().max()) for name, each in found.items()}


@without_triton
def test_kernels_in_the_interpreter() -> None:
    off = run_interpreted(__name__)
    assert len(off) == 28 and all(each <= 3e-5 for each in off.values()), off


if __name__ == "__main__":
    print(json.dumps(worst()))
