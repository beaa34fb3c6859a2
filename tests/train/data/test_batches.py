"""Batches: each row once an epoch, equal work for processes, little padding, exact tensors."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from headstart.train.data import training_rows
from headstart.train.data.batches import (
    Batches,
    batch_loader,
    collate,
    collate_packed,
    read_ahead,
)
from headstart.train.data.packing import Packs
from headstart.train.data.prefixes import encode
from headstart.train.data.reading import read_documents
from headstart.train.data.training_rows import Row, Rows, write_shard
from tests.support.paths import SHARED


def lengths(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 60, count)


def flat(batch: Sequence[Any]) -> list[int]:
    """The row numbers in a batch, packed or not, those of silent rows negative."""
    return [row for unit in batch for row in (unit if isinstance(unit, list) else [unit])]


def epoch(sizes: np.ndarray, number: int = 0, **how: Any) -> list[list[Any]]:
    batches = Batches(sizes, **how)
    batches.set_epoch(number)
    found = list(batches)
    assert len(found) == len(batches)
    return found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5, 37, 96, 101])
@pytest.mark.parametrize(("size", "accumulation", "world"), [(4, 1, 1), (2, 3, 1), (2, 2, 3)])
def test_an_epoch_has_every_row_once(
    packed: bool, grouped: bool, count: int, size: int, accumulation: int, world: int
) -> None:
    sizes = lengths(count)
    samplers = [
        Batches(
            sizes, size, accumulation, 0, rank, world, grouped, Packs(sizes) if packed else None
        )
        for rank in range(world)
    ]
    parts = [list(sampler) for sampler in samplers]
    assert len({len(part) for part in parts}) == 1  # equal numbers of batches
    every = [flat(batch) for part in parts for batch in part]
    assert all(every)
    assert sorted(row for batch in every for row in batch if row >= 0) == list(range(count))
    # Only those of the last step may be short, or stand in for a row that there is not.
    for sampler, part in zip(samplers, parts, strict=True):
        assert len(part) == len(sampler)
        full, last = np.split(np.array([len(batch) for batch in part]), [-sampler.left_batches])
        if not sampler.left:
            full, last = last, full
        assert (full == size).all() and (last <= size).all() and len(last) <= accumulation
        assert all(row >= 0 for batch in part[: len(full)] for row in flat(batch))


@pytest.mark.parametrize("grouped", [False, True])
def test_a_steps_rows_depend_on_their_number_alone(grouped: bool) -> None:
    sizes = lengths(101)

    def steps(size: int, accumulation: int, world: int) -> list[set[int]]:
        ranks = [
            epoch(sizes, 1, batch_size=size, accumulation=accumulation, rank=rank, world=world,
                  group_by_length=grouped)
            for rank in range(world)
        ]  # fmt: skip
        found = []
        for first in range(0, len(ranks[0]), accumulation):
            own = [batch for rank in ranks for batch in rank[first : first + accumulation]]
            found.append({row for batch in own for row in flat(batch) if row >= 0})
        return found

    whole = steps(12, 1, 1)
    assert whole == steps(3, 4, 1) == steps(6, 1, 2) == steps(2, 2, 3) and len(whole) == 9


def test_the_order_is_of_seed_and_epoch() -> None:
    sizes = lengths(100)
    one = epoch(sizes, batch_size=4)
    assert one == epoch(sizes, batch_size=4)
    assert one != epoch(sizes, 1, batch_size=4) and one != epoch(sizes, batch_size=4, seed=1)
    sampler = Batches(sizes, 4)
    assert list(sampler) == list(sampler) == one  # drawn anew for each iteration
    # Other rows meet, too, and not only in another order.
    first, second = ({frozenset(b) for b in epoch(sizes, n, batch_size=4)} for n in (0, 1))
    assert len(first & second) < 5


def test_grouped_batches_have_rows_of_a_length_and_the_longest_first() -> None:
    sizes = lengths(4000)
    for grouped in (False, True):
        found = epoch(sizes, batch_size=8, group_by_length=grouped)
        ratio = sum(sizes[batch].max() * len(batch) for batch in found) / sizes.sum()
        assert ratio < 1.1 if grouped else ratio > 1.5
        mean = [sizes[batch].mean() for batch in found]
        assert abs(np.corrcoef(mean, range(len(mean)))[0, 1]) < 0.15  # lengths come in any order
    assert sizes.max() in sizes[found[0]]


def computed_per_real(sizes: np.ndarray, batch_size: int, packed: bool) -> float:
    packs = Packs(sizes) if packed else None
    computed = 0
    for batch in Batches(sizes, batch_size, packs=packs):
        each = [int(sizes[unit].sum()) for unit in batch]
        computed += len(each) * max(each)
    return computed / int(sizes.sum())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["gsm8k/test.jsonl", "gpteacher/codegen-instruct.json"])
def test_little_is_padding(name: str, packed: bool) -> None:
    model, data = SHARED / "models/stories260k", SHARED / "data" / name
    if not model.exists() or not data.exists():
        pytest.skip(f"needs {model} and {data}")
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = encode(tokenizer, read_documents(data, answers=True)[:1300], "plain")
    sizes = np.array([len(row) for row in rows])
    for batch_size in (4, 16):
        assert computed_per_real(sizes, batch_size, packed) <= 1.15


def drawn(count: int) -> list[Row]:
    random = np.random.default_rng(1)
    found = []
    for number, length in enumerate(lengths(count)):
        tokens = random.integers(1, 300, length).astype(np.int32)
        found.append(Row(str(number), tokens, random.random(length) < 0.5))
    return found


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def loaded(rows: Rows, batches: Batches, workers: int) -> list[dict[str, Any]]:
    loader = iter(batch_loader(rows, batches, workers))
    return list(read_ahead(loader, 2 * workers) if workers else loader)


@pytest.mark.parametrize("packed", [False, True])
def test_workers_load_what_the_process_loads_itself(tmp_path: Path, packed: bool) -> None:
    write_shard(tmp_path / "train-00000-of-00001", drawn(40), {})
    rows = Rows.load(tmp_path)

    def load(workers: int) -> list[dict[str, Any]]:
        packs = Packs(rows.lengths) if packed else None
        return loaded(rows, Batches(rows.lengths, 4, packs=packs), workers)

    alone, helped = load(0), load(2)
    assert len(alone) == len(helped) and all(map(same, alone, helped))


def test_rows_are_read_ahead_and_no_further() -> None:
    """A batch for each slot is begun before it is asked for; a fault is raised where it is used."""
    stored = Rows.of(drawn(40))
    asked: list[int] = []

    class Seen(Batches):
        def __iter__(self) -> Iterator[list[Any]]:
            for at, units in enumerate(super().__iter__()):
                asked.append(at)
                yield units if at != 7 else [len(stored)]

    batches = read_ahead(iter(batch_loader(stored, Seen(stored.lengths, 4), workers=2)), 4)
    for at in range(7):
        next(batches)
        assert asked == list(range(at + 5)[:10])
    with pytest.raises(IndexError, match="row 40 of 40"):
        next(batches)


def test_threads_read_many_shards_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More files than stay open: what one thread closes another may be about to read."""
    monkeypatch.setattr(training_rows, "_OPEN", 2)
    for shard in range(8):
        write_shard(tmp_path / f"train-{shard:05d}-of-00008", drawn(25), {})
    rows = Rows.load(tmp_path)
    alone = list(batch_loader(rows, Batches(rows.lengths, 4)))
    assert all(map(same, alone, loaded(rows, Batches(rows.lengths, 4), 8)))


def test_loading_draws_nothing_that_training_draws_from() -> None:
    rows = Rows.of(drawn(10))
    state = torch.get_rng_state()
    for workers in (0, 1):
        loaded(rows, Batches(rows.lengths, 4), workers)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_batch_is_as_long_as_its_longest_row() -> None:
    rows = drawn(30)
    stored = Rows.of(rows)
    for batch in batch_loader(stored, Batches(stored.lengths, 4)):
        tokens, supervised, numbers = batch["tokens"], batch["supervised"], batch["rows"].tolist()
        assert tokens.shape == supervised.shape
        assert tokens.shape[1] == max(len(rows[number].tokens) for number in numbers)
        assert tokens.dtype == torch.int64 and supervised.dtype == torch.bool
        for at, number in enumerate(numbers):
            row, padding = rows[number], tokens.shape[1] - len(rows[number].tokens)
            assert tokens[at].tolist() == [*row.tokens, *[0] * padding]
            assert supervised[at].tolist() == [*row.supervised, *[False] * padding]


def test_a_row_that_stands_in_teaches_nothing() -> None:
    stored = Rows.of(drawn(1))
    (first,), (second,) = (
        list(batch_loader(stored, Batches(stored.lengths, 4, rank=rank, world=2)))
        for rank in (0, 1)
    )
    assert torch.equal(first["tokens"], second["tokens"]) and first["supervised"].any()
    assert not second["supervised"].any() and second["rows"].tolist() == [0]


def test_packed_rows_are_found_again() -> None:
    rows = drawn(30)
    stored = Rows.of(rows)
    seen = []
    for batch in batch_loader(stored, Batches(stored.lengths, 3, packs=Packs(stored.lengths))):
        tokens, segments, positions = (batch[n] for n in ("tokens", "segments", "positions"))
        assert segments.dtype == torch.int32 and positions.dtype == torch.int64
        for at, numbers in enumerate(batch["rows"].tolist()):
            real = [number for number in numbers if number >= 0]
            for segment, number in enumerate(real):
                mine = segments[at] == segment
                assert tokens[at][mine].tolist() == rows[number].tokens.tolist()
                assert batch["supervised"][at][mine].tolist() == rows[number].supervised.tolist()
                assert positions[at][mine].tolist() == list(range(len(rows[number].tokens)))
            padding = segments[at] < 0
            assert int((~padding).sum()) == sum(len(rows[number].tokens) for number in real)
            for name in ("tokens", "supervised", "positions"):
                assert not batch[name][at][padding].any()
            seen += real
    assert sorted(seen) == list(range(30))


def test_a_batch_by_hand() -> None:
    items = Rows.of(
        Row(str(n), np.arange(10 * n, 10 * n + n), np.arange(n) % 2 == 0) for n in (1, 2, 3)
    )
    one, two, three = (items[number] for number in range(3))
    batch = collate([three, one])
    assert batch["tokens"].tolist() == [[30, 31, 32], [10, 0, 0]]
    assert batch["supervised"].tolist() == [[True, False, True], [True, False, False]]
    assert batch["rows"].tolist() == [2, 0]
    packed = collate_packed([[three], [two, one, one]])
    assert packed["tokens"].tolist() == [[30, 31, 32, 0], [20, 21, 10, 10]]
    assert packed["segments"].tolist() == [[0, 0, 0, -1], [0, 0, 1, 2]]
    assert packed["positions"].tolist() == [[0, 1, 2, 0], [0, 1, 0, 0]]
    assert packed["rows"].tolist() == [[2, -1, -1], [1, 0, 0]]
