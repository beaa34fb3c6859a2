"""What choosing tokens, `coupled` and `traversal` launch, with their kernels and without.

Counted on the CPU under a dispatch mode, as in `benchmarks.launches`, which prints it. A sort
counts as one launch there, and is several on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from headstart.heads import Sampling, TokenTree
from headstart.heads.core import best, best_log_probabilities, noise, nucleus, row_seeds
from headstart.infer.rules import levels, matching, traversal
from headstart.infer.rules.rule_api import Text, Verified
from headstart.infer.trees.parse import parse_static

TREES = {"chain:5": "6", "cartesian:2,2,2,2,2": "63", "cartesian:9,6": "64"}


def top_p(device: torch.device | str = "cpu") -> LogitsProcessorList:
    """Temperature and top-p, their numbers on the device as in captured rounds."""
    found: list[TemperatureLogitsWarper | TopPLogitsWarper] = [
        TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.9)
    ]  # fmt: skip
    for item, name in zip(found, ("temperature", "top_p"), strict=True):
        setattr(item, name, torch.tensor(getattr(item, name), dtype=torch.float64, device=device))
    return LogitsProcessorList(found)  # type: ignore[arg-type]


def verified_at(
    tree: str,
    vocabulary: int,
    processors: LogitsProcessorList | None,
    device: torch.device | str = "cpu",
) -> Verified:
    """One row of a static tree, the best of its drafter's scores as children, the target's near."""
    device = torch.device(device)
    shape, _ = parse_static(tree).shape(1, device)
    generator = torch.Generator().manual_seed(9)

    def normal() -> Tensor:
        return torch.randn(1, shape.nodes, vocabulary, generator=generator).to(device)

    drafted = 3 * normal()
    best = drafted.topk(shape.width).indices  # [1, N, W]
    tokens = best.flatten(1).gather(1, shape.parent_or_root * shape.width + shape.rank)
    given = TokenTree(tokens, shape, None, shape.parents, drafted)
    sampling = Sampling(row_seeds(3, 1, device), processors)
    text = Text(torch.zeros(1, 2 * shape.nodes, dtype=torch.long, device=device), 1)
    lengths = torch.zeros(1, dtype=torch.long, device=device)
    return Verified(given, drafted + normal(), sampling, lengths, text)


def rows(vocabulary: int, counts: Callable[[], Any]) -> Iterator[tuple[str, Any, Any]]:
    """What is counted, its counts without kernels, and with them."""
    scores, warper = torch.randn(1, vocabulary), top_p()[1]
    name = "a node's best children, with their log-probabilities"
    yield name, *_both(counts, lambda: best_log_probabilities(scores, 10))
    yield "top-p", *_both(counts, lambda: nucleus.warped(warper, scores))
    scores, positions = scores.unsqueeze(1), torch.zeros(1, 1, dtype=torch.long)
    sampling = Sampling(row_seeds(3, 1))
    yield "noise of a node's children", *_both(counts, lambda: sampling.perturb(scores, positions))
    yield "a sampled token", *_both(counts, lambda: sampling.choose(scores, positions))
    for tree, nodes in TREES.items():
        for processors in (None, top_p()):
            verified = verified_at(tree, vocabulary, processors)
            for rule, accept in (
                ("coupled", matching.matching),
                ("traversal", traversal.traversal),
            ):
                name = f"{rule}, {nodes} nodes, `{tree}`{', top-p' if processors else ''}"
                yield name, *_both(counts, lambda by=accept, given=verified: by(given))


def _both(counts: Callable[[], Any], work: Callable[[], object]) -> tuple[Any, Any]:
    return _count(counts, False, work), _count(counts, True, work)


@torch.no_grad()
def _count(counts: Callable[[], Any], kernels: bool, work: Callable[[], object]) -> Any:
    with ExitStack() as stack:
        if kernels:
            enter = stack.enter_context
            for module in (best, nucleus, noise):
                enter(mock.patch.object(module, "_has_kernels", lambda *given: True))
            enter(mock.patch.object(traversal, "at_once", lambda verified: True))
            enter(mock.patch.object(matching, "_most_at_once", lambda logits: levels.AT_ONCE))
        work()  # what is made once is made by now
        counted = stack.enter_context(counts())
        work()
    return counted


def kernel_calls(nodes: int, vocabulary: int) -> dict[str, tuple[Any, Sequence[str], Any]]:
    """Module, kernel and call of each kernel, for one row of so many nodes; nothing is computed."""
    from headstart.heads.core import best_kernels, noise_kernels, nucleus_kernels, tree_kernels
    from headstart.infer.rules import level_kernels
    from headstart.infer.trees import search_kernels

    scores, share = torch.empty(nodes, vocabulary), torch.empty((), dtype=torch.float64)
    left, rest = torch.empty(2, 1, nodes, vocabulary), torch.empty(1, nodes, vocabulary)
    weights, ids = torch.empty(1, nodes), torch.empty(1, nodes, dtype=torch.int64)
    valid = torch.empty(1, nodes, dtype=torch.bool)
    lines = torch.empty(1, 1 + nodes, 2 + nodes, dtype=torch.int32)
    found, logs = torch.empty(1, 8, 8, dtype=torch.int64), torch.empty(1, 8, 8, dtype=torch.float64)
    ranked = torch.empty(1, 8 * nodes, dtype=torch.float64), torch.empty(1, 8 * nodes).long()
    noisy = scores.unsqueeze(0), torch.empty(1, dtype=torch.int64), ids
    return {
        "level of a search": (search_kernels, ["_level"],
                  lambda: search_kernels.level(found, logs, logs[0, :1], 8, 0)),
        "nodes of a search": (search_kernels, ["_select"],
                  lambda: search_kernels.select(ids[:, :1], ranked[1], *ranked, nodes)),
        "final beams of a search": (search_kernels, ["_ends"],
                  lambda: search_kernels.ends(found, logs)),
        "shape of a tree": (tree_kernels, ["_shape"], lambda: tree_kernels.shape(ids, 7)),
        "lines of a tree": (tree_kernels, ["_pack"],
                  lambda: tree_kernels.pack(ids[:, 0], ids, ids.expand(1, nodes, nodes), None)),
        "lines of a level": (tree_kernels, ["_grow"],
                  lambda: tree_kernels.grow(lines, ids)),
        "best tokens": (best_kernels, ["_part", "_merge"],
                  lambda: best_kernels.best_of(scores, 10, logs=True)),
        "noise": (noise_kernels, ["_add"],
                  lambda: noise_kernels.add_noise(*noisy, None, 1)),
        "sampled tokens": (noise_kernels, ["_part", "_merge"],
                  lambda: noise_kernels.best_with_noise(*noisy)),
        "top-p": (nucleus_kernels, ["_top_p"],
                  lambda: nucleus_kernels.top_p(scores, share, -math.inf)),
        "level of traversal": (level_kernels, ["_judge"],
                  lambda: level_kernels.judge_level(
                      left, ids, weights, weights, rest, rest, ids, ids, ids, ids, ids, valid,
                      0, 0, False)),
    }  # fmt: skip
