"""Stages are reused when nothing they depend on changed, and survive a kill anywhere."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headstart.train.stages import RECORD, Stage, StageStore


class Work:
    """Counts how often it ran."""

    def __init__(self) -> None:
        self.ran = 0

    def __call__(self, folder: Path) -> dict[str, int]:
        self.ran += 1
        (folder / "result").write_text(str(self.ran))
        return {"ran": self.ran}


def two(root: Path, first: Work, second: Work, size: int = 1) -> tuple[Stage, Stage]:
    store = StageStore(root)
    a = store.run("a", {"size": size}, first)
    b = store.run("b", {"depth": 2}, second, reads=[a])
    assert store.seconds() == {"a": a.seconds, "b": b.seconds}
    return a, b


def test_reuse(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = Work(), Work()
    a, b = two(tmp_path, first, second)
    assert not a.reused and not b.reused
    with caplog.at_level(logging.INFO):
        a2, b2 = two(tmp_path, first, second)
    assert a2.reused and b2.reused and (first.ran, second.ran) == (1, 1)
    assert (a2.id, a2.info, a2.seconds) == (a.id, a.info, a.seconds)
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "stage a: reused",
        "stage b: reused",
    ]


def test_a_changed_setting_redoes_the_stage_and_what_reads_it(tmp_path: Path) -> None:
    first, second = Work(), Work()
    two(tmp_path, first, second)
    (tmp_path / "a" / "stale").touch()
    two(tmp_path, first, second, size=2)
    assert (first.ran, second.ran) == (2, 2)
    assert not (tmp_path / "a" / "stale").exists()


def test_only_the_reader_is_redone_when_its_own_setting_changes(tmp_path: Path) -> None:
    first, second = Work(), Work()
    a, _ = two(tmp_path, first, second)
    StageStore(tmp_path).run("b", {"depth": 3}, second, reads=[a])
    two(tmp_path, first, Work())
    assert (first.ran, second.ran) == (1, 2)


def test_redoing_a_stage_redoes_its_readers_even_with_equal_settings(tmp_path: Path) -> None:
    first, second = Work(), Work()
    two(tmp_path, first, second)
    (tmp_path / "a" / RECORD).unlink()
    two(tmp_path, first, second)
    assert (first.ran, second.ran) == (2, 2)


def test_fresh_removes_stages_and_nothing_else(tmp_path: Path) -> None:
    first, second = Work(), Work()
    two(tmp_path, first, second)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    StageStore(tmp_path, fresh=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]
    two(tmp_path, first, second)
    assert (first.ran, second.ran) == (2, 2)


def test_a_failed_stage_is_not_finished(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        StageStore(tmp_path).run("a", {}, fail)
    assert not (tmp_path / "a" / RECORD).exists()
    work = Work()
    StageStore(tmp_path).run("a", {}, work)
    assert work.ran == 1 and not (tmp_path / "a" / "half").exists()


def test_resumable_work_keeps_its_files_unless_the_settings_changed(tmp_path: Path) -> None:
    seen: list[bool] = []

    def shards(folder: Path) -> None:
        seen.append((folder / "shard-0").exists())
        (folder / "shard-0").touch()
        if len(seen) != 2:
            raise RuntimeError("stop")

    for size in (1, 1):
        try:
            StageStore(tmp_path).run("a", {"size": size}, shards, resumable=True)
        except RuntimeError:
            assert len(seen) == 1
    with pytest.raises(RuntimeError):
        StageStore(tmp_path).run("a", {"size": 2}, shards, resumable=True)
    assert seen == [False, True, False]


KILLED = """
import sys, time
from pathlib import Path
from headstart.train.stages import StageStore
store = StageStore(Path(sys.argv[1]))
a = store.run("a", {"size": 1}, lambda folder: {"ran": 1})
def wait(folder):
    (folder / "half").touch()
    time.sleep(60)
store.run("b", {"depth": 2}, wait, reads=[a])
"""


def test_a_kill_loses_no_finished_stage(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)])
    deadline = time.monotonic() + 20
    while not (tmp_path / "b" / "half").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    first, second = Work(), Work()
    a, b = two(tmp_path, first, second)
    assert a.reused and not b.reused and (first.ran, second.ran) == (0, 1)


def test_the_record_says_what_was_run(tmp_path: Path) -> None:
    a, _ = two(tmp_path, Work(), Work())
    record = json.loads((tmp_path / "b" / RECORD).read_text())
    assert record["settings"] == {"depth": 2}
    assert record["reads"] == {"a": a.id}
    assert record["versions"]["python"]


def test_a_damaged_stage_is_run_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = Work(), Work()
    two(tmp_path, first, second)
    (tmp_path / "a" / "README.md").write_text("a card may be edited")
    (tmp_path / "a" / "plan.json").touch()  # and files may be added
    two(tmp_path, first, second)
    assert (first.ran, second.ran) == (1, 1)
    (tmp_path / "b" / "result").write_text("half")
    two(tmp_path, first, second)
    assert (first.ran, second.ran) == (1, 2) and "stage b: result is missing" in caplog.text
    (tmp_path / "a" / "result").unlink()
    two(tmp_path, first, second)
    assert (first.ran, second.ran) == (2, 3)


def test_a_record_without_checksums_is_that_of_a_finished_stage(tmp_path: Path) -> None:
    first, second = Work(), Work()
    two(tmp_path, first, second)
    for name in ("a", "b"):
        record = json.loads((tmp_path / name / RECORD).read_text())
        assert set(record.pop("files")) == {"result"}
        (tmp_path / name / RECORD).write_text(json.dumps(record))
    two(tmp_path, first, second)
    assert (first.ran, second.ran) == (1, 1)
