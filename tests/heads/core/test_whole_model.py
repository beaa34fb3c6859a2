"""A model's layers as one call write what its own loop writes, or leave the work to it."""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn

import headstart
from headstart.heads.core import CACHE, whole_model
from headstart.heads.core.few_rows import few_rows
from headstart.heads.core.whole_layer import WholeLayers
from headstart.heads.core.whole_model import WholeModel, take_whole_models
from headstart.infer import Speculator
from headstart.infer.measure.lossless_greedy import compare_greedy
from tests.support.tiny import large_enough, prompts

GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of a model was one call of all its layers."""
    seen, true = list[bool](), WholeModel.run

    def counted(self: WholeModel, *args: Any, **options: Any) -> Any:
        found = true(self, *args, **options)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(WholeModel, "run", counted)
    return seen


def decoder(speculator: Speculator) -> Any:
    """What of a model runs whole."""
    runner: Any = speculator.target.runner
    return runner.model


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("tree", ["plain", "chain:3"])
def test_its_text_is_the_models(name: str, tree: str, ran: list[bool]) -> None:
    model = large_enough(torch.float32, name)
    drafter = None if tree == "plain" else "lookup"
    ours = headstart.load(model, drafter, tree=tree, compile=True)
    rows = [row.unsqueeze(0) for row in prompts([9] * 3, seed=5)[0]]
    assert compare_greedy(ours, rows, 24).holds
    # A lone root has no mask, so a model with a window makes one.
    assert ran[1:] and all(ran[1:]) == (name != "mistral" or drafter is not None)


def test_texts_past_the_table_of_angles_and_of_another_type(ran: list[bool]) -> None:
    model = large_enough(torch.float32)
    ours = Speculator(model, compile=True)
    ids = prompts([9])[0]
    short = ours.generate(ids, **GREEDY)
    long = ours.generate(ids, **{**GREEDY, "max_new_tokens": 180})
    assert torch.equal(long[:, : short.shape[1]], short)
    own = model.generate(ids, **{**GREEDY, "max_new_tokens": 180})
    assert torch.equal(long, own)
    rotary = decoder(ours).rotary_emb
    rotary.inv_freq.mul_(2)  # in place, as a longer context's would be
    changed = ours.generate(ids, **GREEDY)
    assert torch.equal(changed, model.generate(ids, **GREEDY))  # it has the same frequencies
    assert not torch.equal(changed, short) and sum(ran) > 200


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_angles_that_go_by_the_texts_length_are_not_looked_up(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}
    model = large_enough(torch.float32, rope_parameters=scaled)
    ours = Speculator(model, compile=True)
    ids, asked = prompts([9])[0], list[int]()
    rotary = type(decoder(ours).rotary_emb)
    own = rotary.forward

    def counted(self: Any, states: torch.Tensor, position_ids: torch.Tensor) -> Any:
        asked.append(position_ids.numel())
        return own(self, states, position_ids)

    monkeypatch.setattr(rotary, "forward", counted)
    found = ours.generate(ids, **GREEDY)
    assert asked == [9, *([1] * 23 if kind == "dynamic" else [])]  # the prompt, and each round
    assert torch.equal(found, model.generate(ids, **GREEDY))


@pytest.mark.parametrize("part", ["model", "embed_tokens", "rotary_emb", "norm", "layers.1.mlp"])
def test_hooks_are_called(part: str, ran: list[bool]) -> None:
    ours = Speculator(large_enough(torch.float32), compile=True)
    ids, heard = prompts([9])[0], list[int]()
    before = ours.generate(ids, **GREEDY)
    inner = decoder(ours)
    module = inner if part == "model" else inner.get_submodule(part)
    handle = module.register_forward_hook(lambda *_: heard.append(1))
    assert torch.equal(ours.generate(ids, **GREEDY), before) and len(heard) >= 24
    handle.remove()
    ran.clear()
    ours.generate(ids, **GREEDY)
    assert len(heard) < 60 and ran and all(ran[1:])


def test_nothing_is_done_twice_where_a_layer_is_listened_to() -> None:
    ours = Speculator(large_enough(torch.float32), compile=True)
    inner, heard = decoder(ours), list[int]()
    inner.layers[1].register_forward_hook(lambda *_: None)
    for part in (inner.embed_tokens, inner.rotary_emb):
        part.register_forward_hook(lambda *_: heard.append(1))
    ours.generate(prompts([9])[0], **GREEDY)
    assert len(heard) == 2 * 24  # the prompt, and each round


@pytest.mark.parametrize(
    "name",
    ["layers.1.self_attn.o_proj", "layers.1.mlp", "layers.1.input_layernorm", "layers.0", "norm"],
)
def test_a_part_that_is_replaced_runs(name: str, ran: list[bool]) -> None:
    ours = Speculator(large_enough(torch.float32), compile=True)
    ids = prompts([9])[0]
    before = ours.generate(ids, **GREEDY)
    inner = decoder(ours)
    of, _, last = name.rpartition(".")
    own = inner.get_submodule(name)
    setattr(inner.get_submodule(of), last, _Negated(own))
    ran.clear()
    assert not torch.equal(ours.generate(ids, **GREEDY), before) and not any(ran)
    setattr(inner.get_submodule(of), last, own)
    assert torch.equal(ours.generate(ids, **GREEDY), before) and any(ran)


class _Negated(nn.Module):
    """A part of a model whose output has the other sign."""

    def __init__(self, own: nn.Module):
        super().__init__()
        self.own = own

    def forward(self, *args: Any, **options: Any) -> torch.Tensor:
        return -self.own(*args, **options)


def test_weights_that_are_moved_or_changed_are_read_where_they_are() -> None:
    ours = Speculator(large_enough(torch.float32), compile=True)
    ids = prompts([9])[0]
    before = ours.generate(ids, **GREEDY)
    weight = decoder(ours).layers[0].mlp.down_proj.weight
    weight.data = weight.data.clone()
    assert torch.equal(ours.generate(ids, **GREEDY), before)
    weight.data = -weight.data
    changed = ours.generate(ids, **GREEDY)
    assert not torch.equal(changed, before)
    weight.data.neg_()
    assert torch.equal(ours.generate(ids, **GREEDY), before)


def test_weights_that_are_moved_within_a_text_are_not_read_where_they_were() -> None:
    ours = Speculator(large_enough(torch.float32), compile=True)
    ours.generate(prompts([9])[0], **GREEDY)
    inner, cache = decoder(ours), ours.target.cache
    states = torch.randn(1, 1, 256)

    def run() -> torch.Tensor:
        cache.set_slots(range(9, 10), 10, 9)
        place = torch.tensor([[9]])
        with torch.no_grad(), few_rows():
            return inner(inputs_embeds=states, position_ids=place, **{CACHE: cache})[0]

    before, weight = run(), inner.layers[0].mlp.down_proj.weight
    old = weight.data
    weight.data = -old
    changed = run()
    old.fill_(torch.nan)
    assert not torch.equal(changed, before) and torch.equal(run(), changed)


@pytest.mark.parametrize("what", ["type", "shape"])
def test_weights_that_do_not_fit_are_left_to_torch(what: str, ran: list[bool]) -> None:
    ours = Speculator(large_enough(torch.float32), compile=True)
    ours.generate(prompts([9])[0], **GREEDY)
    inner, cache = decoder(ours), ours.target.cache
    for layer in inner.layers:
        down = layer.mlp.down_proj
        if what == "type":
            layer.to(torch.bfloat16)
        else:
            down.weight = nn.Parameter(down.weight[:, :256].contiguous())
    if what == "type":
        inner.norm.to(torch.bfloat16)
    cache.clear()  # as for another text
    cache.set_slots(range(9, 10), 10, 9)
    whole: Any = vars(inner)["forward"].args[1].__self__
    place, states = torch.tensor([[9]]), torch.randn(1, 1, 256)
    with torch.no_grad():
        given: dict[str, Any] = {"position_ids": place, CACHE: cache}
        assert whole.run(inputs_embeds=states, **given) is None
    assert any(ran)


def test_a_model_that_does_something_else_keeps_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Speculator(large_enough(torch.float32), compile=True)
    copied = copy.deepcopy(decoder(ours))
    assert take_whole_models(copied) == len(copied.layers)  # copies run whole, on their own weights
    run: Any = vars(copied)["forward"].args[1].__self__
    assert run.model is copied and run.layers.layers[0].layer is copied.layers[0]
    del copied.forward
    with torch.no_grad():
        copied.norm.weight[:] = torch.nan  # so nothing is equal
    take_whole_models(copied)
    assert "forward" not in vars(copied)
    with torch.no_grad():
        copied.norm.weight[:] = 1
    monkeypatch.setattr(whole_model, "_models", tuple)
    take_whole_models(copied)
    assert "forward" not in vars(copied)
    monkeypatch.undo()
    take_whole_models(copied)
    assert "forward" in vars(copied)


def test_threads_with_caches_of_their_own_share_a_model() -> None:
    ours = Speculator(large_enough(torch.float32), compile=True)
    inputs = [prompts([length], seed=length)[0] for length in (5, 9, 14)]
    alone = [ours.generate(ids, **GREEDY) for ids in inputs]
    runner: Any = ours.target.runner
    found: list[Any] = [None] * len(inputs)

    def decode(number: int) -> None:
        mine = Speculator(runner, compile=True)
        for _ in range(4):
            found[number] = mine.generate(inputs[number], **GREEDY)

    threads = [threading.Thread(target=decode, args=(number,)) for number in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(*pair) for pair in zip(found, alone, strict=True))


def test_gradients_run_through_the_models_own_loop() -> None:
    model = large_enough(torch.float32)
    ours = Speculator(model, compile=True)
    ours.generate(prompts([9])[0], **GREEDY)
    layers = [each for each in decoder(ours).modules() if hasattr(each, "self_attn")]
    whole = WholeLayers([vars(layers[0])["forward"].args[1].__self__.layers[0]])
    cache = ours.target.cache
    cache.set_slots(range(9, 10), 10, 9)
    angles = (torch.ones(1, 1, 64), torch.zeros(1, 1, 64))
    given: dict[str, Any] = {CACHE: cache, "position_embeddings": angles}
    states = torch.randn(1, 1, 256)
    assert whole.run(states, **given) is None  # the weights learn
    with torch.no_grad():
        assert whole.run(states, **given) is not None
