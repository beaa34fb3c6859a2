"""What a captured round reads is there at each replay, whoever made it and whatever came between.

The tape raises `DeadMemory` where it is not; texts and counts show where it is another's.
"""

import gc
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.heads import FAMILIES, OptionError
from headstart.heads.core import SlabCache, cache
from headstart.infer import Speculator, capture, graphs, request
from headstart.infer.graphs import RoundGraphs
from headstart.infer.rules.registry import RULES
from tests.support.families import TREES, drafter, target
from tests.support.tape import DeadMemory, Tape, on_tape
from tests.support.tiny import prompts

LENGTHS = [9, 4, 7, 6, 5]
BATCHES = (1, 5, 1)
QUICK = {
    ("medusa", TREES[1], "traversal"), ("hydra", TREES[0], "block"),
    ("recycling", TREES[1], "greedy"), ("draft_model", TREES[2], "coupled"),
    ("eagle", TREES[1], "rejection"), ("redrafter", TREES[3], "match"),
}  # fmt: skip
"""Every rule but one, every tree, and every way in which drafters keep what they know."""


def cases() -> list[Any]:
    """With a request of each batch size by default, and with three as proofs."""
    proofs = [
        pytest.param(*case, 3, marks=pytest.mark.proof) for case in product(FAMILIES, TREES, RULES)
    ]
    return [(*case, 1) for case in sorted(QUICK)] + proofs


def write(speculator: Speculator, batch: int, turn: int, rule: str, **more: Any) -> Tensor:
    ids, mask = prompts([length + turn for length in LENGTHS[:batch]])
    options: dict[str, Any] = {"max_new_tokens": 14, "pad_token_id": 0, "do_sample": False}
    options |= {"suppress_tokens": [3, 4], "repetition_penalty": 1.2}
    if RULES[rule].samples:
        options |= {"do_sample": True, "top_k": 20, "temperature": 0.9, "top_p": 0.95}
        options["seed"] = [11 + turn, 12, 13, 14, 15][:batch]
    found = speculator.generate(ids, attention_mask=mask, **options | more)
    gc.collect(1)  # nothing lives on in a circle of references
    return found


@pytest.mark.parametrize(("name", "tree", "rule", "requests"), cases())
def test_requests_come_and_go(
    name: str, tree: str, rule: str, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several requests of each batch size, with caches that grow meanwhile."""
    monkeypatch.setattr(request, "FIRST_TOKENS", 16)
    given: Any = {"tree": tree, "rule": rule if RULES[rule].samples else None}
    try:
        ours = [Speculator(target("tiny"), drafter(name, "tiny"), **given) for _ in range(2)]
    except OptionError as error:
        pytest.skip(str(error))
    replayed, written = ours
    tape = on_tape(replayed)
    for turn, batch in enumerate(batch for batch in BATCHES for _ in range(requests)):
        more = {"max_new_tokens": 60} if turn == 1 else {}
        text = write(replayed, batch, turn, rule, **more)
        assert torch.equal(text, write(written, batch, turn, rule, **more)), turn
        assert replayed.stats.counts.tolist() == written.stats.counts.tolist(), turn
    assert tape.replayed > tape.taped > 0
    assert replayed.graphs is not None and not replayed.graphs.failed


def test_nine_speculators_in_turn() -> None:
    """Each with a tree of its own, on one model."""
    trees = [f"chain:{n}" for n in (1, 2, 3)] + [f"[[0],[{n}]]" for n in range(1, 7)]
    ours = [Speculator(target("tiny"), drafter("medusa", "tiny"), tree=tree) for tree in trees]
    tapes = [on_tape(speculator) for speculator in ours]
    plain = write(Speculator(target("tiny"), tree="plain"), 2, 0, "greedy")
    for _ in range(3):
        for speculator in ours:
            assert torch.equal(write(speculator, 2, 0, "greedy"), plain)
    assert all(tape.replayed > tape.taped > 0 for tape in tapes)


# A round of another kind would have to copy the shape from the host.
@pytest.mark.filterwarnings("ignore:this round cannot be captured")
def test_what_a_tree_no_longer_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shape, if it kept the last few alone; with the control that the tape sees it die."""
    for held in (True, False):
        if not held:
            monkeypatch.setattr(capture, "_SMALL", -1)
        speculator = Speculator(target("tiny"), drafter("medusa", "tiny"), tree=TREES[1])
        tape = on_tape(speculator)
        text = write(speculator, 1, 0, "greedy")
        assert tape.replayed
        for kept in ("shape", "_levels", "_one_level"):
            getattr(speculator.tree, kept).cache_clear()
        if held:
            assert torch.equal(write(speculator, 1, 0, "greedy"), text)
            continue
        with pytest.raises(DeadMemory):
            write(speculator, 1, 0, "greedy")


def test_batches_of_all_sizes_keep_their_graphs() -> None:
    """One cache serves them, and those of a size that was there before need no other graph."""
    speculator = Speculator(target("tiny"), drafter("medusa", "tiny"), tree=TREES[1])
    written = Speculator(target("tiny"), drafter("medusa", "tiny"), tree=TREES[1])
    tape, taped = on_tape(speculator), []
    for turn, batch in enumerate((5, 1, 5, 1, 5, 1)):
        more = {"max_new_tokens": 30 if turn > 1 else 90}  # later ones need fewer slots
        text = write(speculator, batch, turn % 2, "greedy", **more)
        assert torch.equal(text, write(written, batch, turn % 2, "greedy", **more))
        taped.append(tape.taped)
    assert taped[3] == taped[5] == taped[1]


def test_a_cache_elsewhere_is_another_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator gives the same address again, and what lay there is not what lies there now."""
    shapes, given = Speculator(target("tiny")).target.shapes, torch.zeros(1 << 20).double()
    monkeypatch.setattr(cache.torch, "empty", lambda size, **options: given[:size])
    first = SlabCache(shapes, 1, 64)
    seen = {first.address}
    for batch, capacity in ((2, 64), (1, 64), (1, 128), (2, 64)):
        first.resize(batch, capacity)
        seen.add(first.address)
    assert SlabCache(shapes, 1, 64).address not in seen


def test_the_graph_that_is_used_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more kinds than are held, the one that was used longest ago goes."""
    monkeypatch.setattr(graphs, "_KINDS", 2)
    tape = Tape()
    rounds = RoundGraphs(tape)
    value = torch.zeros(1)
    for kind in "hhhahbhch":
        rounds.run(kind, lambda: value.add_(1))
    assert tape.taped == 1 and rounds.replayed == 4
