"""The candidates of a search: which of a level are extended, and which of all make the tree.

On CUDA each step is one launch, see `search_kernels`; with torch's operators it is some dozen
launches a level and twenty for the tree.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from headstart.heads.core.triton_here import has_triton

NEVER = float("-inf")  # the score of what is no candidate
_MOST = 1024  # candidates that one program compares with each other

_Level = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
_Chosen = tuple[Tensor, Tensor, Tensor]


class SearchLevel(NamedTuple):
    """One depth of a search: C = F * w candidates, and the best F' of them, of equals the earlier.

    Attributes:
        tokens: [B, C] target ids; -1 where there is none.
        scores: [B, C] float64, log-probability of the path from the root; -inf where there is none.
        kept: [B, F'] the candidates that are extended next, best first.
        inner: [B, F'] their tokens; 0 where there is none.
        parent: [B, F'] the numbers of their parents, among all nodes that were extended; -1 for the
            root.
        best: [B, F'] their scores.
    """

    tokens: Tensor
    scores: Tensor
    kept: Tensor
    inner: Tensor
    parent: Tensor
    best: Tensor


def grow_level(ids: Tensor, values: Tensor, above: Tensor, keep: int, first: int) -> SearchLevel:
    """The candidates of a level, F nodes with w children each, and the best `keep` of them.

    A child never scores above its parent, and what is no number is no candidate.

    Args:
        ids: [B, F, w], or [B, 1, w] for all nodes alike; -1 where there is none.
        values: their log-probabilities, float64 of the same shape.
        above: [B, F] float64, the nodes' own.
        keep: F', at most F * w.
        first: the number of the first of the F nodes.
    """
    fits = _has_kernels(above, above.shape[1] * ids.shape[-1])
    return SearchLevel(*(_level_launch if fits else _level)(ids, values, above, keep, first))


def select_nodes(
    root: Tensor, tokens: Tensor, scores: Tensor, parents: Tensor, nodes: int
) -> _Chosen:
    """The root and the best `nodes` - 1 of C candidates, of equals the earlier, in their order.

    Args:
        root: [B, 1].
        tokens, scores: [B, C]; no score above the parent's; -inf candidates are left out.
        parents: [B, C], 0 for the root, c + 1 for candidate c, which comes earlier.

    Returns:
        tokens and parents [B, nodes], -1 above the root; and which are there, [B, nodes] bool. What
        is missing comes last, is token 0, and hangs on the root.
    """
    if _has_kernels(scores, scores.shape[1]):
        return _select_launch(root, tokens, scores, parents, nodes)
    return _select(root, tokens, scores, parents, nodes)


def beam_ends(kept: Tensor, best: Tensor) -> Tensor:
    """Minus the place of the best final beam through each beam of a search; -inf where none is.

    Where no beam of a level goes on, those of the level before are final.

    Args:
        kept: [B, D, w] which candidates of a level, w children of each of w beams, are beams.
        best: [B, D, w] float64, their scores.

    Returns:
        [B, D, w] float64.
    """
    fits = _has_kernels(best, kept.shape[-1] ** 2)
    return (_ends_launch if fits else _ends)(kept, best)


def best_places(scores: Tensor, count: int) -> Tensor:
    """The places of the best scores, [B, C] -> [B, count], best first; of equals, the earlier."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _level(ids: Tensor, values: Tensor, above: Tensor, keep: int, first: int) -> _Level:
    values = values.clamp(max=0).nan_to_num(nan=NEVER, neginf=NEVER)
    ids = ids.masked_fill(values == NEVER, -1)
    tokens = ids.expand(-1, above.shape[1], -1).flatten(1)  # [B, C]
    scores = (above.unsqueeze(-1) + values).flatten(1)  # [B, C]
    kept = best_places(scores, keep)
    inner, best = tokens.gather(1, kept).clamp(min=0), scores.gather(1, kept)
    return tokens, scores, kept, inner, kept // ids.shape[-1] + first, best


def _select(root: Tensor, tokens: Tensor, scores: Tensor, parents: Tensor, nodes: int) -> _Chosen:
    count = tokens.shape[1]
    scores = pad(scores, (0, max(nodes - 1 - count, 0)), value=NEVER)
    order = best_places(scores, nodes - 1)  # [B, N-1]
    missing = scores.gather(1, order) == NEVER
    chosen = order.masked_fill(missing, count).sort(dim=1).values  # [B, N-1], missing ones last
    numbers = torch.arange(1, nodes, device=root.device).expand_as(chosen)
    number = torch.zeros_like(pad(tokens, (1, 1))).scatter(1, chosen + 1, numbers)  # [B, C+2]
    above = number.gather(1, pad(parents, (0, 1)).gather(1, chosen))  # [B, N-1]
    tokens = torch.cat([root, pad(tokens, (0, 1)).gather(1, chosen)], dim=1)  # [B, N]
    return tokens, pad(above, (1, 0), value=-1), pad(chosen < count, (1, 0), value=True)


def _ends(kept: Tensor, best: Tensor) -> Tensor:
    width = kept.shape[-1]
    places = -torch.arange(width, dtype=torch.float64, device=best.device)
    finals = torch.where(best == NEVER, best, places)  # [B, D, w], if the level were the last
    ends = [finals[:, -1]]
    for level in range(kept.shape[1] - 1, 0, -1):
        below, parent = ends[-1], kept[:, level] // width
        passing = torch.full_like(below, NEVER).scatter_reduce(1, parent, below, "amax")
        dry = (below == NEVER).all(1, keepdim=True)
        ends.append(torch.where(dry, finals[:, level - 1], passing))
    return torch.stack(ends[::-1], 1)


def _has_kernels(scores: Tensor, candidates: int) -> bool:
    return candidates <= _MOST and has_triton(scores)


@torch.library.custom_op("headstart::grow_level", mutates_args=())
def _level_kernel(ids: Tensor, values: Tensor, above: Tensor, keep: int, first: int) -> _Level:
    if not has_triton(above):
        return _level(ids, values, above, keep, first)
    from . import search_kernels

    return search_kernels.level(ids, values, above, keep, first)


@torch.library.custom_op("headstart::select_nodes", mutates_args=())
def _select_kernel(
    root: Tensor, tokens: Tensor, scores: Tensor, parents: Tensor, nodes: int
) -> _Chosen:
    if not has_triton(scores):
        return _select(root, tokens, scores, parents, nodes)
    from . import search_kernels

    return search_kernels.select(root, tokens, scores, parents, nodes)


@torch.library.custom_op("headstart::beam_ends", mutates_args=())
def _ends_kernel(kept: Tensor, best: Tensor) -> Tensor:
    if not has_triton(best):
        return _ends(kept, best)
    from . import search_kernels

    return search_kernels.ends(kept, best)


_level_launch: Any = _level_kernel
_select_launch: Any = _select_kernel
_ends_launch: Any = _ends_kernel
