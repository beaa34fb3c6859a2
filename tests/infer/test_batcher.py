"""Requests of several threads that are decoded together write what each writes alone."""

import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import headstart
from headstart.heads import DecodingError, OptionError, SlabCache
from headstart.heads.families import KNOWN
from headstart.infer import Batcher, Speculator
from headstart.infer.continuous import Stream
from headstart.infer.loop import Decoding
from headstart.infer.request import Request
from headstart.infer.streamer import Left, RoundStreamer
from tests.support.covering import covering
from tests.support.families import TREES, drafter, own, target
from tests.support.tape import on_tape
from tests.support.tiny import VOCAB, letters, one_line, tiny

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": [3, 9]}
SAMPLED = GREEDY | {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.95}
TREE = TREES[1]
WAIT = 60  # seconds, after which a test has failed


def asked(count: int) -> list[tuple[Tensor, dict[str, Any]]]:
    """Prompts of different lengths, each with a budget and a seed."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    return [
        (
            torch.randint(1, VOCAB, (1, length), generator=generator),
            {"max_new_tokens": 3 + (7 * number) % 30},
        )
        for number, length in enumerate(lengths)
    ]


def every(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What calls return, each in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result(WAIT) for each in [pool.submit(call) for call in calls]]


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The rows of each batch that was started."""
    found, true = list[int](), Stream._make_request

    def make(self: Stream, batch: int) -> None:
        found.append(batch)
        true(self, batch)

    monkeypatch.setattr(Stream, "_make_request", make)
    yield found


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is decoded until this is set, so that all requests wait by then."""
    ready, true = threading.Event(), Batcher._work

    def work(self: Batcher) -> None:
        assert ready.wait(WAIT)
        true(self)

    monkeypatch.setattr(Batcher, "_work", work)
    yield ready
    ready.set()


def all_wait(batcher: Batcher, calls: Sequence[Callable[[], Any]], go: threading.Event) -> list:
    """What calls return that all wait, in their order, before the first one is decoded."""
    with ThreadPoolExecutor(len(calls)) as pool:
        found = []
        for number, call in enumerate(calls):
            found.append(pool.submit(call))
            while len(batcher._waiting) <= number:
                assert not found[-1].done(), found[-1].result()
                time.sleep(0.001)
        go.set()
        return [each.result(WAIT) for each in found]


@pytest.mark.parametrize(
    ("name", "graphs", "sampled"),
    covering([*product([None, *KNOWN], (False, True), (False, True))]),
)
def test_texts_are_those_of_each_alone(name: str | None, graphs: bool, sampled: bool) -> None:
    model = tiny("llama") if name is None else target(own(name))
    drafts = None if name is None else drafter(name, own(name))
    tree = None if name is None else "beam:3,3" if name == "redrafter" else TREE
    speculator = Speculator(model, drafts, tree=tree)
    if graphs:
        on_tape(speculator)
    batcher = Batcher(speculator, rows=3)
    plain = Speculator(model)
    how = SAMPLED if sampled else GREEDY

    def call(generate: Any, number: int) -> Callable[[], Any]:
        ids, options = prompts[number]
        return lambda: generate(ids, **how, **options, **seed(number))

    def seed(number: int) -> dict[str, Any]:
        return {"seed": 100 + number} if sampled else {}

    prompts = asked(8)
    found = every([call(batcher.generate, number) for number in range(8)])
    for number, text in enumerate(found):
        assert torch.equal(text, call(plain.generate, number)())
    if graphs:
        assert speculator.graphs is not None and speculator.graphs.replayed > 0


def test_a_batch_has_the_rows_that_it_needs(sizes: list[int], waiting: threading.Event) -> None:
    """It grows with what waits, and shrinks once most have ended; no more than are allowed."""
    model, (ids, _) = tiny("llama"), asked(1)[0]
    batcher = Batcher(Speculator(model, drafter("medusa", "tiny"), tree=TREE), rows=6)
    budgets = [120, *[4 + n for n in range(8)]]

    def call(budget: int) -> Callable[[], Tensor]:
        return lambda: batcher.generate(ids, max_new_tokens=budget, do_sample=False)

    found = all_wait(batcher, [call(budget) for budget in budgets], waiting)
    expected = model.generate(ids, max_new_tokens=120, do_sample=False)
    for budget, text in zip(budgets, found, strict=True):
        assert torch.equal(text, expected[:, : ids.shape[1] + budget])
    assert sizes[:2] == [1, 6] and sizes[-1] == 1 and max(sizes) == 6


def test_each_request_has_its_own_criteria_streamer_and_statistics(
    waiting: threading.Event,
) -> None:
    model, tokenizer = tiny("llama"), letters()
    speculator = Speculator(model, drafter("medusa", "tiny"), tree=TREE, tokenizer=tokenizer)
    batcher = Batcher(speculator, rows=4)
    prompts, how = [ids for ids, _ in asked(4)], {"do_sample": False, "max_new_tokens": 40}
    texts = [model.generate(ids, **how)[0] for ids in prompts]
    stops = [tokenizer.decode(t[len(p[0]) + 20 :][:3]) for t, p in zip(texts, prompts, strict=True)]

    def call(decode: Any, number: int) -> Callable[[], Any]:
        def run() -> Any:
            streamed = Kept()
            text = decode.generate(
                prompts[number], stop_strings=[stops[number]], streamer=streamed, **how
            )
            assert streamed.tokens == text[0].tolist() and streamed.ended
            return text, decode.stats

        return run

    found = all_wait(batcher, [call(batcher, number) for number in range(4)], waiting)
    for number, (text, stats) in enumerate(found):
        expected = call(speculator, number)()[0]
        assert torch.equal(text, expected)
        new = text.shape[1] - prompts[number].shape[1]
        assert 0 < new < 40 and stats.tokens == new and stats.drafted.depths.shape == (1, new)
        assert (stats.drafted.depths > 0).sum() + stats.rounds >= new
        assert stats.prefill_seconds > 0 and stats.decode_seconds > 0


def test_rounds_are_captured_though_a_request_has_criteria() -> None:
    model, (ids, _) = tiny("llama"), asked(1)[0]
    tokenizer: Any = letters()
    speculator = Speculator(model, drafter("medusa", "tiny"), tree=TREE, tokenizer=tokenizer)
    on_tape(speculator)
    how: dict[str, Any] = {"do_sample": False, "max_new_tokens": 60}
    new = model.generate(ids, **how)[0, ids.shape[1] :]
    stop = tokenizer.decode(new[40:43])
    text = Batcher(speculator, rows=1).generate(ids, stop_strings=[stop], **how)
    assert text[0, ids.shape[1] :].tolist() == new[: tokenizer.decode(new).index(stop) + 3].tolist()
    assert speculator.graphs is not None and speculator.graphs.replayed > 0


class Kept(BaseStreamer):
    """Keeps the tokens that it is given; it may leave after so many calls."""

    def __init__(self, leaves: int | None = None) -> None:
        self.tokens, self.ended, self._leaves = list[int](), False, leaves

    def put(self, value: Tensor) -> None:
        if self._leaves is not None:
            self._leaves -= 1
            if self._leaves < 0:
                raise ConnectionError("gone")
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("graphs", [False, True])
def test_who_leaves_frees_a_row_and_nobody_notices(graphs: bool, waiting: threading.Event) -> None:
    model = tiny("llama")
    speculator = Speculator(model, drafter("medusa", "tiny"), tree=TREE)
    if graphs:
        on_tape(speculator)
    batcher = Batcher(speculator, rows=3)
    prompts, how = [ids for ids, _ in asked(5)], {"do_sample": False, "max_new_tokens": 60}

    def call(number: int) -> Callable[[], Any]:
        return lambda: batcher.generate(prompts[number], **how)

    def leave() -> None:
        with pytest.raises(ConnectionError):
            batcher.generate(prompts[0], streamer=Kept(3), max_new_tokens=200, do_sample=False)

    calls = [call(1), leave, call(2), call(3), leave, call(4)]
    found = all_wait(batcher, calls, waiting)
    texts = [text for text in found if text is not None]
    for ids, text in zip(prompts[1:], texts, strict=True):
        assert torch.equal(text, model.generate(ids, **how))


@pytest.mark.parametrize("rows", [1, 3])
def test_what_nobody_waits_for_is_not_begun(rows: int, waiting: threading.Event) -> None:
    """Its prompt would be read in vain, while others wait."""

    class Gone(RoundStreamer):
        def left(self) -> bool:
            return waiting.is_set()

        def put(self, value: Any) -> None:
            if self.left():
                raise Left

        def put_round(self, emitted: Any) -> None:
            raise AssertionError

    model = tiny("llama")
    batcher, begun = Batcher(Speculator(model), rows=rows), list[int]()
    prompts, how = [ids for ids, _ in asked(4)], {"do_sample": False, "max_new_tokens": 9}
    hook = model.register_forward_pre_hook(lambda *_: begun.append(1))

    def leave() -> None:
        with pytest.raises(Left):
            batcher.generate(prompts[0], streamer=Gone(), **how)

    assert all_wait(batcher, [leave] * 6, waiting) == [None] * 6
    hook.remove()
    assert not begun
    assert torch.equal(batcher.generate(prompts[1], **how), model.generate(prompts[1], **how))


def test_a_streamer_that_cannot_be_asked_fails_its_own_request_alone(
    waiting: threading.Event,
) -> None:
    class Broken(RoundStreamer):
        def left(self) -> bool:
            raise ConnectionError

        def put(self, value: Any) -> None: ...

        def put_round(self, emitted: Any) -> None: ...

    model = tiny("llama")
    batcher = Batcher(Speculator(model), rows=3)
    ids, how = asked(1)[0][0], {"do_sample": False, "max_new_tokens": 9}

    def broken() -> None:
        with pytest.raises(ConnectionError):
            batcher.generate(ids, streamer=Broken(), **how)

    found = all_wait(batcher, [broken, lambda: batcher.generate(ids, **how), broken], waiting)
    assert torch.equal(found[1], model.generate(ids, **how))


def test_what_cannot_join_is_decoded_by_itself_in_its_turn(waiting: threading.Event) -> None:
    """Several rows, settings that read the text, scores; other processors wait for their turn."""
    model = tiny("llama")
    speculator = Speculator(model, drafter("medusa", "tiny"), tree=TREE)
    batcher = Batcher(speculator, rows=4)
    ids = asked(1)[0][0]
    more = {"max_new_tokens": 12, "pad_token_id": 0}
    calls: list[dict[str, Any]] = [
        {"do_sample": False},
        {"do_sample": True, "seed": 5, "top_k": 0},
        {"do_sample": False, "bad_words_ids": [[2, 3], [4]]},
        {"do_sample": True, "seed": [6], "top_k": 0},
        {"do_sample": True, "seed": [6], "top_k": 0, "temperature": 0.5},
        {"do_sample": True, "seed": 5, "top_k": 0, "num_return_sequences": 3},
        {"do_sample": False, "output_scores": True, "return_dict_in_generate": True},
        {"do_sample": False, "return_dict_in_generate": True},
        {"do_sample": False, "suppress_tokens": [4, 5]},
        {"do_sample": False, "suppress_tokens": [4, 6]},
    ]
    ended = list[int]()

    def call(number: int) -> Callable[[], Any]:
        def run() -> Any:
            found = batcher.generate(ids, **calls[number], **more)
            ended.append(number)
            return found

        return run

    found = all_wait(batcher, [call(number) for number in range(len(calls))], waiting)
    for options, text in zip(calls, found, strict=True):
        expected = speculator.generate(ids, **options, **more)
        if options.get("return_dict_in_generate"):
            assert ("scores" in text) == ("scores" in expected)
            text, expected = text.sequences, expected.sequences
        assert torch.equal(text, expected)
    assert ended.index(0) < ended.index(2) < ended.index(5)


SETTINGS: list[dict[str, Any]] = [
    GREEDY,
    SAMPLED | {"repetition_penalty": 1.3},
    SAMPLED | {"temperature": 1.4, "top_k": 0},
    GREEDY | {"repetition_penalty": 1.1},
    GREEDY | {"no_repeat_ngram_size": 2},
    SAMPLED | {"no_repeat_ngram_size": 3, "repetition_penalty": 1.2, "min_new_tokens": 6},
    GREEDY | {"min_new_tokens": 12},
    GREEDY | {"sequence_bias": [[[7], -9.0], [[30], 4.0]], "bad_words_ids": [[41], [3]]},
    SAMPLED | {"sequence_bias": [[[20], 2.5]], "no_repeat_ngram_size": 2},
    SAMPLED | {"temperature": 1.0, "top_p": 1.0, "min_p": 0.1},
    SAMPLED | {"temperature": 0.3, "top_p": 0.5},
    SAMPLED | {"temperature": 0.0},
    SAMPLED | {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        *(("medusa", rule) for rule in (None, "match", "rejection")),
        ("eagle3", None),
        *(pytest.param("eagle3", rule, marks=pytest.mark.proof) for rule in ("match", "rejection")),
    ],
)
def test_requests_of_several_settings_are_decoded_together(
    name: str, rule: str | None, graphs: bool, sizes: list[int], waiting: threading.Event
) -> None:
    """Greedy ones among them, where the rule allows it; three rows are filled again and again."""
    model = tiny("llama")
    speculator, written = (
        Speculator(model, drafter(name, "tiny"), tree=TREE, rule=rule) for _ in range(2)
    )
    if graphs:
        on_tape(speculator)
    batcher, prompts = Batcher(speculator, rows=3), asked(len(SETTINGS))

    def call(decode: Any, number: int) -> Callable[[], Tensor]:
        ids, budget = prompts[number]
        seed = {"seed": number} if SETTINGS[number]["do_sample"] else {}
        return lambda: decode.generate(ids, **SETTINGS[number], **budget, **seed)

    count = range(len(SETTINGS))
    found = all_wait(batcher, [call(batcher, number) for number in count], waiting)
    started = len(sizes)
    for number, text in zip(count, found, strict=True):
        how, alone = SETTINGS[number], call(written, number)()
        # What `rejection` draws depends on where rounds begin.
        if rule != "rejection" or not how["do_sample"] or not how["temperature"]:
            assert torch.equal(text, alone)
    if rule != "rejection":  # one row, three of them, and fewer at the end
        # And anew for the first with a temperature, penalty, n-grams, length and bias, at most.
        assert sizes[:2] == [1, 3] and started <= 7, sizes
    if graphs:
        assert speculator.graphs is not None and speculator.graphs.replayed > 0


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("leaks", [False, True])
@pytest.mark.parametrize("name", ["repetition_penalty", "no_repeat_ngram_size"])
def test_settings_that_read_the_text_are_for_its_own_tokens(
    name: str, leaks: bool, graphs: bool, waiting: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch begins without them; one row has several texts, one after another. The control
    leaves the tokens of the text before."""
    model = tiny("llama")
    speculator = Speculator(model, drafter("medusa", "tiny"), tree=TREE)
    if graphs:
        on_tape(speculator)
    batcher, prompts = Batcher(speculator, rows=2), asked(5)
    if leaks:
        monkeypatch.setattr(Request, "refill_text", lambda *given: None)

    def call(decode: Any, number: int) -> Callable[[], Tensor]:
        value = 1.1 + number if name == "repetition_penalty" else 1 + number % 2
        how = GREEDY | ({name: value} if number > 1 else {})
        return lambda: decode.generate(prompts[number][0], **how, max_new_tokens=8 + number)

    found = all_wait(batcher, [call(batcher, number) for number in range(5)], waiting)
    alone = [call(model, number)() for number in range(5)]
    assert all(map(torch.equal, found[:2], alone[:2]))
    assert all(map(torch.equal, found, alone)) is not leaks


def test_only_sampled_requests_cost_noise(waiting: threading.Event) -> None:
    """A batch is greedy until the first one that is sampled joins it."""
    model = tiny("llama")
    speculator, rules = Speculator(model, drafter("medusa", "tiny"), tree=TREE), list[str]()
    batcher, true = Batcher(speculator, rows=2), Stream.round

    def noted(self: Stream) -> Any:
        rules.append(self.request.rule.name)
        return true(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "round", noted)
        calls = [
            lambda how=how: batcher.generate(asked(1)[0][0], **how, max_new_tokens=20)
            for how in (GREEDY, GREEDY, SAMPLED)
        ]
        all_wait(batcher, calls, waiting)
    changed = rules.index("coupled")
    assert changed > 0 and rules == ["greedy"] * changed + ["coupled"] * (len(rules) - changed)


def test_a_padded_prompt_has_the_same_text() -> None:
    model, ids = tiny("llama"), asked(1)[0][0]
    batcher = Batcher(Speculator(model), rows=2)
    padded = torch.nn.functional.pad(ids, (5, 0))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (5, 0))
    how: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    found = batcher.generate(padded, attention_mask=mask, **how)
    assert torch.equal(found, model.generate(padded, attention_mask=mask, **how))


def test_drawn_seeds_are_those_of_the_default_generator() -> None:
    model, ids = tiny("llama"), asked(1)[0][0]
    speculator = Speculator(model, drafter("medusa", "tiny"), tree=TREE)
    for rows, returned in ((1, 1), (4, 1), (4, 3)):
        how = SAMPLED | {"max_new_tokens": 12, "num_return_sequences": returned}
        texts = []
        for decode in (Batcher(speculator, rows), speculator):
            torch.manual_seed(11)
            texts.append(decode.generate(ids, **how))
        assert torch.equal(*texts)


def test_an_error_is_raised_in_every_thread_that_it_concerns(
    waiting: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = Batcher(Speculator(tiny("llama")), rows=4)
    ids, true = asked(1)[0][0], Stream.round

    def fail(self: Stream) -> Any:
        raise DecodingError("the target's scores for new token 1 are NaN")

    monkeypatch.setattr(Stream, "round", fail)

    def call() -> str:
        with pytest.raises(DecodingError) as error:
            batcher.generate(ids, max_new_tokens=5, do_sample=False)
        return one_line(error.value)

    found = all_wait(batcher, [call] * 3, waiting)
    assert found == ["the target's scores for new token 1 are NaN"] * 3
    monkeypatch.setattr(Stream, "round", true)
    assert batcher.generate(ids, max_new_tokens=5, do_sample=False).shape[1] == ids.shape[1] + 5


class Spoils:
    """A hook that makes the embedding of a token no number after three of it, as no tree has it."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, module: Any, args: Any, output: Tensor) -> Tensor:
        found = args[0] == self.token  # [B, T]
        found[:, 3:] &= found[:, 2:-1] & found[:, 1:-2] & found[:, :-3]
        found[:, :3] = False
        return output.masked_fill(found.unsqueeze(-1), torch.nan)


@pytest.mark.parametrize(("name", "graphs"), [*product((None, "medusa", "eagle"), (False, True))])
def test_a_request_whose_scores_are_nan_ends_alone(
    name: str | None, graphs: bool, waiting: threading.Event
) -> None:
    """Its keys and values are NaN in the cache, and no other row may see them."""
    model = tiny("llama")
    speculator = Speculator(model, None if name is None else drafter(name, "tiny"))
    if graphs:
        on_tape(speculator)
    batcher, how = Batcher(speculator, rows=3), {"max_new_tokens": 30, "do_sample": False}
    prompts = [ids for ids, _ in asked(6)]
    texts = [model.generate(ids, **how) for ids in prompts]
    spoilt = next(n for n in range(1, VOCAB) if all(n not in text for text in texts))
    handle = model.get_input_embeddings().register_forward_hook(Spoils(spoilt))

    def call(ids: Tensor) -> Callable[[], Tensor]:
        return lambda: batcher.generate(ids, **how)

    def fail(length: int) -> Callable[[], str]:
        ids = torch.cat([prompts[0], torch.tensor([[spoilt] * length])], 1)

        def run() -> str:
            with pytest.raises(DecodingError) as error:
                batcher.generate(ids, **how)
            return one_line(error.value)

        return run

    calls: list[Any] = [call(ids) for ids in prompts]
    calls[1:1], calls[5:5] = [fail(5)], [fail(9)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the drafter is not to blame
        found = all_wait(batcher, calls, waiting)
    handle.remove()
    errors = [each for each in found if isinstance(each, str)]
    for text, expected in zip([e for e in found if not isinstance(e, str)], texts, strict=True):
        assert torch.equal(text, expected)
    assert len(errors) == 2
    assert all("scores for new token 1 of row 0 are NaN" in error for error in errors)


@pytest.mark.parametrize("graphs", [False, True])
def test_without_memory_fewer_are_decoded_together(
    graphs: bool, waiting: threading.Event, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start of a batch, and in the middle of a round."""
    model = tiny("llama")
    speculator = Speculator(model, drafter("medusa", "tiny"), tree=TREE)
    if graphs:
        on_tape(speculator)
    resize, take = SlabCache.resize, Decoding.round
    rounds = []

    def limited(self: SlabCache, batch: int, capacity: int) -> None:
        if batch > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        resize(self, batch, capacity)

    def interrupted(self: Decoding) -> Any:
        rounds.append(len(self.request.rows.remaining))
        if len(rounds) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return take(self)

    monkeypatch.setattr(SlabCache, "resize", limited)
    monkeypatch.setattr(Decoding, "round", interrupted)
    batcher, prompts = Batcher(speculator, rows=8), asked(9)

    def call(number: int) -> Callable[[], Tensor]:
        ids, budget = prompts[number]
        return lambda: batcher.generate(ids, do_sample=False, **budget)

    with pytest.warns(RuntimeWarning, match="no memory to decode") as told:
        found = all_wait(batcher, [call(number) for number in range(9)], waiting)
    for text, (ids, budget) in zip(found, prompts, strict=True):
        assert torch.equal(text, model.generate(ids, do_sample=False, **budget))
    said = [str(each.message) for each in told if "no memory" in str(each.message)]
    assert ["8 requests together; from now on at most 4" in said[0], len(said)] == [True, 2]
    assert "4 requests together; from now on at most 2" in said[1]
    assert sizes[:4] == [1, 8, 4, 2] and max(sizes[4:], default=0) <= 2


def test_a_request_that_is_too_large_fails_alone(
    waiting: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, resize = tiny("llama"), SlabCache.resize

    def limited(self: SlabCache, batch: int, capacity: int) -> None:
        if batch * capacity > 256:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        resize(self, batch, capacity)

    monkeypatch.setattr(SlabCache, "resize", limited)
    batcher, ids = Batcher(Speculator(model), rows=2), asked(1)[0][0]

    def fail() -> str:
        with pytest.raises(DecodingError) as error:
            batcher.generate(ids, max_new_tokens=400, do_sample=False)
        return one_line(error.value)

    def call() -> Tensor:
        return batcher.generate(ids, max_new_tokens=20, do_sample=False)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        *found, error = all_wait(batcher, [call, call, call, fail], waiting)
    expected = model.generate(ids, max_new_tokens=20, do_sample=False)
    assert all(torch.equal(text, expected) for text in [*found, call()])
    assert error == "no memory to decode this request, even alone: CUDA out of memory." == fail()


class Asks(StoppingCriteria):
    """Asks for another text once, and stops nothing."""

    def __init__(self, ask: Callable[[], Any]):
        self.ask = ask
        self.answer: Any = None

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        if self.answer is None:
            self.answer = self.ask()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_a_request_may_ask_for_another_where_that_can_be_decoded_beside_it() -> None:
    model, ids = tiny("llama"), asked(1)[0][0]
    batcher = Batcher(Speculator(model), rows=2)
    how: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}
    expected = model.generate(ids, **how)
    inner = Asks(lambda: batcher.generate(ids, **how))
    assert torch.equal(batcher.generate(ids, stopping_criteria=[inner], **how), expected)
    assert torch.equal(inner.answer, expected)
    inner.answer = None
    with pytest.raises(OptionError, match="called from within a request"):
        batcher.generate(ids, stopping_criteria=[inner], bad_words_ids=[[2, 3]], **how)
    assert torch.equal(batcher.generate(ids, **how), expected)


@pytest.mark.parametrize("alone", [False, True], ids=["together", "alone"])
def test_seconds_are_without_those_of_waiting(alone: bool, waiting: threading.Event) -> None:
    batcher, waited = Batcher(Speculator(tiny("llama")), rows=1 if alone else 2), 0.5
    ids, _ = asked(1)[0]

    def call() -> tuple[float, float]:
        begun = time.perf_counter()
        batcher.generate(ids, max_new_tokens=4, **GREEDY)
        stats = batcher.stats
        return time.perf_counter() - begun, stats.prefill_seconds + stats.decode_seconds

    with ThreadPoolExecutor(1) as pool:
        asked_for = pool.submit(call)
        time.sleep(waited)
        waiting.set()
        elapsed, seconds = asked_for.result(WAIT)
    assert 0 < seconds <= elapsed - 0.9 * waited


def test_a_thread_without_work_ends_and_nothing_is_kept() -> None:
    batcher = headstart.Batcher(Speculator(tiny("llama")), rows=2)
    ids = asked(1)[0][0]
    assert batcher.generate(ids, max_new_tokens=0, do_sample=False).shape == ids.shape
    batcher.generate(ids, max_new_tokens=4, do_sample=False)
    for thread in threading.enumerate():
        if thread.name == "headstart-batcher":
            thread.join(WAIT)
    assert not batcher._works and not batcher._waiting
    for rows in (0, 2.5, "2"):
        with pytest.raises(OptionError, match=f"rows is {rows!r}; expected a whole number"):
            Batcher(batcher.speculator, rows=rows)  # type: ignore[arg-type]


def test_a_text_that_may_be_very_long_takes_memory_as_it_grows() -> None:
    model, (ids, _) = tiny("llama"), asked(1)[0]
    new = model.generate(ids, max_new_tokens=60, **GREEDY | {"eos_token_id": None})
    ends = GREEDY | {"eos_token_id": int(new[0, -1])}
    expected = model.generate(ids, max_new_tokens=60, **ends)
    text = Batcher(Speculator(model)).generate(ids, max_new_tokens=10**12, **ends)
    assert torch.equal(text, expected) and text.shape[1] > 1.5 * ids.shape[1]


EXITS = """
import atexit, threading
atexit.register(lambda: print(*(each.name for each in threading.enumerate())))  # called last
import torch
from headstart.infer import Batcher, RoundStreamer, Speculator
from tests.support.tiny import tiny

batcher, decodes = Batcher(Speculator(tiny("llama"))), threading.Event()

class Tells(RoundStreamer):
    def put_round(self, emitted):
        decodes.set()

def ask():
    ids = torch.tensor([[5, 6, 7]])
    batcher.generate(ids, do_sample=False, max_new_tokens=250, streamer=Tells())
    print("was answered")

threading.Thread(target=ask, name="asks", daemon=True).start()
decodes.wait()
"""


def test_nothing_is_decoded_any_more_when_the_interpreter_ends() -> None:
    """It would be ended amid torch's code, which aborts the process."""
    ran = subprocess.run([sys.executable, "-c", EXITS], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.split()) == (0, ["MainThread", "asks"]), ran.stderr
