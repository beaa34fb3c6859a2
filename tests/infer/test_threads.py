"""One model, many threads: several speculators and plain `generate` at once, and calls in calls."""

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from headstart.infer import Speculator
from tests.support.families import drafter
from tests.support.tape import Tape
from tests.support.tiny import letters, prompts, tiny

NEW = 20
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
SAMPLED = GREEDY | {"do_sample": True, "temperature": 0.9, "top_k": 0, "seed": 7}
TREE = "[[0],[1],[0,0],[0,1]]"
IDS, MASK = prompts([7])
ROWS, ROWS_MASK = prompts([6, 9])

Job = Callable[[], Tensor]


def text_of(generate: Callable[..., Any], **options: Any) -> Tensor:
    return generate(IDS, attention_mask=MASK, **options)


def plain(**options: Any) -> Tensor:
    return text_of(tiny("llama").generate, **GREEDY | options)


class Pieces(BaseStreamer):
    """Keeps the tokens that it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        pass


class Once(StoppingCriteria):
    """Calls a function once, when so many tokens are written, and stops nothing."""

    def __init__(self, function: Callable[[], Any], at: int = 12):
        self.function, self.at, self.called = function, at, False

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        if input_ids.shape[1] >= self.at and not self.called:
            self.called = True
            self.function()
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.fixture
def stop_strings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stop strings of the model's own, which end its text early."""
    string = "".join(chr(48 + token) for token in plain()[0, 17:19].tolist())
    monkeypatch.setattr(tiny("llama").generation_config, "stop_strings", [string])
    return [string]


def jobs() -> dict[str, Job]:
    """What a server may do with one model; speculators are shared by all threads.

    The model has stop strings of its own, so each call names its tokenizer, or switches them off.
    """
    model, tokenizer = tiny("llama"), letters()
    on, off = {"tokenizer": tokenizer}, {"stop_strings": None}

    def speculator(families: str | None, tree: str, **options: Any) -> Speculator:
        drafters = [drafter(each, "tiny") for each in families.split("+")] if families else None
        return Speculator(model, drafters, tree=tree, **options)

    heads = speculator("medusa", TREE)
    attending = speculator("medusa", TREE, attention="tree")
    cell = speculator("redrafter", "chain:3", attention="tree")
    student = speculator("draft_model", "chain:2")
    two = speculator("medusa+lookup", f"{TREE}+chain:3")
    captured = speculator("medusa", TREE, graphs=True)
    assert captured.graphs is not None
    captured.graphs._capture = Tape()
    alone = speculator(None, "plain", attention="tree")

    def streamed() -> Tensor:
        streamer = Pieces()
        found = text_of(heads.generate, **GREEDY, **off, streamer=streamer)
        assert streamer.tokens == found[0].tolist()
        return found

    def nested(outer: Speculator, inner: Speculator) -> Job:
        def run() -> Tensor:
            texts: list[Tensor] = []

            def call() -> None:
                texts.append(plain(**off))
                texts.append(text_of(inner.generate, **GREEDY, **off))

            criteria = [Once(call)]
            found = text_of(outer.generate, **GREEDY, **off, stopping_criteria=criteria)
            return torch.cat([found, *texts])

        return run

    def rows() -> Tensor:
        return attending.generate(ROWS, attention_mask=ROWS_MASK, **SAMPLED, **off)

    return {
        "plain": lambda: plain(**off),
        "plain, stop strings": lambda: plain(**on),
        "masked": lambda: text_of(heads.generate, **GREEDY, **off),
        "tree attention": lambda: text_of(attending.generate, **GREEDY, **off),
        "stop strings": lambda: text_of(attending.generate, **GREEDY, **on),
        "through generate": lambda: plain(**off, custom_generate=cell),
        "sampled": lambda: text_of(cell.generate, **SAMPLED, **off),
        "sampled rows": rows,
        "streamed": streamed,
        "two drafters": lambda: text_of(two.generate, **GREEDY, **off),
        "draft model": lambda: text_of(student.generate, **SAMPLED, **off),
        "captured": lambda: text_of(captured.generate, **GREEDY, **off),
        "no drafter": lambda: text_of(alone.generate, **GREEDY, **off),
        "nested": nested(heads, cell),
        "nested the other way": nested(cell, heads),
    }


def seen(model: Any) -> dict[str, Any]:
    """All that a request could leave behind on a model."""
    found: dict[str, Any] = {
        "config": model.config.to_dict(),
        "generation config": model.generation_config.to_dict(),
        "attention": dict(AttentionInterface._global_mapping),
        "asked": AttentionInterface.get_interface,
    }
    for name, module in model.named_modules():
        values = {key: id(value) for key, value in vars(module).items()}
        hooks = list(module._forward_hooks) + list(module._forward_pre_hooks)
        config = getattr(module, "config", None)
        found[name] = values, hooks, config and config._attn_implementation, module.training
    for name, value in model.state_dict().items():
        found[f"{name} at"] = value.data_ptr(), value.sum().item()
    return found


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Let threads take turns often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-4)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("stop_strings", "quick_switches")
@pytest.mark.parametrize("seconds", [5, pytest.param(60, marks=pytest.mark.proof)])
def test_eight_threads_on_one_model(seconds: float) -> None:
    """Every text is the one decoded alone, and nothing of a request stays on the model."""
    work = jobs()
    alone = {name: run() for name, run in work.items()}
    assert alone["stop strings"].shape[1] < alone["masked"].shape[1]
    before, end = seen(tiny("llama")), time.monotonic() + seconds
    wrong: list[str] = []
    done = dict.fromkeys(work, 0)

    def serve(number: int) -> None:
        generator = random.Random(number)
        while time.monotonic() < end and not wrong:
            name = generator.choice(sorted(work))
            try:
                if not torch.equal(work[name](), alone[name]):
                    wrong.append(f"{name}: another text")
            except Exception as error:
                wrong.append(f"{name}: {type(error).__name__}: {error}")
            done[name] += 1

    threads = [threading.Thread(target=serve, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 60)
    assert not any(thread.is_alive() for thread in threads), "threads wait for each other"
    assert not wrong, wrong
    assert sum(done.values()) >= 20
    assert seen(tiny("llama")) == before


def in_a_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()), daemon=True)
    thread.start()
    thread.join(60)
    assert found, "the other thread failed, or waits"
    return found[0]


@pytest.mark.parametrize("place", ["within the layers", "after them"])
@pytest.mark.parametrize("attention", ["masked", "tree"])
@pytest.mark.parametrize("family", ["medusa", "redrafter"])
def test_another_forward_in_the_middle_of_one(family: str, attention: str, place: str) -> None:
    """The model decodes plainly in another thread while this one is inside of its forward."""
    model, expected = tiny("llama"), plain()
    ours = Speculator(model, drafter(family, "tiny"), tree=TREE, attention=attention)
    assert torch.equal(text_of(ours.generate, **GREEDY), expected)
    acceptance = ours.stats.acceptance_by_depth, ours.stats.rounds
    me, texts = threading.current_thread(), list[Tensor]()

    def between(*call: Any) -> None:
        if threading.current_thread() is me and len(texts) < 3:
            texts.append(in_a_thread(plain))

    decoder = model.get_decoder()
    part = decoder.layers[0] if place == "within the layers" else decoder
    with part.register_forward_hook(between):
        out = text_of(ours.generate, **GREEDY)
    assert torch.equal(out, expected) and len(texts) == 3
    assert all(torch.equal(text, expected) for text in texts)
    assert (ours.stats.acceptance_by_depth, ours.stats.rounds) == acceptance


def test_the_models_stop_strings_stay_while_a_request_runs(stop_strings: list[str]) -> None:
    model, found = tiny("llama"), []
    ours = Speculator(model, tokenizer=letters())
    criteria = [Once(lambda: found.append(model.generation_config.stop_strings), at=9)]
    out = text_of(ours.generate, **GREEDY, stopping_criteria=criteria)
    assert found == [stop_strings] and torch.equal(out, plain(tokenizer=letters()))


def test_two_requests_that_call_each_others_speculators() -> None:
    """Neither waits for the other, which would be for ever."""
    model, expected = tiny("llama"), plain()
    both = [
        Speculator(model, drafter(name, "tiny"), tree="chain:2") for name in ("medusa", "eagle")
    ]
    meet = threading.Barrier(2)

    def run(outer: Speculator, inner: Speculator) -> list[Tensor]:
        texts: list[Tensor] = []

        def call() -> None:
            meet.wait(30)  # both are in a request
            texts.append(text_of(inner.generate, **GREEDY))
            assert inner.stats.tokens == NEW - 1
            meet.wait(30)

        out = text_of(outer.generate, **GREEDY, stopping_criteria=[Once(call)])
        return [out, *texts]

    found: list[list[Tensor]] = []
    other = threading.Thread(target=lambda: found.append(run(*both)), daemon=True)
    other.start()
    found.append(run(*both[::-1]))
    other.join(60)
    assert len(found) == 2
    assert all(torch.equal(text, expected) for texts in found for text in texts)
