"""Captured rounds copy to tensors that stay what the next round reads, and nothing else."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headstart.heads.families import KNOWN
from headstart.infer import Speculator
from headstart.infer.graphs import RoundGraphs
from tests.support.families import TREES, drafter, own, target
from tests.support.tape import decode, on_tape


def owners(state: Any) -> Iterator[Any]:
    """A state, and what it holds, as far as they have attributes."""
    if hasattr(state, "__dict__"):
        yield state
        for value in vars(state).values():
            yield from owners(value) if type(value).__module__.startswith("headstart") else ()


@pytest.mark.parametrize("name", list(KNOWN))
def test_scratch_is_set_anew_by_each_round(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = RoundGraphs.keep_states

    def forgetful(self: RoundGraphs, states: list[Any]) -> None:
        keep(self, states)
        for owner in [each for state in states for each in owners(state)]:
            for attribute in getattr(owner, "scratch", ()):
                vars(owner).pop(attribute, None)

    monkeypatch.setattr(RoundGraphs, "keep_states", forgetful)
    tree = TREES[2] if name == "redrafter" else TREES[1]
    replayed, written = (
        Speculator(target(own(name)), drafter(name, own(name)), tree=tree) for _ in range(2)
    )
    tape = on_tape(replayed)
    written.graphs = None
    assert torch.equal(decode(replayed), decode(written)) and tape.replayed
    assert replayed.stats.counts.tolist() == written.stats.counts.tolist()


@pytest.mark.parametrize("name", [None, "draft_model", "redrafter"])
def test_a_round_copies_no_more(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    drafting = {"drafter": drafter(name, "tiny"), "tree": "chain:2"} if name else {}
    made: Any = Speculator(target("tiny"), **drafting)
    made.graphs, rounds, kept = RoundGraphs(), list[list[str]](), list[str]()
    keep, run = RoundGraphs.keep, RoundGraphs.run

    def noted(self: RoundGraphs, name: Any, value: torch.Tensor) -> torch.Tensor:
        kept.append(name if isinstance(name, str) else name[-1])
        return keep(self, name, value)

    def bounded(self: RoundGraphs, kind: Any, work: Any) -> Any:
        kept.clear()
        found = run(self, kind, work)
        rounds.append([*kept])
        return found

    monkeypatch.setattr(RoundGraphs, "keep", noted)
    monkeypatch.setattr(RoundGraphs, "run", bounded)
    decode(made)
    of_state = ["lengths"] if name == "draft_model" else []
    expected = sorted([*of_state, "features", "tokens", "count", "lengths"])
    assert rounds and all(sorted(each) == expected for each in rounds)
