"""The row store: what is written is read, whole shards alone, whatever opens them."""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from headstart.train.data import training_rows
from headstart.train.data.prefixes import DistillError
from headstart.train.data.training_rows import Row, Rows, is_whole, write_shard


def drawn(count: int, seed: int = 0, longest: int = 40) -> list[Row]:
    """Rows of any length; the last of their tokens is supervised."""
    random = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        tokens = random.integers(0, 300, random.integers(1, longest)).astype(np.int32)
        supervised = random.random(len(tokens)) < 0.4
        supervised[-1] = True
        rows.append(Row(f"sé\n{seed}:{number}", tokens, supervised))
    return rows


def store(folder: Path, *shards: list[Row]) -> Path:
    for number, rows in enumerate(shards):
        write_shard(folder / f"train-{number:05d}-of-{len(shards):05d}", rows, {"seen": number})
    return folder


def check_same(rows: Rows, expected: list[Row]) -> None:
    assert len(rows) == len(expected)
    assert rows.lengths.tolist() == [len(row.tokens) for row in expected]
    assert rows.offsets.tolist() == [0, *np.cumsum(rows.lengths)]
    for number, row in enumerate(expected):
        item = rows[number]
        assert item["row"] == number and item["tokens"].dtype == torch.int64
        assert item["tokens"].tolist() == row.tokens.tolist()
        assert item["supervised"].tolist() == row.supervised.tolist()
        assert item["supervised"].dtype == torch.bool
    for number in (0, len(expected) - 1):
        assert rows.id(number) == expected[number].id


def test_what_is_written_is_read(tmp_path: Path) -> None:
    parts = drawn(7), drawn(1, seed=1), drawn(12, seed=2)
    rows, expected = Rows.load(store(tmp_path, *parts)), [*chain(*parts)]
    check_same(rows, expected)
    check_same(Rows.of(expected), expected)
    assert [said["seen"] for said in rows.info] == [0, 1, 2]
    assert sum(said["tokens"] for said in rows.info) == rows.offsets[-1]
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_files_are_plain_and_hold_nothing_of_when_and_where(tmp_path: Path) -> None:
    for folder in (tmp_path / "one", tmp_path / "two"):
        store(folder, drawn(5))
    one, two = ({f.name: f.read_bytes() for f in (tmp_path / n).iterdir()} for n in ("one", "two"))
    assert one == two and len(one) == 5
    (name,) = (tmp_path / "one").glob("*.tokens.npy")
    tokens = np.load(name)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [*chain(*(row.tokens.tolist() for row in drawn(5)))]
    ids = json.loads((tmp_path / "one" / "train-00000-of-00001.json").read_text())["ids"]
    store(tmp_path / "two", drawn(5, seed=9))
    assert ids not in (tmp_path / "two" / "train-00000-of-00001.json").read_text()


def test_tokens_are_counted_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [drawn(9, seed) for seed in range(3)]
    expected = torch.zeros(300, dtype=torch.int64)
    for row in chain(*parts):
        for token in row.tokens[row.supervised]:
            expected[token] += 1
    rows = Rows.load(store(tmp_path, *parts))
    for chunk in (1 << 20, 7):
        monkeypatch.setattr(training_rows, "_CHUNK", chunk)
        assert torch.equal(rows.token_counts(300), expected)
    assert torch.equal(Rows.of(chain(*parts)).token_counts(300), expected)


def test_few_files_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_rows, "_OPEN", 2)
    parts = [drawn(2, seed) for seed in range(6)]
    rows = Rows.load(store(tmp_path, *parts))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(2):
        check_same(rows, [*chain(*parts)])
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 4


def test_rows_that_teach_nothing_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = drawn(3)
    empty = [Row("e", np.arange(4), np.zeros(4, bool)), Row("n", np.zeros(0), np.zeros(0, bool))]
    found = Rows.load(store(tmp_path / "some", [rows[0], empty[0], rows[1]], empty, [rows[2]]))
    check_same(found, rows)
    assert "3 rows without a supervised token are left out" in caplog.text
    assert [said["left_out"] for said in found.info] == [1, 2, 0]
    with pytest.raises(DistillError, match="no row has a supervised token"):
        Rows.load(store(tmp_path / "none", empty))


def test_a_shard_counts_once_it_is_whole(tmp_path: Path) -> None:
    with pytest.raises(DistillError, match="holds no shard"):
        Rows.load(tmp_path)

    def ends() -> Iterator[Row]:
        yield from drawn(3)
        raise KeyboardInterrupt

    path = store(tmp_path, drawn(5)) / "train-00000-of-00001"
    assert is_whole(path)
    with pytest.raises(KeyboardInterrupt):
        write_shard(path, ends(), {})
    assert not is_whole(path)
    assert {file.name for file in tmp_path.iterdir()} == {
        f"{path.name}.{name}" for name in ("tokens.npy", "supervised.npy", "offsets.npy", "ids.txt")
    }
    check_same(Rows.load(store(tmp_path, drawn(4, seed=3))), drawn(4, seed=3))


@pytest.mark.parametrize("name", ["tokens", "supervised", "offsets"])
@pytest.mark.parametrize("cut", [0, 4, 1000])
def test_damaged_files_are_named(tmp_path: Path, name: str, cut: int) -> None:
    file = store(tmp_path, drawn(5)) / f"train-00000-of-00001.{name}.npy"
    if cut:
        file.write_bytes(file.read_bytes()[:-cut])
    else:
        file.unlink()
    with pytest.raises(DistillError, match=rf"{name}\.npy: found \d+ bytes, expected \d+") as error:
        Rows.load(tmp_path)
    assert "\n" not in str(error.value)
