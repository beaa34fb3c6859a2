"""The items of `smoke` about choosing tokens: kernels, and what is done without them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from transformers.generation.logits_process import TopPLogitsWarper

from headstart.heads import Sampling
from headstart.heads.core import best, best_log_probabilities, best_of, noise, nucleus, row_seeds
from headstart.infer.measure.timing import Stopwatch
from headstart.infer.rules import traversal
from headstart.infer.rules.levels import judge_all

from ..rule_launches import top_p, verified_at
from .smoke_items import Items, Place, missing


def sampling(place: Place) -> Items:
    """The best tokens, top-p and noise for few rows and many; traversal by level and by node."""
    vocabulary = 128_256 if place.full else 500
    for count in (1, 10):
        for rows in (1, 10, 64):
            work = partial(_best, place, rows, vocabulary, count)
            yield f"best {count} tokens, {rows} rows", work
    for rows in (1, 64):
        yield f"top-p, {rows} rows", partial(_top_p, place, rows, vocabulary)
        yield f"noise, {rows} rows", partial(_noise, place, rows, vocabulary)
    for tree in ("chain:5", "cartesian:2,2,2,2,2"):
        yield f"traversal, {tree}", partial(_traversal, place, tree, vocabulary)


def _best(place: Place, rows: int, vocabulary: int, count: int) -> dict[str, Any]:
    """The values are those of `topk`, and stand at the places; the sums are nearly torch's."""
    generator = torch.Generator().manual_seed(0)
    scores = (4 * torch.randn(rows, vocabulary, generator=generator)).to(place.device)
    ways: dict[str, Callable[[], Any]] = {
        "ms": partial(best_of, scores, count),
        "logs_ms": partial(best_log_probabilities, scores, count),
    }
    (values, places), (logs, again) = (work() for work in ways.values())
    with mock.patch.object(best, "_has_kernels", lambda scores, count: False):
        apart = {f"apart_{name}": _times(place, {name: work})[name] for name, work in ways.items()}
        (true, _), (expected, _) = (work() for work in ways.values())
    difference = (logs - expected).abs().max().item()
    same = torch.equal(values, true) and torch.equal(scores.gather(-1, places), true)
    if not (same and torch.equal(again, places) and difference <= 1e-4):
        raise AssertionError(f"it finds other tokens than topk, or sums off by {difference:.2g}")
    return {"difference": difference, **_times(place, ways), **apart, **missing(place)}


def _top_p(place: Place, rows: int, vocabulary: int) -> dict[str, Any]:
    """The sets are alike but for a token where rounding decides."""
    generator = torch.Generator().manual_seed(0)
    scores = (4 * torch.randn(rows, vocabulary, generator=generator)).to(place.device)
    share = torch.tensor(0.9, dtype=torch.float64, device=place.device)
    warper: Any = TopPLogitsWarper(0.9)
    warper.top_p = share
    own, true = nucleus.top_p(scores, share, -torch.inf), warper(None, scores)
    off = int(((own == -torch.inf) != (true == -torch.inf)).sum(-1).max())
    if off > 2:
        raise AssertionError(f"it keeps other tokens than the warper: {off} of them in a row")
    ways = {"ms": partial(nucleus.top_p, scores, share, -torch.inf)}
    ways["sorting_ms"] = partial(warper, None, scores)
    kept = int((own > -torch.inf).sum(-1).max())
    return {"off": off, "kept": kept, **_times(place, ways), **missing(place)}


def _noise(place: Place, rows: int, vocabulary: int) -> dict[str, Any]:
    """The noise is torch's but for the last bits of a logarithm, and so are the tokens."""
    generator = torch.Generator().manual_seed(0)
    scores = (4 * torch.randn(1, rows, vocabulary, generator=generator)).to(place.device)
    positions = torch.arange(rows, device=place.device).unsqueeze(0)
    sampling = Sampling(row_seeds(3, 1, place.device))
    ways: dict[str, Callable[[], Any]] = {
        "ms": partial(sampling.perturb, scores, positions),
        "token_ms": partial(sampling.choose, scores, positions),
    }
    own, tokens = (work() for work in ways.values())
    with mock.patch.object(noise, "_has_kernels", lambda scores: False):
        true = {f"apart_{name}": _times(place, {name: work})[name] for name, work in ways.items()}
        expected, best = (work() for work in ways.values())
    difference = (own - expected).abs().max().item()
    if not difference <= 1e-11 or not torch.equal(tokens, best):
        raise AssertionError(f"it differs from torch's by {difference:.2g}, or in a token")
    return {"difference": difference, **_times(place, ways), **true, **missing(place)}


@torch.no_grad()
def _traversal(place: Place, tree: str, vocabulary: int) -> dict[str, Any]:
    """The weights of all nodes are alike."""
    verified = verified_at(tree, vocabulary, top_p(place.device), place.device)
    plain, found = traversal.node_weights(verified)[1], judge_all(verified)[1]
    difference = (plain - found).abs().max().item()
    if not difference <= 1e-3:
        raise AssertionError(f"its weights differ from the definition's by {difference:.2g}")
    ways = {"ms": partial(_by, True, verified), "by_node_ms": partial(_by, False, verified)}
    return {"difference": difference, **_times(place, ways), **missing(place)}


def _by(level: bool, verified: Any) -> object:
    with mock.patch.object(traversal, "at_once", lambda verified: level):
        return traversal.traversal(verified)


def _times(place: Place, ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    watch, found = Stopwatch(place.device), {}
    for name, work in ways.items():
        watch.time(work, 2)
        found[name] = min(watch.time(work, 5) for _ in range(3))
    return found
