"""Forwards that are captured to be timed do each time what they did at first; a tape stands in."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.heads import FAMILIES
from headstart.infer import capture, graphs
from headstart.infer.measure import forward_costs
from headstart.infer.measure.own_text import write_texts
from tests.support.families import drafter, target
from tests.support.tape import Tape


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> dict[Any, list[Any]]:
    """What each call gave, three times over, as they take turns; none of it is timed."""
    found: dict[Any, list[Any]] = {}
    tape = Tape()
    monkeypatch.setattr(graphs, "capture_on", lambda device: tape)
    monkeypatch.setattr(forward_costs, "captures_rounds", lambda model: True)

    def interleaved(calls: dict[Any, Callable[[], Any]], *rest: Any) -> dict[Any, list[float]]:
        for _ in range(3):
            for name, call in calls.items():
                step = call()
                value = step[0] if isinstance(step, tuple) else step
                value = value.logits if getattr(value, "logits", None) is not None else value
                value = value if isinstance(value, Tensor) else value.ids
                found.setdefault(name, []).append(value.clone())
        return {name: [1.0] for name in calls}

    monkeypatch.setattr(forward_costs, "interleaved", interleaved)
    return found


def check(found: dict[Any, list[Tensor]]) -> None:
    for name, each in found.items():
        assert all(torch.equal(value, each[0]) for value in each), name


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_drafters_start_each_time_from_the_same_state(
    name: str, held: bool, timed: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what a state holds is too large to be held with each graph."""
    if not held:
        monkeypatch.setattr(capture, "_SMALL", -1)
    made = drafter(name, "tiny")
    ids = torch.arange(1, 12).view(1, -1).expand(2, -1)
    texts = write_texts(target("tiny"), made, list(ids), 8)
    for _ in range(2):
        timed.clear()
        forward_costs.draft_costs(made, texts, [1, 2], 3)
        assert set(timed) == ({0} if made.independent else {0, 1, 2})
        check(timed)


def test_trees_stay_as_long_as_they_are_verified(timed: dict) -> None:
    context = torch.arange(1, 12).view(1, -1)
    forward_costs.verify_costs(target("tiny"), (), context, [1, 2, 4])
    assert set(timed) == {1, 2, 4}
    check(timed)
