"""The Triton kernel of `levels`, which defines what it computes: one program for each node.

Programs of nodes of other levels return at once, so that the launch is the same for every tree.
A child costs one pass over the vocabulary: what is left after it is written to the other half of
`left`, as its sum is not known before; the sum divides what the next pass reads. Where the sum is
0 the half that was read stays.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from headstart.heads.core.kernels import launching_on

_BLOCK = 4096
_WARPS = 16


@triton.jit
def _copy(source, target, vocab, along, BLOCK: tl.constexpr):
    for start in range(0, vocab, BLOCK):
        ok = start + along < vocab
        tl.store(target + start + along, tl.load(source + start + along, ok, 0.0), ok)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["level", "turns", "nodes", "groups"])
def _judge(
    left, side, before, after, rest, source, tokens, parents, rank, depth, proposal_row, valid,
    level, turns, nodes, groups, vocab,
    DRAWN: tl.constexpr, JUDGED: tl.constexpr, REPLACEMENT: tl.constexpr,
    NODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, node = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, half = row * nodes, tl.num_programs(0).to(tl.int64) * nodes * vocab
    if tl.load(depth + first + node) == level:
        every, along = tl.arange(0, NODES), tl.arange(0, BLOCK)
        real = every < nodes
        mine = real & (tl.load(parents + first + every, real, -2) == node)
        order = tl.load(rank + first + every, real, -1)
        count = tl.sum(mine.to(tl.int32), 0)
        here = left + (first + node) * vocab
        weight = tl.load(before + first + node)
        sum_of_p = tl.cast(1.0, weight.dtype)
        sum_of_q = tl.cast(1.0, weight.dtype)
        offset = tl.cast(0, tl.int64)
        q = rest + (first + node) * vocab
        if DRAWN and count > 0:  # type: ignore
            of = tl.max(tl.where(mine, tl.load(proposal_row + first + every, real, -1), -1), 0)
            _copy(source + (row * groups + tl.maximum(of, 0)) * vocab, q, vocab, along, BLOCK)
        for turn in range(0, count):  # type: ignore
            child = tl.sum(tl.where(mine & (order == turn), every, 0), 0)
            token = tl.load(tokens + first + child)
            of = tl.load(proposal_row + first + child)
            there = True
            if JUDGED:
                there = tl.load(valid + first + child) != 0
            q_x = tl.cast(1.0, weight.dtype)
            if DRAWN:
                # A shift by as many bits as there are, or more, is not defined.
                of_turn = (tl.cast(turns, tl.int64) >> tl.minimum(turn, 63)) & 1
                if (level == 0) & (of_turn == 1):
                    tl.debug_barrier()
                    _copy(
                        source + (row * groups + tl.maximum(of, 0)) * vocab, q, vocab, along, BLOCK
                    )
                    sum_of_q = tl.cast(1.0, weight.dtype)
                q_x = tl.where(of < 0, q_x, tl.load(q + token) / sum_of_q)
            chance = weight * (tl.load(here + offset + token) / sum_of_p) / q_x
            chance = tl.where(chance > 1, 1.0, chance)  # NaN stays
            chance = tl.where(there & (q_x > 0), chance, 0.0)
            tl.store(before + first + child, chance)
            tl.store(after + first + child, chance)
            if there:
                sums = tl.zeros([BLOCK], weight.dtype)
                others = tl.zeros([BLOCK], weight.dtype)
                for start in range(0, vocab, BLOCK):
                    ok = start + along < vocab
                    taken = start + along == token
                    wanted = tl.load(here + offset + start + along, ok, 0.0) / sum_of_p
                    given = tl.zeros([BLOCK], weight.dtype)
                    if DRAWN:
                        given = tl.load(q + start + along, ok, 0.0) / sum_of_q
                        others += tl.where(taken, 0.0, given)
                        given = tl.where(of < 0, 0.0, given)
                    more = weight * wanted - tl.where(taken, q_x, given)
                    more = tl.where((more < 0) | (taken & (of < 0)), 0.0, more)  # NaN stays
                    tl.store(here + half - offset + start + along, more, ok)
                    sums += more
                mass = tl.sum(sums, 0)
                tl.debug_barrier()
                new = mass / (mass + 1 - weight)
                new = tl.where(mass == 0, 0.0, new)
                weight = tl.where((weight >= 1) | (mass != mass), weight, new)
                if mass != 0:
                    offset = half - offset
                    sum_of_p = mass
                if DRAWN and not REPLACEMENT:
                    tl.store(q + token, 0.0, mask=of >= 0)
                    rest_of_q = tl.sum(others, 0)
                    more_of_q = tl.where((of < 0) | (rest_of_q == 0), 1.0, rest_of_q)
                    sum_of_q = sum_of_q * more_of_q
                    tl.debug_barrier()
        tl.store(after + first + node, weight)
        tl.store(side + first + node, (offset > 0).to(tl.int64))


def judge_level(
    left: Tensor,
    side: Tensor,
    before: Tensor,
    after: Tensor,
    rest: Tensor | None,
    source: Tensor | None,
    tokens: Tensor,
    parents: Tensor,
    rank: Tensor,
    depth: Tensor,
    proposal_row: Tensor,
    valid: Tensor | None,
    level: int,
    turns: int,
    replacement: bool,
) -> None:
    """See `levels.judge_level`."""
    kernel: Any = _judge
    batch, nodes, vocab = left.shape[1:]
    rows = [entry.contiguous() for entry in (tokens, parents, rank, depth, proposal_row)]
    with launching_on(left):
        kernel[(batch, nodes)](
            left, side, before, after, left if rest is None else rest,
            left if source is None else source.contiguous(), *rows,
            tokens if valid is None else valid.contiguous().view(torch.uint8),
            level, turns, nodes, 1 if source is None else source.shape[1], vocab,
            DRAWN=source is not None, JUDGED=valid is not None, REPLACEMENT=replacement,
            NODES=triton.next_power_of_2(nodes),
            BLOCK=min(_BLOCK, triton.next_power_of_2(vocab)), num_warps=_WARPS,
        )  # fmt: skip
