"""Targets with recurrent layers, wherever the decode loop keeps something between rounds."""

import threading
from collections import deque
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from headstart.heads import Sampling, UnsupportedTarget
from headstart.heads.core import row_seeds
from headstart.heads.draft_model import DraftModel
from headstart.infer import Speculator
from headstart.infer.prompts import Prompt
from headstart.infer.rules.registry import RULES
from headstart.infer.stream import decode_stream
from tests.support.recurrent import RECURRENT, recurrent
from tests.support.scripted import decoding_of, make
from tests.support.streamed import streamed
from tests.support.syncs import WARPERS, run_rounds
from tests.support.tape import on_tape
from tests.support.tiny import VOCAB, one_line, prompts

KINDS = ["qwen3.5", "kimi-linear", "falcon-h1", "lfm2"]
"""A delta rule, one that decays channels apart, a state space beside attention, convolutions."""
LENGTHS = [9, 4, 7, 1]
TREES = ["chain:3", "cartesian:3,2,1"]
BOTH_TREES = [pytest.param("chain:3", marks=pytest.mark.proof), "cartesian:3,2,1"]

GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
SAMPLED: dict[str, Any] = {**GREEDY, "do_sample": True, "top_k": 0, "seed": 5}


def by_kind(names: Iterable[str]) -> list[Any]:
    """One model of each kind by default, the others as proofs."""
    return [pytest.param(name, marks=() if name in KINDS else pytest.mark.proof) for name in names]


@cache
def written(name: str, rows: int = len(LENGTHS)) -> tuple[Tensor, Tensor, Tensor]:
    """Prompts, their mask, and what `generate` writes after them, each alone."""
    ids, mask = prompts(LENGTHS[:rows])
    texts = []
    for row, length in enumerate(LENGTHS[:rows]):
        alone = ids[row : row + 1, ids.shape[1] - length :]
        texts.append(recurrent(name).generate(alone, **GREEDY)[:, length:])
    return ids, mask, torch.cat(texts)


def drafted(name: str, tree: str, rows: int = len(LENGTHS), **options: Any) -> Speculator:
    drafter = make("cached", recurrent(name), written(name, rows)[2])
    return Speculator(recurrent(name), drafter, tree=tree, **options)


def self_drafted(name: str, tree: str = TREES[0], **options: Any) -> Speculator:
    """The target drafts for itself, over a cache of its own that recurs, too."""
    return Speculator(recurrent(name), DraftModel.of(recurrent(name)).eval(), tree=tree, **options)


@pytest.mark.parametrize("tree", BOTH_TREES)
@pytest.mark.parametrize("name", by_kind(RECURRENT))
def test_draft_models_may_have_recurrent_layers_too(name: str, tree: str) -> None:
    """What they draft is what they would write, level by level: the target accepts all of it."""
    speculator = self_drafted(name, tree)
    ids, mask, expected = written(name)
    for _ in range(2):
        out = speculator.generate(ids, attention_mask=mask, **GREEDY)
        assert torch.equal(out[:, ids.shape[1] :], expected)
    assert speculator.stats.tau > 3.7  # of 4, in all rounds but a row's last


@pytest.mark.parametrize("tree", BOTH_TREES)
@pytest.mark.parametrize("name", KINDS)
def test_replayed_rounds_write_the_same(name: str, tree: str) -> None:
    """Request after request, of one row and of several, drafted by a model that recurs, too."""
    speculator = self_drafted(name, tree)
    tape = on_tape(speculator)
    ids, mask, expected = written(name)
    for rows in (1, 4, 1):
        out = speculator.generate(ids[:rows], attention_mask=mask[:rows], **GREEDY)
        assert torch.equal(out[:, ids.shape[1] :], expected[:rows]), rows
    assert speculator.stats.tau > 3.5
    assert tape.replayed > tape.taped > 0


def test_a_replayed_text_that_outgrows_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.infer.request.FIRST_TOKENS", 40)
    speculator, options = self_drafted("qwen3.5"), {**GREEDY, "max_new_tokens": 80}
    tape = on_tape(speculator)
    ids = prompts([9])[0]
    expected = recurrent("qwen3.5").generate(ids, **options)
    for _ in range(2):
        assert torch.equal(speculator.generate(ids, **options), expected)
    assert tape.replayed


@pytest.mark.parametrize("name", KINDS)
def test_plain_decoding_of_other_batches(name: str) -> None:
    plain, captured = Speculator(recurrent(name)), Speculator(recurrent(name))
    tape = on_tape(captured)
    for rows in (1, 4, 1):
        ids, mask, expected = written(name)
        ids, mask, expected = ids[:rows], mask[:rows], expected[:rows]
        for each in (plain, captured):
            out = each.generate(ids, attention_mask=mask, **GREEDY)
            assert torch.equal(out[:, ids.shape[1] :], expected), rows
    assert tape.replayed


@pytest.mark.parametrize("tree", BOTH_TREES)
@pytest.mark.parametrize("name", KINDS)
def test_coupled_texts_are_those_of_plain_decoding(name: str, tree: str) -> None:
    ids, mask, _ = written(name)
    options = {**SAMPLED, "temperature": 0.9}
    plain = Speculator(recurrent(name)).generate(ids, attention_mask=mask, **options)
    assert torch.equal(drafted(name, tree).generate(ids, attention_mask=mask, **options), plain)


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_other_rules_accept_and_go_on(rule: str) -> None:
    """Where the drafter is as good as certain they write what the target would, nearly greedily."""
    ids, mask, expected = written("qwen3.5")
    speculator = drafted("qwen3.5", TREES[1], rule=rule)
    out = speculator.generate(ids, attention_mask=mask, **{**SAMPLED, "temperature": 1e-4})
    assert torch.equal(out[:, ids.shape[1] :], expected)
    assert speculator.stats.tau > 1.3


@pytest.mark.parametrize("tree", ["plain", *BOTH_TREES])
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("name", KINDS)
def test_no_round_reads_the_device(name: str, rule: str, tree: str) -> None:
    ids, mask, expected = written(name)
    sampling = Sampling()
    if rule != "greedy":
        sampling = Sampling(row_seeds(3, len(ids)), LogitsProcessorList(WARPERS))
    drafter = make("cached", recurrent(name), expected)
    options: dict[str, Any] = {"rule": RULES[rule], "expansion": RULES[rule].children}
    decoding = decoding_of(recurrent(name), drafter, tree, sampling, **options)
    with torch.no_grad():
        decoding.prefill(ids, mask, 16)
        assert run_rounds(decoding) > 3


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_rows_that_are_filled_anew(name: str, graphs: bool) -> None:
    """A prompt of one token among them, whose row begins with no state at all."""
    draws, model = torch.Generator().manual_seed(3), recurrent(name)
    asked = [
        Prompt(n, torch.randint(1, VOCAB, (size,), generator=draws).tolist(), 3 + 4 * n % 11)
        for n, size in enumerate((5, 1, 12, 2, 8, 3, 1))
    ]
    speculator = self_drafted(name, graphs=graphs)
    ready = deque(asked)
    found = dict(
        (prompt.key, text)
        for prompt, text in decode_stream(
            speculator, lambda: ready.popleft() if ready else None, 3, 30
        )
    )
    for prompt in asked:
        ids = torch.tensor([prompt.tokens])
        alone = model.generate(ids, **{**GREEDY, "max_new_tokens": prompt.new_tokens})
        assert found[prompt.key] == alone[0, len(prompt.tokens) :].tolist(), prompt.key


def test_threads_share_a_model() -> None:
    """Rounds of speculators and steps of `generate`, all over the same layers at once."""
    name = "qwen3.5"
    ids, mask, expected = written(name)
    speculators, wrong = [drafted(name, tree) for tree in TREES], list[str]()

    def run(number: int) -> None:
        for _ in range(4):
            if number < 2:
                out = speculators[number].generate(ids, attention_mask=mask, **GREEDY)
                same = torch.equal(out[:, ids.shape[1] :], expected)
            else:
                out = recurrent(name).generate(ids[:1], **GREEDY)
                same = torch.equal(out[:, ids.shape[1] :], expected[:1])
            if not same:
                wrong.append(f"{number}")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("name", KINDS)
def test_packed_and_fused_layers(name: str) -> None:
    ids, mask, expected = written(name)
    either: list[dict[str, Any]] = [{"compile": "packed"}, {"fused": True}]
    for options in either:
        out = drafted(name, TREES[1], **options).generate(ids, attention_mask=mask, **GREEDY)
        assert torch.equal(out[:, ids.shape[1] :], expected), options


@pytest.mark.parametrize("place", [pytest.param("cpu", marks=pytest.mark.proof), "disk"])
@pytest.mark.parametrize("name", [*KINDS, "bamba"])
def test_weights_that_are_streamed_in(name: str, place: str, tmp_path: Path) -> None:
    """Those of convolutions too, which layers read without calling them."""
    model, ids = streamed(recurrent(name), place, tmp_path), prompts([9])[0]
    expected = recurrent(name).generate(ids, **GREEDY)
    assert torch.equal(Speculator(model).generate(ids, **GREEDY), expected)
    assert torch.equal(model.generate(ids, **GREEDY), expected)


def test_what_is_compiled_has_no_cache_and_is_refused() -> None:
    with pytest.raises(UnsupportedTarget, match="leave compile out") as caught:
        Speculator(recurrent("qwen3.5"), compile="default")
    one_line(caught.value)
