"""What a drafter's logits are compared with: the text's tokens, or the target's distribution.

A comparison is walked in chunks. Each gives some positions of a depth, and a function that takes
their logits to their losses in nats and to the gradient of the sum. Those who call it and do not
need the logits again let it write the gradient over them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
from torch import Tensor

from .divergences import Divergence, Loss
from .room import Room, at_least_float32
from .teacher import Teacher

IGNORED = -100
"""The label of a position that is left out of the loss."""

CPU_BYTES = 2**29
"""What the tensors of a chunk may take on a CPU.

At its full size each of them is past the 32 MiB from which on glibc returns freed memory at once.
What is smaller goes to its heap, which fragmented to ten times what was in use.
"""

GPU_BYTES = 2**30
"""What they may take on a GPU, or a quarter of its free memory rounded down to a power of two."""

_CACHED = 2**17
"""Logits that a CPU works on at once, one operation after the other."""

Compare = Callable[[Tensor, bool], tuple[Tensor, Tensor | None]]
"""Logits [n, Vd], and whether they may be written over -> nats, and their gradient [n, Vd].

The nats are [n], or their sum alone where a fused kernel computes it. The gradient is None where
none was asked for. It may lie in the memory of the next chunk's."""

Chunk = tuple[int, Tensor, Compare]
"""A depth, from 0, [n] its positions, and what compares their logits."""


def tensors(loss: Loss) -> int:
    """How many tensors as wide as the vocabulary a chunk has at most.

    For the cross entropy these are the logits and the probabilities, which become the gradient; for
    a difference q - p also the teacher's; other divergences leave their gradient to autograd, which
    keeps what they compute.
    """
    if loss.divergence is None:
        return 2
    return 4 if loss.difference else 10 * loss.parts


def rows_at_once(loss: Loss, width: int, device: torch.device) -> int:
    """How many positions a chunk has: its memory is `tensors` × positions × `width` × 4 bytes.

    That is at most `CPU_BYTES` or, on a GPU, `GPU_BYTES`; twice as much for float64.
    """
    limit = CPU_BYTES
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        # A power of two, so that a little more or less free memory changes no rounding.
        limit = min(GPU_BYTES, 2 ** max(int(free) // 4, 1).bit_length() // 2)
    return max(limit // (tensors(loss) * width * 4), 1)


class HardLabels:
    """The text's own tokens: the cross entropy.

    Args:
        labels: [K, M] int64; `IGNORED` where a position does not count.
        size: see `rows_at_once`.
        room: for the distributions; a new one when None.
        fused: whether a kernel may be taken that gives the sum of a chunk's losses alone.
    """

    def __init__(self, labels: Tensor, size: int, room: Room | None = None, fused: bool = True):
        self.labels, self.size, self.room, self.fused = labels, size, room or Room(), fused

    def chunks(self, learns: bool) -> Iterator[Chunk]:
        """Walk all positions that count."""
        counts: list[int] = (self.labels != IGNORED).sum(1).tolist()
        chosen = (self.labels != IGNORED).nonzero()[:, 1]
        for depth, positions in enumerate(chosen.split(counts)):
            for part in positions.split(self.size):
                if len(part):
                    wanted = self.labels[depth].index_select(0, part)
                    yield depth, part, partial(self._compare, wanted, learns)

    def _compare(
        self, wanted: Tensor, learns: bool, logits: Tensor, over: bool
    ) -> tuple[Tensor, Tensor | None]:
        if self.fused and (fused := fused_cross_entropy(logits.device.type)):
            with torch.set_grad_enabled(learns):
                nats = fused(logits.requires_grad_(learns), wanted)
            return nats.detach(), torch.autograd.grad(nats, logits)[0] if learns else None
        q, column = self.room.softmax(logits, "gradient"), wanted.unsqueeze(1)
        nats = log_sum_exp(logits.amax(-1), q) - logits.gather(1, column).squeeze(1)
        if not learns:
            return nats, None
        # The gradient is q, less 1 at the label.
        return nats, q.scatter_add_(1, column, -torch.ones_like(q[:, :1]))


class SoftLabels:
    """The target's distribution, by any divergence.

    Each row of the teacher is computed once, for all the depths that are compared with it.

    Args:
        loss: one with a divergence.
        features: [N, D], the target's final ones.
        rows: [K, M], which of them a position is compared with, ascending over M.
        labels: [K, M] int64, the text's own tokens; `IGNORED` where a position does not count.
        size: how many rows of the teacher at once, see `rows_at_once`.
        room: for logits and distributions; a new one when None.
    """

    def __init__(
        self,
        loss: Loss,
        teacher: Teacher,
        features: Tensor,
        rows: Tensor,
        labels: Tensor,
        size: int,
        room: Room | None = None,
    ):
        self.loss, self.teacher, self.features = loss, teacher, features
        self.rows, self.labels, self.size, self.room = rows, labels, size, room or Room()

    def chunks(self, learns: bool) -> Iterator[Chunk]:
        """Walk all positions that count."""
        assert self.loss.divergence is not None
        compare = self._difference if self.loss.difference else self._divergence
        size = self.size
        # [n] each, by depth, then position
        depth, chosen = (self.labels != IGNORED).nonzero().unbind(1)
        rows = self.rows[depth, chosen]
        taught = torch.zeros(len(self.features), dtype=torch.bool, device=rows.device)
        taught[rows] = True
        number = taught.cumsum(0) - 1  # of a row among the taught ones
        taught = taught.nonzero().squeeze(1)  # [R]
        # Where each chunk's positions begin, for each depth, and the first and last row they ask.
        depths, among = torch.arange(len(self.rows), device=rows.device), number[rows]
        total = len(taught)
        starts = torch.arange(0, total + size, size, device=rows.device).clamp(max=total)
        starts = starts + depths.unsqueeze(1) * total
        bounds = torch.searchsorted(depth * total + among, starts)  # [K, chunks + 1]
        ends = bounds[:, :-1].clamp(max=len(among) - 1), (bounds[:, 1:] - 1).clamp(min=0)
        spans = torch.stack([bounds[:, :-1], bounds[:, 1:], *(among[end] for end in ends)], -1)
        for turn, each in enumerate(spans.transpose(0, 1).tolist()):
            first = turn * size
            asked = taught[first : first + size]
            said = self._ask(self.features.index_select(0, asked))
            for k, (start, stop, low, high) in enumerate(each):
                if start == stop:
                    continue
                mine: slice | Tensor = slice(low - first, high - first + 1)
                if high - low != stop - start - 1:  # some in between are asked for by others alone
                    mine = among[start:stop] - first
                part = chosen[start:stop]
                wanted = self.labels[k].index_select(0, part) if self.loss.labels else None
                yield k, part, partial(compare, said, mine, wanted, learns)

    def _ask(self, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """The log-probabilities; or for a difference the probabilities, and what p alone adds."""
        if not self.loss.difference:
            return self.teacher(features), None
        with torch.no_grad():
            # Where the students' will be, which are computed only after this is done with.
            logits = self.teacher.logits(self.teacher.output.layer, features, self.room)
            p = self.room.softmax(logits, "p")
            return p, -cross_entropy(p, logits, p) if self.loss.own else None

    def _difference(
        self,
        said: tuple[Tensor, Tensor | None],
        mine: slice | Tensor,
        wanted: None,
        learns: bool,
        logits: Tensor,
        over: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Of a divergence -sum p log q, plus what does not depend on q: its gradient is q - p."""
        (p, own), room, dtype = said, self.room, at_least_float32(logits)
        rise = logits if over and logits.dtype == dtype else room.tensor("gradient", logits, dtype)
        found: list[Tensor] = []  # nats, [n] of each part
        for part in parts(logits):
            given, taught = logits[part], p[_within(mine, part)]
            q = room.tensor("q", given, dtype) if rise is logits else rise[part]
            mean, largest = mean_of(given, taught, q), given.amax(-1)
            torch.softmax(given, -1, dtype=dtype, out=q)
            found.append(log_sum_exp(largest, q) - mean)
            if learns:
                torch.sub(q, taught, out=rise[part])
        nats = torch.cat(found)
        if own is not None:
            nats += own[mine]
        return nats, rise if learns else None

    def _divergence(
        self,
        said: tuple[Tensor, None],
        mine: slice | Tensor,
        wanted: Tensor | None,
        learns: bool,
        logits: Tensor,
        over: bool,
    ) -> tuple[Tensor, Tensor | None]:
        divergence: Divergence = self.loss.divergence  # type: ignore[assignment]
        log_p = said[0][mine]
        with torch.set_grad_enabled(learns):
            logits = logits.detach().requires_grad_(learns)
            log_q = logits.log_softmax(-1, dtype=at_least_float32(logits))
            nats = divergence(log_p, log_q)
            if wanted is not None:
                nats = nats - self.loss.labels * log_q.gather(1, wanted.unsqueeze(1)).squeeze(1)
            total = nats.sum()
        return nats.detach(), torch.autograd.grad(total, logits)[0] if learns else None


def target_probabilities(
    teacher: Teacher, features: Tensor, rows: Tensor, labels: Tensor, size: int
) -> Tensor:
    """The target's probability of each label, [K, M]; 0 where there is none.

    Args:
        features: [N, D], the target's final ones.
        rows: [K, M], from which of them a label is predicted; labels of the same row are the same.
        labels: [K, M] int64; `IGNORED` where there is none.
        size: how many rows of the teacher at once.
    """
    there = labels != IGNORED
    wanted = labels.new_full((len(features),), IGNORED)
    wanted[rows[there]] = labels[there]
    asked = (wanted != IGNORED).nonzero().squeeze(1)
    found = features.new_zeros(len(features), dtype=at_least_float32(features))
    for some in asked.split(size):
        log_p = teacher(features.index_select(0, some))
        nats = log_p.gather(1, wanted[some].unsqueeze(1)).squeeze(1)
        found[some] = nats.exp().to(found.dtype)
    return found[rows] * there


def parts(logits: Tensor) -> Iterator[slice]:
    """Rows [n, Vd] a few at a time, as a CPU's cache holds them; all of them on other devices."""
    count, width = logits.shape
    step = max(_CACHED // width, 1) if logits.device.type == "cpu" else max(count, 1)
    yield from (slice(first, min(first + step, count)) for first in range(0, count, step))


def _within(rows: slice | Tensor, part: slice) -> slice | Tensor:
    """The rows that are a part of those which were chosen."""
    if isinstance(rows, Tensor):
        return rows[part]
    return slice(rows.start + part.start, rows.start + part.stop)


def cross_entropy(p: Tensor, logits: Tensor, q: Tensor) -> Tensor:
    """-sum p log q in nats, [n], where q is the softmax of the logits; all [n, Vd].

    It is the logits' log-sum-exp less their mean under p: no tensor of their width is made.
    """
    return log_sum_exp(logits.amax(-1), q) - mean_of(logits, p)


def mean_of(logits: Tensor, p: Tensor, spare: Tensor | None = None) -> Tensor:
    """The mean of logits [n, Vd] under probabilities [n, Vd]: [n].

    `spare`, [n, Vd] of the probabilities' dtype, is memory that a CPU writes the products to.
    """
    if p.device.type != "cpu":
        return torch.bmm(p.unsqueeze(1), logits.to(p.dtype).unsqueeze(2)).view(-1)
    if spare is not None:
        return torch.mul(logits, p, out=spare).sum(-1)
    logits = logits.to(p.dtype)  # products of single rows are slow in a batch
    return torch.stack([torch.dot(*row) for row in zip(p, logits, strict=True)])


def log_sum_exp(largest: Tensor, q: Tensor) -> Tensor:
    """Of logits whose softmax is q [n, Vd], as the largest of each row [n] shows it: [n]."""
    return largest.to(q.dtype) - q.amax(-1).log()


def most_likely(logits: Tensor, wanted: Tensor) -> Tensor:
    """Whether the wanted token of each row has its largest logit: [n, Vd], [n] -> [n] bool.

    >>> logits = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]])
    >>> most_likely(logits, torch.tensor([1, 2])).tolist()
    [True, False]
    """
    if logits.dtype.itemsize < 4:  # often there are several largest ones: the first counts
        return logits.max(-1).indices == wanted
    # Without their places: those take a CPU forty times as long.
    return logits.gather(1, wanted.unsqueeze(1)).squeeze(1) >= logits.amax(-1)


@cache
def fused_cross_entropy(device: str) -> Callable[[Tensor, Tensor], Tensor] | None:
    """liger_kernel's summed cross entropy of logits [M, Vd] and labels [M], where it is installed.

    It is for `cuda`: it makes no float32 copy of the logits and writes their gradient over them.
    """
    if device != "cuda" or importlib.util.find_spec("liger_kernel") is None:
        return None
    fused = importlib.import_module("liger_kernel.transformers.functional").liger_cross_entropy
    return partial(fused, ignore_index=IGNORED, reduction="sum")
