"""Stages are reused when nothing they depend on changed, and survive a kill anywhere."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headstart.train.stages import folders
from headstart.train.stages import lock as run_lock
from headstart.train.stages.folders import (
    BEGUN,
    RECORD,
    StageError,
    removable,
    stage_folders,
)
from headstart.train.stages.lock import RunInUseError, RunLock
from headstart.train.stages.store import Stage, StageStore
from tests.support.disks import files_of_at_most
from tests.support.tiny import one_line


class Work:
    """Counts how often it ran."""

    def __init__(self) -> None:
        self.ran = 0

    def __call__(self, folder: Path) -> dict[str, int]:
        self.ran += 1
        (folder / "result").write_text(str(self.ran))
        return {"ran": self.ran}


def two(root: Path, first: Work, second: Work, size: int = 1) -> tuple[Stage, Stage]:
    with StageStore(root) as store:
        a = store.run("a", {"size": size}, first)
        b = store.run("b", {"depth": 2}, second, reads=[a])
    assert store.seconds() == {"a": a.seconds, "b": b.seconds}
    return a, b


def test_reuse(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
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
    told = "a: finished before, and reused\nb: finished before, and reused\n"
    assert capsys.readouterr().err == told


def one(root: Path, name: str, settings: dict[str, int], work: Any, **how: Any) -> Stage:
    with StageStore(root, fresh=how.pop("fresh", False)) as store:
        return store.run(name, settings, work, **how)


def names(root: Path) -> list[str]:
    return sorted(folder.path.name for folder in stage_folders(root))


def test_a_changed_setting_makes_a_stage_beside_the_old_one(tmp_path: Path) -> None:
    first, second = Work(), Work()
    a, b = two(tmp_path, first, second)
    a2, _ = two(tmp_path, first, second, size=2)
    assert (first.ran, second.ran) == (2, 2) and len(names(tmp_path)) == 4
    assert (tmp_path / "a").resolve() == a2.folder.resolve() == a2.plain.resolve()
    assert (tmp_path / "b" / "result").read_text() == "2"
    assert (b.folder / "result").read_text() == "1" and (a.folder / RECORD).is_file()
    # Going back to the first settings finds them, and the plain names with them.
    again = two(tmp_path, first, second)
    assert [stage.id for stage in again] == [a.id, b.id] and (first.ran, second.ran) == (2, 2)
    assert (tmp_path / "a").resolve() == a.folder.resolve()
    assert (tmp_path / "b" / "result").read_text() == "1"


def test_only_the_reader_is_redone_when_its_own_setting_changes(tmp_path: Path) -> None:
    first, second = Work(), Work()
    a, _ = two(tmp_path, first, second)
    one(tmp_path, "b", {"depth": 3}, second, reads=[a])
    two(tmp_path, first, Work())
    assert (first.ran, second.ran) == (1, 2)


def test_redoing_a_stage_redoes_its_readers_even_with_equal_settings(tmp_path: Path) -> None:
    first, second = Work(), Work()
    two(tmp_path, first, second)
    (tmp_path / "a" / RECORD).unlink()
    two(tmp_path, first, second)
    assert (first.ran, second.ran) == (2, 2)


def test_a_fresh_run_keeps_what_there_was(tmp_path: Path) -> None:
    work = Work()
    old = one(tmp_path, "a", {"size": 1}, work)

    def fail(folder: Path) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        one(tmp_path, "a", {"size": 1}, fail, fresh=True)
    assert (tmp_path / "a" / "result").read_text() == "1"
    new = one(tmp_path, "a", {"size": 1}, work, fresh=True)
    assert new.folder.name == f"{old.folder.name}-2" and old.id != new.id
    assert (old.folder / "result").read_text() == "1"
    assert one(tmp_path, "a", {"size": 1}, work).id == new.id and work.ran == 2  # the newest


def test_a_failed_stage_is_not_finished(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        one(tmp_path, "a", {}, fail)
    assert not (tmp_path / "a").exists()
    work = Work()
    one(tmp_path, "a", {}, work)
    assert work.ran == 1 and not (tmp_path / "a" / "half").exists()


def test_resumable_work_keeps_its_files_unless_the_settings_changed(tmp_path: Path) -> None:
    seen: list[bool] = []

    def shards(folder: Path) -> None:
        seen.append((folder / "shard-0").exists())
        (folder / "shard-0").touch()
        raise RuntimeError("stop")

    for size, count in ((1, 4), (1, 4), (2, 4), (1, 8), (1, 4)):
        with pytest.raises(RuntimeError):
            one(tmp_path, "a", {"size": size}, shards, resumable=True, layout={"shards": count})
    assert seen == [False, True, False, False, True]


def test_a_plain_folder_of_an_older_version_steps_aside(tmp_path: Path) -> None:
    old = one(tmp_path, "a", {"size": 1}, Work())
    (tmp_path / "a").unlink()
    old.folder.rename(tmp_path / "a")
    assert one(tmp_path, "a", {"size": 1}, Work()).id == old.id
    new = one(tmp_path, "a", {"size": 2}, Work())
    assert (tmp_path / "a").resolve() == new.folder.resolve()
    assert (old.folder / RECORD).is_file()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").touch()
    with pytest.raises(StageError, match="b is in the way"):
        one(tmp_path, "b", {}, Work())
    assert (tmp_path / "b" / "mine").exists()


def test_without_links_the_newest_stands_under_the_plain_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *args: Any, **how: Any) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    work = Work()
    old, new = (one(tmp_path, "a", {"size": size}, work) for size in (1, 2))
    assert old.folder == new.folder == tmp_path / "a" and len(names(tmp_path)) == 2
    assert (tmp_path / "a" / "result").read_text() == "2"
    assert one(tmp_path, "a", {"size": 1}, work).id == old.id and work.ran == 2
    assert (tmp_path / "a" / "result").read_text() == "1" and len(names(tmp_path)) == 2


def test_stages_are_removed_when_asked(tmp_path: Path) -> None:
    target = one(tmp_path, "target", {"size": 1}, Work())
    heads = one(tmp_path, "heads", {"size": 1}, Work(), reads=[target])
    other = one(tmp_path, "target", {"size": 2}, Work())
    with pytest.raises(StageError, match=r"heads-.* drafts for the target in target-"):
        removable(tmp_path, [target.folder.name])
    with pytest.raises(StageError, match="is the newest heads"):
        removable(tmp_path, [heads.folder.name])
    with pytest.raises(StageError, match=r"no stage 'train-\*' to remove"):
        removable(tmp_path, ["train-*"])
    one(tmp_path, "heads", {"size": 1}, Work(), reads=[other])
    found = removable(tmp_path, ["heads-*", "target-*"])
    assert {folder.path for folder in found} == {heads.folder, target.folder}


LOCKED = """
import sys, time
from pathlib import Path
from headstart.train.stages.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("now", flush=True)
time.sleep(60)
"""


def test_a_run_folder_has_one_owner_and_a_dead_one_does_not_keep_it(tmp_path: Path) -> None:
    with RunLock(tmp_path), pytest.raises(RunInUseError, match="in use by this process"):
        RunLock(tmp_path)
    command = [sys.executable, "-c", LOCKED, str(tmp_path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "now\n"
    with pytest.raises(RunInUseError, match=f"in use by process {child.pid} on .*, since 2"):
        one(tmp_path, "a", {}, Work())
    child.kill()
    child.wait()
    assert one(tmp_path, "a", {}, Work()).info == {"ran": 1}


@pytest.mark.parametrize(("pid", "free"), [(None, True), (1, False), (2**22 + 1, True)])
def test_without_locks_of_the_system_the_holder_must_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pid: int | None, free: bool
) -> None:
    monkeypatch.setattr(run_lock, "fcntl", None)
    holder = {"host": socket.gethostname(), "pid": pid or os.getpid(), "started": "2026-01-01"}
    (tmp_path / "run.lock").write_text(json.dumps(holder))
    if free:
        return RunLock(tmp_path).release()
    with pytest.raises(RunInUseError, match="process 1 on"):
        RunLock(tmp_path)
    (tmp_path / "run.lock").write_text(json.dumps(holder | {"host": "elsewhere"}))
    with pytest.raises(RunInUseError, match=r"if that run has ended, remove .*run\.lock"):
        RunLock(tmp_path)


KILLED = """
import sys, time
from pathlib import Path
from headstart.train.stages.store import StageStore
store = StageStore(Path(sys.argv[1]))
a = store.run("a", {"size": 1}, lambda folder: (folder / "result").touch())
def wait(folder):
    (folder / "half").touch()
    time.sleep(60)
store.run("b", {"depth": 2}, wait, reads=[a])
"""


def test_a_kill_loses_no_finished_stage(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)])
    deadline = time.monotonic() + 20
    while not list(tmp_path.glob("b-*/half")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    first, second = Work(), Work()
    a, b = two(tmp_path, first, second)
    assert a.reused and not b.reused and (first.ran, second.ran) == (0, 1)


def test_a_kill_leaves_no_file_behind_that_was_half_written(tmp_path: Path) -> None:
    def cut(folder: Path) -> None:
        (folder / "shards").mkdir()
        (folder / "shards" / ".train-0.npy.1a2b3c4d.tmp").touch()
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        one(tmp_path, "a", {}, cut, resumable=True)
    stage = one(tmp_path, "a", {}, Work(), resumable=True)
    assert sorted(path.name for path in stage.folder.iterdir() if path.is_file()) == [
        BEGUN, "result", RECORD,
    ]  # fmt: skip
    assert not list((stage.folder / "shards").iterdir())


@pytest.mark.parametrize("resumable", [False, True])
def test_a_folder_that_a_kill_left_without_a_beginning_is_used(
    tmp_path: Path, resumable: bool
) -> None:
    stage = one(tmp_path, "a", {}, Work())
    for path in stage.folder.iterdir():
        path.unlink()
    (stage.folder / f".{BEGUN}.1.tmp").touch()
    again = one(tmp_path, "a", {}, Work(), resumable=resumable)
    assert again.folder == stage.folder and not again.reused
    assert len(list(tmp_path.glob("a-*"))) == 1


def test_a_kill_before_the_plain_name_is_set_leaves_no_link_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(link: Path, plain: Path) -> None:
        raise SystemExit

    stage = one(tmp_path, "a", {}, Work()).folder
    (tmp_path / "a").unlink()
    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(folders.os, "replace", killed)
        folders.make_current(stage, "a")
    monkeypatch.setattr(folders.os, "getpid", lambda: 1)  # of another process
    folders.make_current(stage, "a")
    assert (tmp_path / "a").resolve() == stage.resolve()
    assert [p.name for p in tmp_path.iterdir() if p.is_symlink()] == ["a"]


def write_bytes(folder: Path) -> None:
    (folder / "weights").write_bytes(b"0" * 60_000)


def write_safetensors(folder: Path) -> None:
    save_file({"weight": torch.zeros(15_000)}, folder / "weights")


def write_torch(folder: Path) -> None:
    torch.save(torch.zeros(15_000), folder / "weights")


@pytest.mark.parametrize("write", [write_bytes, write_safetensors, write_torch])
def test_a_disk_that_is_full_is_named_and_loses_nothing(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    old = one(tmp_path, "heads", {"size": 1}, write)
    with files_of_at_most(20_000), pytest.raises(StageError) as error:
        one(tmp_path, "heads", {"size": 2}, write)
    said = one_line(error.value)
    assert f"stage heads cannot be written in {tmp_path} (" in said and "make room there" in said
    assert (tmp_path / "heads").resolve() == old.folder.resolve()
    assert (tmp_path / "heads" / "weights").stat().st_size >= 60_000
    assert one(tmp_path, "heads", {"size": 2}, write).id != old.id


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
    assert (first.ran, second.ran) == (1, 2) and "stage b: result in b-" in caplog.text
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
