"""A loss over all depths and its gradient, found in one pass, in chunks that bound the memory.

Tensors as wide as the vocabulary exist for one chunk of positions at a time. A chunk's logits give
the loss and its gradient at once, so they are never computed again for a backward pass, and a row
of the teacher is computed once, for all the depths that are compared with it:

    teacher rows        r0       r1       r2      a chunk of them, computed and dropped
    depth 1             t = r-1  …                the students that predict what r predicts
    depth 2             t = r-2  …
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headstart.heads.trainable import DraftLogits

from .comparisons import Compare, HardLabels, SoftLabels, most_likely
from .room import Room, at_least_float32

Comparison = HardLabels | SoftLabels


def summed_loss(
    outputs: Sequence[DraftLogits],
    states: Tensor,
    factors: Tensor,
    comparison: Comparison,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum over depths of `factors` times the depth's loss summed over its positions.

    The gradient is exact and flows to the states, and to the weights that the outputs name. It is
    found in the forward pass, so there is one backward pass at most, and none of second order.

    Args:
        outputs: of each depth, K in all.
        states: [K, M, D'].
        factors: [K].
        comparison: what the logits are compared with, and where.
        weights: [K, M], by which each position's loss is multiplied; 1 when None.

    Returns:
        A scalar in at least float32; and without gradient, of each depth the loss summed over its
        positions, [K], and how many of its labels have the largest logit, [K] int64.
    """
    trained = {id(weight): weight for output in outputs for weight in output.trainable()}
    learns = torch.is_grad_enabled()  # inside of the function it never is
    given = outputs, comparison, states, factors, weights
    return _Fused.apply(learns, *given, *trained.values())  # type: ignore[no-any-return]


@torch.no_grad()
def label_probabilities(
    outputs: Sequence[DraftLogits], states: Tensor, comparison: HardLabels
) -> Tensor:
    """The drafter's probability of each label, [K, M]; 0 where there is none.

    Args:
        outputs, states: as in `summed_loss`.
        comparison: not one that takes a fused kernel.
    """
    found = torch.zeros_like(comparison.labels, dtype=at_least_float32(states))
    chain = _Chain(_Slopes((), comparison.room), False, comparison.room)
    for depth, chosen, compare in comparison.chunks(False):
        part = states[depth].index_select(0, chosen)
        nats, _ = chain(outputs[depth], part, found.new_ones(()), compare)
        found[depth].index_copy_(0, chosen, nats.neg().exp().to(found.dtype))
    return found


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        learns: bool,
        outputs: Sequence[DraftLogits],
        comparison: Comparison,
        states: Tensor,
        factors: Tensor,
        weights: Tensor | None,
        *trained: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        slopes = _Slopes(trained if learns else (), comparison.room)
        slope = torch.zeros_like(states) if learns and states.requires_grad else None
        total, hits = torch.zeros_like(factors), torch.zeros_like(factors, dtype=torch.int64)
        chain = _Chain(slopes, slope is not None, comparison.room)
        for depth, chosen, compare in comparison.chunks(chain.learns):
            part = states[depth].index_select(0, chosen)
            weight = None if weights is None else weights[depth].index_select(0, chosen)  # [n]
            factor = factors[depth]
            if weight is not None:
                factor = factor * weight.unsqueeze(1).to(factor.dtype)  # [n, 1]
            wanted = comparison.labels[depth].index_select(0, chosen)
            counted = _counting(hits[depth], wanted, compare)
            nats, below = chain(outputs[depth], part, factor, counted)
            total[depth] += (nats if weight is None else nats * weight).sum()
            if slope is not None and below is not None:
                slope[depth].index_copy_(0, chosen, below.to(slope.dtype))
        ctx.slopes = slope, [slopes.of(weight) if learns else None for weight in trained]
        ctx.mark_non_differentiable(total, hits)
        return (total * factors).sum(), total, hits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.slopes is None:
            raise RuntimeError("the gradient of this loss was taken before; it is found only once")
        (slope, slopes), ctx.slopes = ctx.slopes, None
        if outer.device.type != "cpu" or outer != 1:  # to look at it would wait for a GPU
            for each in (slope, *slopes):
                if each is not None:
                    each.mul_(outer.to(each.dtype))
        return None, None, None, slope, None, None, *slopes


def _counting(hits: Tensor, wanted: Tensor, compare: Compare) -> Compare:
    """Compares as `compare` does, and adds to the scalar `hits` how many labels are most likely."""

    def counted(logits: Tensor, over: bool) -> tuple[Tensor, Tensor | None]:
        hits.add_(most_likely(logits, wanted).sum())  # first: logits may be written over
        return compare(logits, over)

    return counted


class _Chain:
    """Runs chunks of states through an output layer and back, and adds up the weights' gradients.

    Args:
        slopes: of the weights that learn.
        below: whether states have a gradient.
        room: for the logits.
    """

    def __init__(self, slopes: _Slopes, below: bool, room: Room):
        self.slopes, self.below, self.room = slopes, below, room
        self.learns = below or bool(slopes.weights)
        self.cast: tuple[int, Tensor] | None = None  # the last matrix, in autocast's dtype

    def __call__(
        self,
        output: DraftLogits,
        states: Tensor,
        factor: Tensor,
        compare: Compare,
    ) -> tuple[Tensor, Tensor | None]:
        """The losses of n states [n, D'], see `Compare`, and `factor` times their gradient there.

        The factor is a scalar, or [n, 1].
        """
        inner = list({id(w): w for w in output.inner() if w in self.slopes}.values())
        with torch.set_grad_enabled(self.learns):
            leaf = states.requires_grad_(self.below)
            hidden = leaf if output.body is None else output.body(leaf)  # [n, D], or logits
        entry = hidden.detach()
        if output.weight is None:
            nats, rise = compare(entry, False)
            slope = rise if rise is None else rise.mul_(factor)
        else:
            matrix, entry = self._matrix(output, entry)
            with torch.autocast(entry.device.type, enabled=False):
                nats, rise = compare(self._product(entry, matrix, output), True)
                slope = None if rise is None else self._back(output, matrix, entry, rise, factor)
        if slope is None or output.body is None:
            return nats, slope
        reached = [leaf, *inner] if self.below else inner
        if not hidden.requires_grad:
            return nats, None
        found = torch.autograd.grad(hidden, reached, slope.to(hidden.dtype), allow_unused=True)
        for weight, part in zip(reached, found, strict=True):
            if weight is not leaf and part is not None:
                self.slopes.of(weight).add_(part)
        return nats, found[0] if self.below else None

    def _matrix(self, output: DraftLogits, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The output's weight and the states before it, in one dtype, which may be autocast's."""
        matrix, kind = output.matrix.detach(), hidden.device.type
        dtype = matrix.dtype
        if torch.is_autocast_enabled(kind) and dtype == torch.float32:
            dtype = torch.get_autocast_dtype(kind)
        if dtype != matrix.dtype or matrix.device != hidden.device:
            if self.cast is None or self.cast[0] != matrix.data_ptr():
                self.cast = None  # let go first
                self.cast = matrix.data_ptr(), matrix.to(hidden.device, dtype)
            matrix = self.cast[1]
        return matrix, hidden.to(dtype)

    def _product(self, hidden: Tensor, matrix: Tensor, output: DraftLogits) -> Tensor:
        """The logits [n, Vd], in memory that all chunks share."""
        shape = len(hidden), len(matrix)
        logits = self.room.empty("logits", shape, hidden.dtype, hidden.device)
        if output.bias is None:
            return torch.mm(hidden, matrix.mT, out=logits)
        return torch.addmm(output.bias.detach().to(hidden.dtype), hidden, matrix.mT, out=logits)

    def _back(
        self, output: DraftLogits, matrix: Tensor, hidden: Tensor, rise: Tensor, factor: Tensor
    ) -> Tensor | None:
        """From the gradient of the logits to that of the states before; adds up the weights'."""
        rise = rise.to(hidden.dtype)
        if output.weight in self.slopes:
            # Scaled before it is rounded: the factor itself may not be, in 8 bits.
            scaled = (hidden.to(factor.dtype) * factor).to(hidden.dtype)
            self.slopes.add_product(output, rise.mT, scaled)
        if output.bias is not None and output.bias in self.slopes:
            kept = self.slopes.of(output.bias)
            if factor.ndim:
                kept.add_((rise.to(factor.dtype) * factor).sum(0, dtype=kept.dtype))
            else:
                kept.add_(rise.sum(0, dtype=kept.dtype) * factor)
        if not (self.below or output.body is not None):
            return None
        return (rise @ matrix).to(factor.dtype).mul_(factor)


class _Slopes:
    """The gradients of weights so far; where a product comes first, there was no 0 before it."""

    def __init__(self, weights: Sequence[Tensor], room: Room):
        self.weights, self.room = {id(weight): weight for weight in weights}, room
        self.number = {each: number for number, each in enumerate(self.weights)}
        self.found: dict[int, Tensor] = {}
        self.due: dict[int, set[int]] = {}  # matrices of a weight that hold nothing yet

    def __contains__(self, weight: Tensor | None) -> bool:
        return id(weight) in self.weights

    def of(self, weight: Tensor) -> Tensor:
        """A weight's gradient, to be added to."""
        slope, due = self._room(weight)
        for index in due:
            _matrices(slope)[index].zero_()
        due.clear()
        return slope

    def add_product(self, output: DraftLogits, left: Tensor, right: Tensor) -> None:
        """Add `left @ right` to the gradient of an output's weight."""
        assert output.weight is not None
        slope, due = self._room(output.weight)
        index = output.index or 0
        kept = _matrices(slope)[index]
        if kept.dtype != left.dtype:
            self.of(output.weight)
            kept.add_(left @ right)
        elif index in due:
            due.remove(index)
            torch.mm(left, right, out=kept)
        else:
            kept.addmm_(left, right)

    def _room(self, weight: Tensor) -> tuple[Tensor, set[int]]:
        if id(weight) not in self.found:
            slope = self.found[id(weight)] = self.room.lend(self.number[id(weight)], weight)
            self.due[id(weight)] = set(range(len(_matrices(slope))))
        return self.found[id(weight)], self.due[id(weight)]


def _matrices(weight: Tensor) -> Tensor:
    """A weight as one or several matrices: [K, Vd, D]; others as one part."""
    return weight if weight.ndim == 3 else weight.unsqueeze(0)
