"""Batches of training rows: which rows, in which order, for which process, and as which tensors.

The order is a function of seed and epoch alone, so that a run can be resumed at any batch, with any
number of threads that read rows ahead.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

from .packing import Packs
from .training_rows import Row, Rows

_POOL = 50  # steps whose rows are sorted together


class Batches(Sampler[list[Any]]):
    """The batches of one process in an epoch, a list of row numbers each.

    An epoch has every row once. Its rows are shuffled and cut into steps of `batch_size *
    accumulation * world` rows, those of a step into batches, so which rows a step has depends on
    that product alone. Every process has equally many batches. Where rows are grouped, those of
    some steps are sorted by length before they are cut, and the steps shuffled again; the step
    with the longest row is the first of all, so that too little memory is noticed at once.

    The last step of an epoch has what is left. Where that is less than a row for each process, the
    others get the number ~row, which stands for that row without supervised tokens.

    Args:
        lengths: [n], tokens of each row.
        batch_size: rows of a process and forward.
        accumulation: batches of a process and step.
        group_by_length: whether the rows of a batch have about the same length.
        packs: how rows are packed. A batch then has `batch_size` packed rows, and is a list of
            lists of row numbers.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        batch_size: int,
        accumulation: int = 1,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        group_by_length: bool = True,
        packs: Packs | None = None,
    ):
        self.batch_size, self.accumulation = batch_size, accumulation
        self.seed, self.rank, self.world = seed, rank, world
        self.group_by_length, self.packs = group_by_length, packs
        self.sizes = lengths if packs is None else packs.sizes  # [units], a unit is a row or a pack
        self.step_size = batch_size * accumulation * world
        self.full_steps, self.left = divmod(len(self.sizes), self.step_size)
        self.left_batches = -(-self.left // (batch_size * world))
        self.epoch = 0

    @property
    def steps(self) -> int:
        """Steps in an epoch."""
        return self.full_steps + (self.left > 0)

    def __len__(self) -> int:
        return self.full_steps * self.accumulation + self.left_batches

    def set_epoch(self, epoch: int) -> None:
        """Take the order of that epoch, counted from 0, from the next iteration on."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[Any]]:
        draw = np.random.default_rng((self.seed, self.epoch))
        order = self._order(draw)
        rows = None if self.packs is None else self.packs.rows(draw)
        for batch in range(len(self)):
            units = self._units(order, batch).tolist()
            yield units if rows is None else [_of_pack(rows, unit) for unit in units]

    def _order(self, draw: np.random.Generator) -> np.ndarray:
        """The units in the order of their use.  # [units]"""
        order = draw.permutation(len(self.sizes))
        full = self.full_steps * self.step_size
        if not self.group_by_length:
            return order
        # At least four pools, or steps would have the same rows in every epoch.
        pool = self.step_size * max(1, min(_POOL, self.full_steps // 4))
        for first in [*range(0, full, pool), full]:
            part = order[first : min(first + pool, full) if first < full else None]
            part[:] = part[np.argsort(self.sizes[part], kind="stable")]
        steps = order[:full].reshape(self.full_steps, self.step_size)
        draw.shuffle(steps)  # in place, by rows
        if self.epoch == 0 and full:
            longest = int(self.sizes[steps].max(1).argmax())
            steps[[0, longest]] = steps[[longest, 0]]
        return order

    def _units(self, order: np.ndarray, batch: int) -> np.ndarray:
        """This process's part of a batch.  # [B]"""
        step, within = divmod(batch, self.accumulation)
        places = self._places(step, within)
        units = order[step * self.step_size + np.maximum(places, ~places)]
        return np.where(places < 0, ~units, units)

    def places(self, step: int) -> np.ndarray:
        """The places that this process's rows have among all of a step of an epoch, from 0.

        They come in the order of its batches; ~place is that of a row without supervised tokens.
        """
        batches = self.accumulation if step < self.full_steps else self.left_batches
        return np.concatenate([self._places(step, within) for within in range(batches)])

    def _places(self, step: int, within: int) -> np.ndarray:
        """Those of one batch.  # [B]"""
        if step < self.full_steps:
            first = (within * self.world + self.rank) * self.batch_size
            return np.arange(first, first + self.batch_size)
        shared = np.array_split(np.arange(self.left), self.left_batches)[within]
        own = np.array_split(shared, self.world)[self.rank]
        return own if len(own) else ~shared[:1]


def _of_pack(rows: list[list[int]], pack: int) -> list[int]:
    return rows[pack] if pack >= 0 else [~row for row in rows[~pack]]


class _Reader(Dataset):
    """Reads what a list of `Batches` names, as a batch; a future of one where threads read."""

    def __init__(self, rows: Rows, packed: bool, workers: int):
        self.rows = rows
        self.collate: Callable[[Any], dict[str, Any]] = collate_packed if packed else collate
        self.pool = ThreadPoolExecutor(workers, "headstart-rows") if workers else None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, units: list[Any]) -> Any:
        return self._read(units) if self.pool is None else self.pool.submit(self._read, units)

    def _read(self, units: list[Any]) -> dict[str, Any]:
        return self.collate(
            [list(map(self._item, u)) if isinstance(u, list) else self._item(u) for u in units]
        )

    def _item(self, number: int) -> dict[str, Any]:
        if number >= 0:
            return self.rows[number]
        item = self.rows[~number]
        return item | {"supervised": torch.zeros_like(item["supervised"])}


def batch_loader(rows: Rows, batches: Batches, workers: int = 0, pin: bool = False) -> DataLoader:
    """Loads the batches, see `collate` for one; with `workers` threads futures, see `read_ahead`.

    Reading a batch is short work on mapped memory, which threads share. A process for it would
    have to be forked from one whose collectives have threads of their own, and where one of these
    enters the interpreter just then, Python 3.11 stops in the forked process for good.
    """
    return DataLoader(
        _Reader(rows, batches.packs is not None, workers),
        batch_sampler=batches,
        collate_fn=lambda batch: batch,  # as it is
        pin_memory=pin and not workers,
        generator=torch.Generator(),  # it draws, and must not from what training draws from
    )


def read_ahead(
    futures: Iterator[Future[dict[str, Any]]], count: int, pin: bool = False
) -> Iterator[dict[str, Any]]:
    """The batches of a `batch_loader` with workers, up to `count` of which are read at a time.

    Args:
        pin: whether their tensors are put in pinned memory.
    """
    ahead = deque(itertools.islice(futures, count))
    while ahead:
        batch = ahead.popleft().result()
        ahead.extend(itertools.islice(futures, 1))
        yield {name: value.pin_memory() for name, value in batch.items()} if pin else batch


def collate(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Items of `Rows` as a batch, padded on the right to the longest of them.

    Returns:
        `tokens` [B, T] int64, `supervised` [B, T] bool, false in the padding, and `rows` [B], their
        numbers.
    """
    return {"rows": torch.tensor([item["row"] for item in items])} | _padded(items)


def collate_texts(rows: Sequence[Row]) -> dict[str, Any]:
    """Rows that are in no store as a batch: see `collate`; `rows` is None."""
    names = ("tokens", "supervised")
    items = [{name: torch.from_numpy(getattr(row, name)) for name in names} for row in rows]
    batch = _padded(items)
    return {"rows": None, "tokens": batch["tokens"].long(), "supervised": batch["supervised"]}


def collate_packed(packs: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Lists of items of `Rows` as a batch in which the rows of a list stand behind each other.

    Returns:
        `tokens` and `supervised` [B, T] as in `collate`; `segments` [B, T] int32, the place of a
        token's row in its list, -1 in the padding; `positions` [B, T] int64, the place of a token
        in its row, 0 in the padding; and `rows` [B, S], the numbers of the rows, -1 where a list
        has fewer.
    """
    joined = []
    for items in packs:
        lengths = torch.tensor([len(item["tokens"]) for item in items])
        starts = lengths.cumsum(0) - lengths
        each = torch.arange(len(items)).repeat_interleave(lengths)
        joined.append({
            "tokens": torch.cat([item["tokens"] for item in items]),
            "supervised": torch.cat([item["supervised"] for item in items]),
            "segments": each.int(),
            "positions": torch.arange(len(each)) - starts[each],
        })  # fmt: skip
    numbers = [torch.tensor([item["row"] for item in items]) for items in packs]
    rows = pad_sequence(numbers, batch_first=True, padding_value=-1)
    return {"rows": rows} | _padded(joined)


_PADDING = {"tokens": 0, "supervised": False, "segments": -1, "positions": 0}


def _padded(items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    return {
        name: pad_sequence([item[name] for item in items], batch_first=True, padding_value=padding)
        for name, padding in _PADDING.items()
        if name in items[0]
    }
