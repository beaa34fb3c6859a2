"""A search's levels, and the nodes it chooses, in one launch each: what their definitions give."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.infer import Speculator
from headstart.infer.trees import candidates
from headstart.infer.trees.candidates import NEVER
from tests.support.drafters import made
from tests.support.interpreter import run_interpreted, without_triton
from tests.support.tiny import prompts

LEVELS = [(1, 4, 1, 4), (4, 8, 4, 8), (5, 3, 5, 2), (8, 8, 1, 63), (3, 1, 3, 3), (2, 2, 1, 1)]
"""Nodes that are extended, their children, rows of proposals, and nodes that are kept."""

TREES = [(3, 2), (20, 7), (20, 30), (64, 64), (100, 33)]  # candidates and nodes

BEAMS = [(1, 4), (7, 8), (3, 5), (4, 1), (2, 33)]  # levels and beams


def levels() -> list[tuple[Any, ...]]:
    """With equal scores, nodes that are no candidates, scores above 0, and NaN."""
    generator, found = torch.Generator().manual_seed(0), []
    for extended, width, rows, keep in LEVELS:
        values = -torch.randint(0, 4, (3, rows, width), generator=generator).double()
        values[0, -1, -1:], values[1, 0], values[2, 0, :1] = torch.nan, NEVER, 0.5
        ids = torch.randint(0, 50, values.shape, generator=generator)
        ids[1, :, -1] = -1
        above = -torch.randint(0, 3, (3, extended), generator=generator).double()
        above[2, -1] = NEVER
        found.append((ids, values, above, keep, 7))
    return found


def selections() -> list[tuple[Any, ...]]:
    """Candidates below others that come earlier and score as much or more, some of them none."""
    generator, found = torch.Generator().manual_seed(1), []
    for count, nodes in TREES:
        draw = torch.rand(3, count, generator=generator)
        parents = (draw * torch.arange(1, count + 1)).long()  # 0 … c
        scores = torch.zeros(3, count + 1, dtype=torch.float64)  # the root's before the others
        steps = torch.randint(0, 2, (3, count), generator=generator).double()
        steps[1, ::5] = torch.inf
        for each in range(count):
            above = scores.gather(1, parents[:, each : each + 1])[:, 0]
            scores[:, each + 1] = above - steps[:, each]
        tokens = torch.randint(0, 50, (3, count), generator=generator)
        root = torch.randint(0, 50, (3, 1), generator=generator)
        found.append((root, tokens, scores[:, 1:], parents, nodes))
    return found


def searches() -> list[tuple[Any, ...]]:
    """Beams that none of the last ones go through, that are no candidates, and that end early."""
    generator, found = torch.Generator().manual_seed(2), []
    for depth, width in BEAMS:
        size = 4, depth, width
        kept = torch.randint(0, width * width, size, generator=generator)
        best = -torch.rand(size, generator=generator).double()
        best[1, :, width // 2 :] = NEVER
        best[2, depth // 2 :] = NEVER  # the search of this row ran dry
        best[3] = NEVER
        found.append((kept, best))
    return found


def wrong(device: str = "cpu") -> list[str]:
    from headstart.infer.trees import search_kernels as kernels

    found = []
    both: list[tuple[str, Any, Any, Any]] = [
        ("level", kernels.level, candidates._level, levels()),
        ("select", kernels.select, candidates._select, selections()),
        ("ends", kernels.ends, candidates._ends, searches()),
    ]
    for name, kernel, define, cases in both:
        for number, case in enumerate(cases):
            there = [each.to(device) if isinstance(each, Tensor) else each for each in case]
            results = [kernel(*there), define(*case)]
            pairs = zip(*([r] if isinstance(r, Tensor) else r for r in results), strict=True)
            same = all(a.dtype == b.dtype and torch.equal(a.cpu(), b) for a, b in pairs)
            found += [] if same else [f"{name} {number}"]
    return found


@without_triton
def test_the_kernels_find_the_same() -> None:
    assert run_interpreted(__name__) == []


@pytest.mark.gpu
@without_triton
def test_the_kernels_compiled() -> None:
    assert wrong("cuda") == []


@pytest.mark.parametrize(("tree", "ends"), [("best-first:12,3,3", []), ("beam:3,3", ["ends"])])
def test_where_they_are_asked_for(
    tree: str, ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each level and for each tree, and never for more candidates than a program compares."""
    asked: list[str] = []

    def level(*given: Any) -> Any:
        asked.append("level")
        return candidates._level(*given)

    def select(*given: Any) -> Any:
        asked.append("select")
        return candidates._select(*given)

    def through(*given: Any) -> Any:
        asked.append("ends")
        return candidates._ends(*given)

    speculator = Speculator(made("eagle").target, made("eagle"), tree=tree)
    plain = speculator.generate(prompts([7])[0], max_new_tokens=12)
    monkeypatch.setattr(candidates, "has_triton", lambda scores: True)
    monkeypatch.setattr(candidates, "_level_launch", level)
    monkeypatch.setattr(candidates, "_select_launch", select)
    monkeypatch.setattr(candidates, "_ends_launch", through)
    assert torch.equal(speculator.generate(prompts([7])[0], max_new_tokens=12), plain)
    assert asked == ["level", "level", "level", *ends, "select"] * speculator.stats.rounds
    assert not candidates._has_kernels(torch.zeros(1), candidates._MOST + 1)


if __name__ == "__main__":
    print(json.dumps(wrong()))
