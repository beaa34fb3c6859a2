"""Decoding where the host and the device are two places, on a GPU that is pretended.

A tensor that is made on the CPU in a round, a read of the device, and a copy to it pass unseen
where both are one place. Here they fail.
"""

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from headstart.heads import OptionError, group
from headstart.heads.core import FusedLayers, Packing, fused, fused_products
from headstart.heads.core.forms import Form, FormsByRow
from headstart.heads.core.whole_model import take_whole_models
from headstart.heads.families import KNOWN
from headstart.heads.parts import cached_layers
from headstart.heads.parts.translation import Translation
from headstart.heads.suffix import Suffix
from headstart.heads.translated_draft_model import TranslatedDraftModel
from headstart.infer import Speculator, batcher, request
from headstart.infer.generate_options import Ending
from headstart.infer.measure import costs, forward_costs
from headstart.infer.measure.own_text import write_texts
from headstart.infer.prompts import Prompt
from headstart.infer.rules.registry import RULES
from headstart.infer.runners import CapturedRunner
from headstart.infer.stats import Emitted
from headstart.infer.stream import decode_stream
from tests.support import pretended
from tests.support.families import LENGTHS, TREES, drafter, own, target
from tests.support.pretended import (
    Gpu,
    Mixed,
    Pretended,
    Refused,
    StrictCapture,
    moved_there,
    pretended_gpu,
)
from tests.support.tiny import VOCAB, large_enough, prompts

pytest.importorskip("triton")

from headstart.heads.core import kernels

IDS, MASK = prompts(LENGTHS)
QUICK = {
    ("dflash", TREES[1], "coupled"),
    ("mtp", TREES[2], "match"),
    ("medusa", TREES[1], "traversal"), ("medusa2", TREES[3], "coupled"),
    ("hydra", TREES[0], "block"), ("redrafter", TREES[3], "match"),
    ("eagle", TREES[1], "rejection"), ("eagle3", TREES[2], "greedy"),
    ("draft_model", TREES[2], "coupled"), ("lookup", TREES[1], "typical"),
    ("pard", TREES[2], "coupled"), ("recycling", TREES[1], "greedy"),
    ("mlp_speculator", TREES[2], "coupled"), ("gemma4_assistant", TREES[1], "coupled"),
    ("early_exit", TREES[1], "rejection"), ("retrieval", TREES[2], "match"),
    ("suffix", TREES[1], "coupled"),
}  # fmt: skip
"""Every family, tree and rule."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StrictCapture]:
    with pretended_gpu(monkeypatch) as capture, torch.no_grad():
        yield capture


def placed(name: str) -> tuple[Any, Any]:
    """Target and drafter on the GPU, in float32, which its kernels know."""
    model = moved_there(copy.deepcopy(target(own(name))).float())
    return model, moved_there(copy.deepcopy(drafter(name, own(name))).float()).bind(model)


def write(speculator: Speculator, rows: int = 4, rule: str = "greedy", **more: Any) -> Tensor:
    options: dict[str, Any] = {"max_new_tokens": 10, "pad_token_id": 0, "do_sample": False}
    options |= {"suppress_tokens": [3, 4], "repetition_penalty": 1.2, "no_repeat_ngram_size": 2}
    options |= {"sequence_bias": [[[9], 1.5]], "min_new_tokens": 3, "eos_token_id": [63]}
    if RULES[rule].samples:
        options |= {"do_sample": True, "top_k": 20, "temperature": 0.9, "top_p": 0.95}
        options["seed"] = [11, 12, 13, 14][:rows]
    ids, mask = IDS[:rows], MASK[:rows]
    if speculator.device.type == "cpu":
        return speculator.generate(ids, attention_mask=mask, **options | more)
    found: Any = speculator.generate(
        Pretended(ids), attention_mask=Pretended(mask), **options | more
    )
    return found.numbers


def on_cpu(name: str, **how: Any) -> Speculator:
    model = copy.deepcopy(target(own(name))).float()
    heads = copy.deepcopy(drafter(name, own(name))).float().bind(model)
    return Speculator(model, heads, attention="tree", **how)


def cases() -> list[Any]:
    return [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.proof)
        for case in product(KNOWN, TREES, RULES)
    ]


@pytest.mark.parametrize(("name", "tree", "rule"), cases())
def test_rounds_are_captured_and_write_the_text_of_the_cpu(
    name: str, tree: str, rule: str, gpu: StrictCapture
) -> None:
    how: dict[str, Any] = {"tree": tree, "rule": rule if RULES[rule].samples else None}
    try:
        expected = write(on_cpu(name, **how), rule=rule)
    except OptionError as error:
        pytest.skip(str(error))
    ours = Speculator(*placed(name), **how)
    assert torch.equal(write(ours, rule=rule), expected)
    assert ours.target.windows.tree and gpu.replayed and gpu.taped
    assert ours.graphs is not None and not ours.graphs.failed


def noted_copies(monkeypatch: pytest.MonkeyPatch, owner: Any, method: str) -> list[list[Any]]:
    """What each call of a method copies between host and device, and memory that it takes."""
    true, run = getattr(owner, method), pretended._run
    copies, within = list[list[Any]](), [False]

    def noted(self: Any, *given: Any) -> None:
        within[0] = True
        copies.append([])
        true(self, *given)
        within[0] = False

    def seen(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name, asked = function.overloadpacket.__name__, kwargs.get("device")
        if within[0] and (name == "empty" or (name == "_to_copy" and asked is not None)):
            copies[-1].append({name: kwargs.get(name) for name in ("pin_memory", "non_blocking")})
        return run(function, args, kwargs)

    monkeypatch.setattr(owner, method, noted)
    monkeypatch.setattr(pretended, "_run", seen)
    return copies


UNWAITED = [
    {"pin_memory": True, "non_blocking": None}, {"pin_memory": None, "non_blocking": True},
]  # fmt: skip
"""One copy from pinned memory, which nothing waits for."""


def test_rows_that_end_are_put_back_by_one_copy_that_nothing_waits_for(
    gpu: StrictCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = noted_copies(monkeypatch, CapturedRunner, "restore_ended_rows")
    ours = Speculator(*placed("medusa"), tree=TREES[1])
    expected = write(on_cpu("medusa", tree=TREES[1]), eos_token_id=[20, 60])
    assert torch.equal(write(ours, eos_token_id=[20, 60]), expected)
    assert copies and all(each == UNWAITED for each in copies)


def test_answers_are_remembered_by_one_copy_that_nothing_waits_for(
    gpu: StrictCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other rows are decoded meanwhile."""
    model, heads = placed("suffix")
    del heads.remember  # that of tests remembers nothing
    copies = noted_copies(monkeypatch, Suffix, "remember")
    ours, plain = Speculator(model, heads, tree=TREES[1]), on_cpu("suffix", tree="plain")
    for _ in range(2):
        assert torch.equal(write(ours), write(plain))
    assert ours.stats.tau > 2  # the second time the answers are known
    assert len(copies) == 8 and all(each == UNWAITED for each in copies)
    assert gpu.replayed and ours.graphs is not None and not ours.graphs.failed


def test_rounds_under_masks_are_captured_too(gpu: StrictCapture) -> None:
    """Where a target's attention is its own."""
    ours = Speculator(*placed("draft_model"), tree=TREES[2], attention="masked")
    expected = write(on_cpu("draft_model", tree="plain"), rule="coupled")
    assert torch.equal(write(ours, rule="coupled"), expected)
    assert gpu.replayed and ours.graphs is not None and not ours.graphs.failed


def translated() -> TranslatedDraftModel:
    """A draft model whose tokens are others than the target's, of which it lacks some."""
    made = copy.deepcopy(drafter("draft_model", own("draft_model"))).float()
    names = torch.arange(VOCAB - 6)
    pieces = torch.stack([(torch.arange(VOCAB) + 7 * n) % VOCAB for n in range(1, 5)], 1).int()
    lengths = (torch.arange(VOCAB) - VOCAB + 6).clamp(0, 3).int() + 1
    first = torch.tensor([5])
    found = TranslatedDraftModel.of(made.model)
    found.translate(Translation(pieces, lengths, pieces[names, 0], names, first))
    return found.eval()


@pytest.mark.parametrize(("tree", "rule"), [(TREES[1], "rejection"), (TREES[2], "coupled")])
def test_a_draft_model_with_a_tokenizer_of_its_own(
    tree: str, rule: str, gpu: StrictCapture
) -> None:
    model = copy.deepcopy(target(own("draft_model"))).float()
    here = Speculator(model, translated().bind(model), tree=tree, rule=rule, attention="tree")
    there, _ = placed("draft_model")
    ours = Speculator(there, moved_there(translated()).bind(there), tree=tree, rule=rule)
    assert torch.equal(write(ours, rule=rule), write(here, rule=rule))
    assert gpu.replayed and ours.graphs is not None and not ours.graphs.failed


@pytest.mark.parametrize("name, rule", [("eagle", "traversal"), ("draft_model", "coupled")])
def test_without_a_c_compiler_torch_does_what_kernels_would(
    name: str, rule: str, gpu: StrictCapture, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Triton needs one to launch, and a machine that runs models may have none."""

    def launch(*given: Any, **options: Any) -> Any:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")

    for kernel in ("split_attention", "move_path"):
        monkeypatch.setattr(kernels, kernel, launch)
    ours = Speculator(*placed(name), tree=TREES[1], rule=rule, fused=True)
    expected = write(on_cpu(name, tree=TREES[1], rule=rule), rule=rule)
    assert torch.equal(write(ours, rule=rule), expected)
    assert "C compiler" in str(ours.target.shapes[0].no_kernel)
    (said,) = [r.message for r in caplog.records if "Triton cannot launch" in r.message]
    assert "install a C compiler" in said
    assert not fused_products.has_kernels(torch.ones(1, device="cuda"))
    assert gpu.replayed and ours.graphs is not None and not ours.graphs.failed


def test_on_older_gpus_torch_does_what_kernels_would(
    gpu: StrictCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    ours = Speculator(*placed("medusa"), tree=TREES[1])
    assert torch.equal(write(ours), write(on_cpu("medusa", tree=TREES[1])))
    said = "its kernel needs a GPU of compute capability 8.0, found 7.5"
    assert ours.target.shapes[0].no_kernel == said and not ours.target.windows.tree
    assert gpu.replayed and ours.graphs is not None and not ours.graphs.failed


@pytest.mark.parametrize("name", ["draft_model", "eagle", "mtp", "dflash", "pard"])
def test_layers_of_drafters_are_fused(
    name: str, gpu: StrictCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in no other forwards than those over nodes."""
    ours, depths = Speculator(*placed(name), tree=TREES[1]), set[int]()
    true = cached_layers.tree_run

    def noted(*given: Any, **how: Any) -> Any:
        depths.add(fused._now.depth)
        return true(*given, **how)

    monkeypatch.setattr(cached_layers, "tree_run", noted)
    before = torch.get_rng_state()
    write(ours, rule="coupled")
    layers = group.fused_layers(ours.drafters.drafters[0])
    assert isinstance(layers, FusedLayers)
    found = layers.found
    assert found["norms"] and found["gated layers"] and found["rotary"]
    assert depths == {1} and fused._now.depth == 0
    assert torch.equal(before, torch.get_rng_state()), "no request's random numbers are taken"


def test_several_drafters(gpu: StrictCapture) -> None:
    model = moved_there(copy.deepcopy(target("tiny")).float())
    names = ("draft_model", "lookup", "medusa")
    several = [
        moved_there(copy.deepcopy(drafter(name, "tiny")).float()).bind(model) for name in names
    ]
    ours = Speculator(model, several, tree=f"chain:2+chain:3+{TREES[1]}")
    text = write(ours, rule="coupled")
    assert torch.equal(text, write(on_cpu("medusa", tree="plain"), rule="coupled"))
    assert gpu.replayed and ours.graphs is not None and not ours.graphs.failed


def test_batches_come_and_go_and_caches_grow(
    gpu: StrictCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "FIRST_TOKENS", 8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1 << 33))
    ours, written = Speculator(*placed("hydra"), tree=TREES[1]), on_cpu("hydra", tree=TREES[1])
    for rows, tokens in ((1, 60), (2, 12), (1, 12)):
        more: dict[str, Any] = {"max_new_tokens": tokens}
        assert torch.equal(write(ours, rows, **more), write(written, rows, **more)), rows
    assert gpu.taped > 2 and ours.target.cache.capacity > 64
    assert ours.graphs is not None and not ours.graphs.failed


def test_prompts_that_begin_as_the_last_one(gpu: StrictCapture) -> None:
    """Rounds are captured and replayed after what was kept of a prompt, as after whole ones."""
    model, heads = placed("eagle3")
    ours = Speculator(model, heads, tree=TREES[1], prefix_caching=True)
    theirs, kept = on_cpu("eagle3", tree=TREES[1]), []
    ids = IDS[1:2, 5:]
    for turn in range(4):
        options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": True, "seed": turn}
        found: Any = ours.generate(Pretended(ids), **options)
        kept.append(ours.stats.kept_tokens)
        assert torch.equal(found.numbers, theirs.generate(ids, **options))
        ids = torch.cat([found.numbers, IDS[2:3, -3:]], 1)
    assert kept == [0, 13, 26, 39]
    assert gpu.replayed and ours.graphs is not None and not ours.graphs.failed


def test_a_stream_of_prompts(gpu: StrictCapture) -> None:
    texts = []
    for ours in (on_cpu("hydra", tree=TREES[1]), Speculator(*placed("hydra"), tree=TREES[1])):
        waiting = iter([Prompt(n, list(range(1, 4 + n)), 8 + n, n) for n in range(5)])
        found = decode_stream(ours, lambda given=waiting: next(given, None), 2, 40, 0.7)
        texts.append({prompt.key: text for prompt, text in found})
    assert texts[0] == texts[1] and len(texts[0]) == 5 and gpu.replayed


def test_requests_of_several_threads(gpu: StrictCapture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are captured in a thread of their own, while others read the device."""
    ours, plain = Speculator(*placed("hydra"), tree=TREES[1]), on_cpu("hydra", tree="plain")
    together, work = batcher.Batcher(ours, rows=2), batcher.Batcher._work

    def on_the_gpu(self: batcher.Batcher) -> None:
        with Gpu():  # a mode is of one thread
            work(self)

    monkeypatch.setattr(batcher.Batcher, "_work", on_the_gpu)

    def text(turn: int, decode: Any, ids: Tensor) -> Any:
        options = {"do_sample": True, "top_k": 20, "temperature": 0.8, "seed": turn}
        return decode.generate(ids, max_new_tokens=6 + 4 * turn, pad_token_id=0, **options)

    def write_there(turn: int) -> Tensor:
        with Gpu(), torch.no_grad():
            return text(turn, together, Pretended(IDS[turn : turn + 1, -4:])).numbers

    with ThreadPoolExecutor(3) as pool:
        for turn, found in enumerate(pool.map(write_there, range(4))):
            assert torch.equal(found, text(turn, plain, IDS[turn : turn + 1, -4:])), turn
    assert gpu.replayed and ours.graphs is not None and not ours.graphs.failed


class Even(Form):
    """Texts of even tokens."""

    def allow(self, text: np.ndarray, bits: np.ndarray) -> bool:
        bits &= 0b01010101
        return True


def test_rows_with_forms_are_not_captured(
    gpu: StrictCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host reads their texts; requests before them and after them are captured."""
    ours, plain = Speculator(*placed("hydra"), tree=TREES[1]), on_cpu("hydra", tree="plain")
    for form in (None, Even(), None):
        options: dict[str, Any] = {"logits_processor": [FormsByRow([form])] if form else None}
        before = gpu.replayed
        expected = write(plain, 1, rule="coupled", **options)
        assert torch.equal(write(ours, 1, rule="coupled", **options), expected)
        new = expected[0, IDS.shape[1] :]
        assert bool((new % 2 == 0).all()) == (gpu.replayed == before) == (form is not None)
    assert ours.graphs is not None and not ours.graphs.failed


def test_a_thread_takes_its_text_without_a_wait_for_the_gpu(gpu: StrictCapture) -> None:
    """The next round of all requests runs by then."""
    ending = Ending(limit=LENGTHS[0] + 9, eos=[], pad=0, others=StoppingCriteriaList(), lengths=[])
    text = batcher._Text(Pretended(IDS[:1]), ending)
    emitted = Emitted(np.array([2]), np.array([2]), np.array([[5, 6, 6]]), None)
    gpu(lambda: text.add(emitted))  # which refuses a wait
    with pytest.raises(Refused):
        gpu(lambda: text.sequences)
    found: Any = text.sequences
    assert found.numbers.tolist() == [[*IDS[0].tolist(), 5, 6]]


def test_what_the_planner_measures(gpu: StrictCapture, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (costs, forward_costs):
        monkeypatch.setattr(module, "SECONDS", 0.0)  # one turn of each
    model, heads = placed("draft_model")
    texts = write_texts(model, heads, [Pretended(IDS[0]), Pretended(IDS[0])], 6)
    taped = gpu.taped
    found = costs.measure_costs(model, heads, texts, 4, 2)
    assert found.verify and found.extend and gpu.taped > taped + len(found.verify)


@pytest.mark.parametrize("decoded_here", [True, False])
def test_a_model_that_was_packed_on_the_cpu_runs_on_a_gpu_as_it_is(
    decoded_here: bool, gpu: StrictCapture
) -> None:
    """By none of what is for CPUs, whether or not its layers ran whole there."""
    model = large_enough(torch.float32)
    whole = Speculator(copy.deepcopy(model), attention="tree")
    Packing().pack_in_place(model)
    before = Speculator(model, compile="packed") if decoded_here else None
    assert before is None or before.target.forwards == "kernels"
    moved_there(model)
    ours = before or Speculator(model, compile="packed")
    assert torch.equal(write(ours), write(whole))
    assert ours.target.forwards == "fused layers" and not ours.target.kernels
    layers = ours.target.fused
    assert layers is not None and "whole layers" not in layers.found and gpu.replayed


def test_packing_leaves_what_is_on_a_gpu_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its addresses mean nothing to the system."""
    from headstart.heads.core import cpu_kernels

    told = []
    monkeypatch.setattr(cpu_kernels, "_advise", lambda *given: told.append(given))
    model = large_enough(torch.float32)
    Packing().pack_in_place(model)
    assert told
    told.clear()
    Packing().pack_in_place(model.to("meta"))
    assert not told and not take_whole_models(model)


WAYS: dict[str, tuple[type[Exception], Callable[[Tensor], Any]]] = {
    "a tensor of the CPU": (Mixed, lambda value: value + torch.ones(3)),
    "an index of the CPU": (Refused, lambda value: value[torch.tensor([1])]),
    "a single index of the CPU": (Mixed, lambda value: value.index_select(0, torch.tensor(1))),
    "a read": (Refused, lambda value: value.sum().item()),
    "a decision": (Refused, lambda value: bool((value > 0).all())),
    "a mask": (Refused, lambda value: value[value > 0]),
    "a number": (Refused, lambda value: torch.tensor(1.0, device=value.device)),
    "a copy": (Refused, lambda value: value.copy_(torch.ones(3))),
    "a list": (Refused, lambda value: value.tolist()),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_gpu_that_is_pretended_is_strict(way: str, gpu: StrictCapture) -> None:
    """A control; beside it, what may be in a round passes."""
    value = torch.ones(3, device="cuda")
    error, work = WAYS[way]
    with pytest.raises(error):
        gpu(lambda: work(value))
    gpu(lambda: torch.where(value > torch.tensor(0.0), value * 2, 0.0).cumsum(0)[1:] + 1)
