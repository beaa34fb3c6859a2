"""Training rows are read from files: however many there are, they take little memory."""

import itertools
import mmap
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headstart.train.data.batches import Batches, batch_loader, read_ahead
from headstart.train.data.packing import Packs
from headstart.train.data.training_rows import Row, Rows, write_shard
from tests.support.memory import own_megabytes


def made(count: int, length: int) -> Iterator[Row]:
    """Rows of `length` tokens, three quarters of them supervised."""
    random = np.random.default_rng(0)
    text = random.integers(0, 32_000, 4 * length).astype(np.int32)
    supervised = np.arange(length) >= length // 4
    for number in range(count):
        start = number % (3 * length)
        yield Row(str(number), text[start : start + length], supervised)


def added(folder: Path, batches: int, workers: int, packed: bool) -> float:
    """The MB that this process adds when it opens the rows and reads batches."""
    before = own_megabytes()
    rows = Rows.load(folder)
    packs = Packs(rows.lengths) if packed else None
    loader = iter(batch_loader(rows, Batches(rows.lengths, 8, packs=packs), workers))
    read = read_ahead(loader, 2 * workers) if workers else loader
    for batch in itertools.islice(read, batches):
        assert batch["supervised"].any()
    return own_megabytes() - before


def test_rows_take_little_memory(tmp_path: Path) -> None:
    for name, count in (("warm-up", 10), ("rows", 6000)):  # 61 MB
        write_shard(tmp_path / name / "train-00000-of-00001", made(count, 2048), {})
    added(tmp_path / "warm-up", 800, 0, packed=False)
    assert added(tmp_path / "rows", 800, 0, packed=False) < 12
    before = own_megabytes()
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # never pages that were freed before
    with mmap.mmap(-1, 50_000_000, flags=private) as copy:
        copy.write(bytes(len(copy)))
        assert own_megabytes() - before > 40, "the measure sees what is in memory"


@pytest.mark.proof
def test_half_a_million_rows_of_2048_tokens_take_less_than_a_gigabyte(tmp_path: Path) -> None:
    try:
        for shard in range(4):
            write_shard(tmp_path / f"train-{shard:05d}-of-00004", made(125_000, 2048), {})
        found = {}
        for workers, packed in itertools.product((0, 2), (False, True)):
            found[workers, packed] = added(tmp_path, 2000, workers, packed)
        assert Rows.load(tmp_path).token_counts(32_000).sum() == 500_000 * 1536
        print(found)
        assert max(found.values()) < 1000
    finally:
        shutil.rmtree(tmp_path)
