"""Prompts that begin as an earlier text are run from there on, and their texts are the same."""

import copy
import threading
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TextStreamer

import headstart
from headstart.heads.families import KNOWN
from headstart.infer import Batcher, Speculator, runners
from headstart.infer.kept import KeptTexts
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


def chat(kept: Any, whole: Speculator, caches: bool = True, **options: Any) -> None:
    """Turns that go on from the text of the last one."""
    ids, known = prompts([7])[0], 0
    for turn in range(3):
        text = check(kept, whole, ids, known, **options)
        known = text.shape[1] - 1 if caches else 0
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


def other_at(ids: Tensor, place: int) -> Tensor:
    """A prompt with another token there."""
    found = ids.clone()
    found[0, place] = (found[0, place] + 1) % 60 + 1
    return found


def test_what_is_known_of_other_prompts() -> None:
    kept, whole = speculators(tiny("llama"), families.drafter("eagle3", "tiny"))
    ids = prompts([40])[0]
    text = check(kept, whole, ids, 0)
    check(kept, whole, ids, 39)  # whose last token is run again, for what follows it
    check(kept, whole, other_at(ids, 20), 20)
    check(kept, whole, ids[:, :11], 10)
    check(kept, whole, ids, 11)
    check(kept, whole, text, 48)
    check(kept, whole, other_at(text, 44), 44)  # amid the answer, as of a template that drops some
    check(kept, whole, other_at(ids, 39), 39)
    check(kept, whole, ids[:, 1:], 0)
    check(kept, whole, other_at(ids, 0), 0)
    check(kept, whole, ids[:, :1], 0)
    text = check(kept, whole, ids, 1 if ids[0, 0] == ids[0, 0] else 0, max_new_tokens=260)
    longer = torch.cat([text, prompts([80], seed=2)[0]], 1)
    check(kept, whole, longer, 299)  # the cache has grown meanwhile


def test_other_requests_in_between() -> None:
    kept, whole = speculators(tiny("llama"), families.drafter("medusa", "tiny"))
    ids, mask = prompts([30, 30, 21])
    check(kept, whole, ids[:1], 0)
    several = {"attention_mask": mask, "seed": [1, 2, 3]}
    check(kept, whole, ids, 0, **several)
    check(kept, whole, ids[:1], 0)  # so few tokens are not copied
    kept.target.release()
    check(kept, whole, ids[:1], 0)
    check(kept, whole, ids[:1], 29)


def test_chats_that_alternate() -> None:
    kept, whole = speculators(tiny("llama"), families.drafter("eagle3", "tiny"))
    system = prompts([20])[0]
    chats = [torch.cat([system, prompts([70], seed=n)[0]], 1) for n in range(3)]
    known = [0, 20, 20]
    for turn in range(3):
        for number, ids in enumerate(chats):
            text = check(kept, whole, ids, known[number], seed=turn)
            assert kept.stats.tau == whole.stats.tau
            known[number] = text.shape[1] - 1
            chats[number] = torch.cat([text, prompts([turn + 1], seed=turn)[0]], 1)


def test_the_text_that_was_used_longest_ago_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, whole = speculators(tiny("llama"), None)
    kept.target.kept = KeptTexts(2)
    texts = [prompts([70], seed=n)[0] for n in range(4)]
    assert len({int(ids[0, 0]) for ids in texts}) == 4
    for ids in texts:
        check(kept, whole, ids, 0)
    check(kept, whole, texts[1], 69)
    check(kept, whole, texts[0], 0)  # 2 and 3 were copied after it, and so was 1 again


def test_copies_leave_memory_to_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, whole = speculators(tiny("llama"), families.drafter("eagle3", "tiny"))
    texts, left = [prompts([70], seed=n)[0] for n in range(3)], [1 << 40]
    monkeypatch.setattr("headstart.infer.kept._memory_left", lambda slab: left[0])
    for ids in texts:
        check(kept, whole, ids, 0)
    assert len(kept.target.kept._copies) == 2
    size = kept.target.cache.bytes_of(1, 128)
    left[0] = 2 * kept.target.cache.bytes_of(1, 1024)
    check(kept, whole, texts[0], 69, max_new_tokens=500)
    assert len(kept.target.kept._copies) == 3
    left[0] -= 1
    check(kept, whole, texts[0], 69, max_new_tokens=900)
    assert not kept.target.kept._copies
    for memory, copies in ((4 * size, 1), (4 * size - 1, 0)):
        left[0] = memory
        kept.target.release()
        for ids in texts:
            kept.generate(ids, **OPTIONS)
        assert len(kept.target.kept._copies) == copies


def test_where_memory_ends_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that fits without what is kept is decoded."""
    kept, whole = speculators(tiny("llama"), families.drafter("eagle3", "tiny"))
    ids, run = prompts([80])[0], kept.target.run_prompts
    check(kept, whole, ids, 0)
    check(kept, whole, prompts([70], seed=2)[0], 0)
    tried = list[int]()

    def scarce(*given: Any) -> Any:
        tried.append(given[2])
        if kept.target.kept._copies or given[2]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(*given)

    monkeypatch.setattr(kept.target, "run_prompts", scarce)
    check(kept, whole, ids, 0)
    assert tried == [79, 0]


def test_a_batch_gives_up_what_is_kept_before_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, whole = speculators(tiny("llama"), families.drafter("eagle3", "tiny"))
    batcher, verify = Batcher(kept, rows=2), kept.target.verify
    check(batcher, whole, prompts([70])[0], 0)

    def scarce(*given: Any) -> Any:
        if kept.target.kept:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return verify(*given)

    monkeypatch.setattr(kept.target, "verify", scarce)
    monkeypatch.setattr(kept.target.kept, "copy", lambda *given: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(batcher, whole, prompts([70], seed=1)[0], 0)


def test_an_answer_that_was_interrupted() -> None:
    kept, whole = speculators(tiny("llama"), families.drafter("eagle3", "tiny"))
    ids = prompts([40])[0]

    class Interrupts(TextStreamer):
        def __init__(self) -> None:
            self.calls = 0

        def put(self, value: Any) -> None:
            self.calls += 1
            if self.calls == 8:
                raise KeyboardInterrupt

        def end(self) -> None:
            pass

    options = OPTIONS | {"seed": 3, "max_new_tokens": 30}
    with pytest.raises(KeyboardInterrupt):
        kept.generate(ids, **options, streamer=Interrupts())
    text = whole.generate(ids, **options)
    ids = torch.cat([text[:, :60], prompts([3], seed=1)[0]], 1)
    found = kept.generate(ids, **options)
    assert torch.equal(found, whole.generate(ids, **options))
    assert 40 < kept.stats.kept_tokens < 60


@pytest.mark.parametrize("change", ["weights", "replaced", "set_adapter", "disable", "merge"])
def test_what_other_weights_have_computed_is_not_taken(change: str) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(tiny("llama")), lora, "one")
    model.add_adapter("two", lora)
    model.double().eval()
    kept, whole = speculators(model, None)
    ids = prompts([40])[0]
    check(kept, whole, ids, 0)
    before = check(kept, whole, ids, 39, do_sample=False)
    weight = model.get_input_embeddings().weight
    with torch.no_grad(), model.disable_adapter() if change == "disable" else nullcontext():
        if change == "weights":
            weight.copy_(weight.flip(0))
        elif change == "replaced":
            weight.data = weight.flip(0)
        elif change == "set_adapter":
            model.set_adapter("two")
        elif change == "merge":
            model.merge_adapter()
        after = check(kept, whole, ids, 0, do_sample=False)
        check(kept, whole, ids, 39)
    assert torch.equal(before, after) == (change == "merge")


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
    kept.target.cache._slabs[-1].neg_()
    check(kept, whole, ids, 39, max_new_tokens=40)  # the text does not depend on drafts
    assert kept.stats.tau != whole.stats.tau


def test_it_runs_packed() -> None:
    model = large_enough(torch.float32)
    chat(*speculators(model, None, compile="packed"))


def test_nothing_is_kept_unless_it_is_asked_for() -> None:
    speculator = headstart.load(tiny("llama"), "recycling")
    for _ in range(2):
        speculator.generate(prompts([20])[0], **OPTIONS)
        assert speculator.stats.kept_tokens == 0 and not speculator.target.kept


@pytest.mark.parametrize("name", ["eagle3", "recycling", "draft_model"])
def test_a_batcher_keeps_what_its_rows_have_written(name: str) -> None:
    kept, whole = speculators(tiny("llama"), families.drafter(name, "tiny"))
    chat(Batcher(kept, rows=4), whole)


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
