"""Prompts that begin as the last one are run from there on, and their texts are the same."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import headstart
from headstart.heads.families import KNOWN
from headstart.infer import Batcher, Speculator, runners
from tests.support import families
from tests.support.architectures import ARCHITECTURES
from tests.support.recurrent import RECURRENT
from tests.support.tiny import large_enough, prompts, tiny

TREE = families.TREES[1]
OPTIONS: dict[str, Any] = {"max_new_tokens": 9, "do_sample": True, "pad_token_id": 0}


def speculators(model: Any, drafter: Any, **how: Any) -> tuple[Speculator, Speculator]:
    """One that keeps prompts, and one that runs them whole."""
    kept, whole = (
        Speculator(model, drafter, tree=TREE if drafter else None, prefix_caching=caching, **how)
        for caching in (True, False)
    )
    return kept, whole


def check(kept: Any, whole: Speculator, ids: Tensor, known: int, **options: Any) -> Tensor:
    """The text of a prompt of which so many tokens are known, checked against a whole one's."""
    options = {**OPTIONS, "seed": 3, "attention_mask": torch.ones_like(ids), **options}
    text = kept.generate(ids, **options)
    assert torch.equal(text, whole.generate(ids, **options))
    assert kept.stats.kept_tokens == known
    return text


def chat(kept: Any, whole: Speculator, first: int = 0, caches: bool = True, **options: Any) -> None:
    """Turns that go on from the text of the last one."""
    ids, known = prompts([7])[0], 0
    for turn in range(3):
        text = check(kept, whole, ids, known, **options)
        known = ids.shape[1] - first if caches else 0
        ids = torch.cat([text, prompts([turn + 1], seed=turn)[0]], 1)


@pytest.mark.parametrize("name", KNOWN)
def test_every_family_drafts_as_after_a_whole_prompt(name: str) -> None:
    model, drafter = families.target(families.own(name)), families.drafter(name, families.own(name))
    kept, whole = speculators(model, drafter)
    chat(kept, whole)
    assert kept.stats.tau == whole.stats.tau  # and so drafters saw the same features
    chat(*speculators(model, drafter), do_sample=False)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_goes_on_from_what_is_cached(name: str) -> None:
    """But for recurrent layers, which keep a state of the whole text alone."""
    torch.manual_seed(1)
    model = ARCHITECTURES[name]().double().eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped_mm takes no float64
    chat(*speculators(model, None), caches=name not in RECURRENT)


def test_what_is_known_of_other_prompts() -> None:
    kept, whole = speculators(tiny("llama"), families.drafter("eagle3", "tiny"))
    ids = prompts([40])[0]
    check(kept, whole, ids, 0)
    check(kept, whole, ids, 39)  # whose last token is run again, for what follows it
    other = ids.clone()
    other[0, 20] = (other[0, 20] + 1) % 60 + 1
    check(kept, whole, other, 20)
    check(kept, whole, ids[:, :11], 10)
    check(kept, whole, ids, 11)
    check(kept, whole, ids[:, 1:], 0)
    check(kept, whole, ids[:, :1], 0)
    check(
        kept, whole, ids, 1 if torch.equal(ids[:, :1], ids[:, :1]) else 0, max_new_tokens=300 - 40
    )
    longer = torch.cat([ids, prompts([80], seed=2)[0]], 1)
    check(kept, whole, longer, 40)  # the cache has grown meanwhile


def test_other_requests_in_between() -> None:
    kept, whole = speculators(tiny("llama"), families.drafter("medusa", "tiny"))
    ids, mask = prompts([30, 30, 21])
    check(kept, whole, ids[:1], 0)
    several = {"attention_mask": mask, "seed": [1, 2, 3]}
    check(kept, whole, ids, 0, **several)
    check(kept, whole, ids[:1], 0)
    kept.target.release()
    check(kept, whole, ids[:1], 0)
    check(kept, whole, ids[:1], 29)


def test_a_request_that_had_no_memory_to_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was cached is gone with the memory that it was in."""
    kept, whole = speculators(tiny("llama"), families.drafter("medusa", "tiny"))
    monkeypatch.setattr(runners, "FIRST_TOKENS", 8)
    ids, allocate = prompts([40])[0], torch.empty
    check(kept, whole, ids, 0)

    def fail(*sizes: Any, **options: Any) -> Tensor:
        if sizes and isinstance(sizes[0], int):  # a slab's memory
            raise torch.OutOfMemoryError("CUDA out of memory")
        return allocate(*sizes, **options)

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(torch.OutOfMemoryError):
        kept.generate(ids, **OPTIONS | {"max_new_tokens": 200, "seed": 3})
    monkeypatch.undo()
    check(kept, whole, ids, 0)


def test_what_is_kept_is_what_is_read() -> None:
    """A kept key that is wrong, or a feature, changes what follows."""
    model, drafter = tiny("llama"), families.drafter("eagle3", "tiny")
    ids, (kept, whole) = prompts([40])[0], speculators(model, drafter)
    check(kept, whole, ids, 0)
    for slab in kept.target.cache._slabs:
        slab[:, :, 3:30] += 1
    text = kept.generate(ids, **OPTIONS, seed=3)
    assert not torch.equal(text, whole.generate(ids, **OPTIONS, seed=3))
    kept, _ = speculators(model, drafter)
    check(kept, whole, ids, 0, max_new_tokens=40)
    kept.target._kept.features.neg_()  # type: ignore[union-attr]
    check(kept, whole, ids, 39, max_new_tokens=40)  # the text does not depend on drafts
    assert kept.stats.tau != whole.stats.tau


def test_it_runs_packed() -> None:
    model = large_enough(torch.float32)
    chat(*speculators(model, None, compile="packed"))


def test_nothing_is_kept_unless_it_is_asked_for() -> None:
    speculator = headstart.load(tiny("llama"), "recycling")
    for _ in range(2):
        speculator.generate(prompts([20])[0], **OPTIONS)
        assert speculator.stats.kept_tokens == 0 and speculator.target._kept is None


@pytest.mark.parametrize("name", ["eagle3", "recycling", "draft_model"])
def test_a_batcher_keeps_the_last_prompt_too(name: str) -> None:
    """All but its last token, which is the root of the first round."""
    kept, whole = speculators(tiny("llama"), families.drafter(name, "tiny"))
    chat(Batcher(kept, rows=4), whole, first=1)


def test_requests_of_several_threads_that_begin_alike() -> None:
    kept, whole = speculators(tiny("llama"), families.drafter("eagle3", "tiny"))
    batcher, system = Batcher(kept, rows=3), prompts([50])[0]
    asked = [torch.cat([system, prompts([n + 2], seed=n)[0]], 1) for n in range(6)]
    texts: dict[int, Tensor] = {}
    known: dict[int, int] = {}
    batcher.generate(system, **OPTIONS, seed=0)

    def ask(number: int) -> None:
        texts[number] = batcher.generate(asked[number], **OPTIONS, seed=number)
        known[number] = batcher.stats.kept_tokens

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(asked))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for number, ids in enumerate(asked):
        assert torch.equal(texts[number], whole.generate(ids, **OPTIONS, seed=number))
        assert known[number] >= 49
