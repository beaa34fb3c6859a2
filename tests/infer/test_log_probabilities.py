"""Log-probabilities of new tokens are the target's own, whatever tree wrote them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headstart.heads import OptionError
from headstart.infer import Batcher, Emitted, LogProbabilities, RoundStreamer, Speculator
from tests.support.families import TREES, drafter
from tests.support.scripted import decoding_of
from tests.support.syncs import run_rounds
from tests.support.tape import on_tape
from tests.support.tiny import VOCAB, prompts, tiny

LENGTHS = [9, 4, 7]
NEW = 15
HOW: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": [3, 9], "pad_token_id": 0}
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 9, "repetition_penalty": 1.4}


def speculator(tree: str = TREES[1], **options: Any) -> Speculator:
    return Speculator(tiny("llama"), drafter("medusa", "tiny"), tree=tree, **options)


def by_hand(text: Tensor, width: int, mask: Tensor | None = None) -> Tensor:
    """Log-probabilities [B, new, V] of a forward of the target over whole texts [B, P + new]."""
    model = tiny("llama")
    mask = torch.ones(len(text), width, dtype=torch.long) if mask is None else mask
    mask = torch.cat([mask, torch.ones_like(text[:, width:])], 1)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(text, attention_mask=mask, position_ids=position, use_cache=False).logits
    return logits[:, width - 1 : -1].log_softmax(-1)


def assert_are(found: LogProbabilities, expected: Tensor, text: Tensor, most: int) -> None:
    """Those of one row, of a text [new]."""
    chosen = expected.gather(1, text.unsqueeze(1)).squeeze(1)
    best = expected.topk(most)
    assert np.allclose(found.chosen[0], chosen, atol=1e-9)
    assert np.array_equal(found.best_ids[0], best.indices) and found.best.shape[2] == most
    assert np.allclose(found.best[0], best.values, atol=1e-9)


@pytest.mark.parametrize("most", [0, 1, 5])
@pytest.mark.parametrize("how", [{"do_sample": False}, SAMPLED | {"seed": 4}], ids=["0", "1"])
def test_each_row_has_those_of_its_own_tokens(how: dict[str, Any], most: int) -> None:
    """Before the penalty, the temperature and all, and NaN behind a row's end."""
    (ids, mask), ours = prompts(LENGTHS), speculator()
    text = ours.generate(ids, attention_mask=mask, **HOW, **how, logprobs=most)
    assert torch.equal(text, ours.generate(ids, attention_mask=mask, **HOW, **how))
    assert ours.stats.logprobs is None
    ours.generate(ids, attention_mask=mask, **HOW, **how, logprobs=most)
    found, width = ours.stats.logprobs, ids.shape[1]
    assert found is not None and found.chosen.shape == text[:, width:].shape
    expected = by_hand(text, width, mask)
    for row, lasts in enumerate((ours.stats.drafted.depths >= 0).sum(1).tolist()):
        own = found.of_row(row, most)
        assert_are(own.first(lasts), expected[row, :lasts], text[row, width:][:lasts], most)
        assert np.isnan(own.chosen[0, lasts:]).all() and (own.best_ids[0, lasts:] == -1).all()


def test_a_batch_tells_them_of_those_who_ask() -> None:
    """Beside requests without, and with other numbers; captured, too."""
    (ids, mask), ours = prompts([6, 6, 6, 6, 6, 6]), speculator()
    on_tape(ours)
    batcher, asked = Batcher(ours, rows=3), [None, 2, 0, None, 5, 3]
    assert bool(mask.all())

    def call(row: int) -> tuple[Tensor, LogProbabilities | None]:
        how = SAMPLED | {"seed": row} if row % 2 else {"do_sample": False}
        text = batcher.generate(ids[row : row + 1], **HOW, **how, logprobs=asked[row])
        return text, batcher.stats.logprobs

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(call, range(6)))
    for (text, found), most in zip(answers, asked, strict=True):
        assert (found is None) == (most is None)
        if found is not None and most is not None:
            assert_are(found, by_hand(text, 6)[0], text[0, 6:], most)
    assert ours.graphs is not None and ours.graphs.replayed > 0


@pytest.mark.parametrize("kind", [lambda: speculator(), lambda: Batcher(speculator(), 2)])
def test_a_streamer_is_handed_them_round_by_round(kind: Callable[[], Any]) -> None:
    class Kept(RoundStreamer):
        def put_round(self, emitted: Emitted) -> None:
            assert emitted.logprobs is not None
            parts.append(emitted.logprobs.first(int(emitted.count[0])))

    parts, ours, (ids, _) = list[LogProbabilities](), kind(), prompts([6])
    text = ours.generate(ids, **HOW, do_sample=False, logprobs=4, streamer=Kept())
    joined = LogProbabilities.joined(parts)
    assert len(parts) > 1
    assert_are(joined, by_hand(text, 6)[0], text[0, 6:], 4)
    assert np.array_equal(joined.chosen, ours.stats.logprobs.chosen)


def test_telling_them_waits_for_nothing() -> None:
    ids, mask = prompts(LENGTHS)
    decoding = decoding_of(tiny("llama"), drafter("medusa", "tiny"), "cartesian:3,2", logprobs=4)
    with torch.no_grad():
        decoding.prefill(ids, mask, NEW)
        assert run_rounds(decoding) > 2


@pytest.mark.parametrize("asked", [-1, VOCAB + 1, True, 1.5, "2"])
def test_no_number_of_tokens_is_refused(asked: Any) -> None:
    ids, _ = prompts([6])
    with pytest.raises(OptionError, match=f"^logprobs is {asked!r}; expected a whole number"):
        speculator().generate(ids, max_new_tokens=2, logprobs=asked)


def test_a_call_that_writes_nothing_has_none() -> None:
    ours, (ids, _) = speculator(), prompts([6])
    ours.generate(ids, max_new_tokens=0, logprobs=2)
    assert ours.stats.logprobs is None
