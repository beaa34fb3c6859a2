"""Bad days of a save: kills, full disks, folders that are closed or hold something else."""

import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headstart.heads import ArtifactError
from tests.support.artifacts import NEW, OLD, medusa, save, value_of
from tests.support.disks import read_only
from tests.support.tiny import one_line

# Killed while saving.


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked process: 0 when it ended, 1 when it raised, -N when signal N did."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}


def killed_before(step: int, work: Callable[[], object]) -> bool:
    """Run `work` with SIGKILL before its step-th change of the disk; whether it got that far."""

    def child() -> None:
        left = step

        def watch(event: str, arguments: tuple) -> None:
            nonlocal left
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
            if event in CHANGES or writes:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        work()

    status = in_child(child)
    assert status in (0, -signal.SIGKILL), status
    return status != 0


@pytest.mark.parametrize("leftovers", [False, True])
def test_a_save_killed_at_any_write(leftovers: bool, tmp_path: Path) -> None:
    """After each kill the old artifact loads, or the new one whole; the next save puts all right.

    With leftovers, every save starts where another was killed between its two renames.
    """
    steps, seen = 0, []
    while True:
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        folder = save(tmp_path / "head")
        if leftovers:
            folder.rename(tmp_path / ".head.retired")
            (tmp_path / ".head.partial").mkdir()
            assert value_of(folder) == OLD
        if not killed_before(steps, lambda folder=folder: save(folder, NEW)):
            break
        seen.append(value_of(folder))
        save(folder, NEW)
        assert value_of(folder) == NEW
        assert [path.name for path in tmp_path.iterdir()] == ["head"]
        steps += 1
    assert steps > 8, "the kills reached the save"
    assert seen == sorted(seen) and set(seen) == {OLD, NEW}
    assert value_of(folder) == NEW


def test_the_kills_are_seen(tmp_path: Path) -> None:
    """The control: a save without a second folder leaves half an artifact."""

    def careless() -> None:
        for file in (tmp_path / "head").iterdir():
            file.unlink()
        medusa(NEW).save_pretrained(tmp_path / "head")

    folder = save(tmp_path / "head")
    assert killed_before(2, careless)
    with pytest.raises(ArtifactError):
        value_of(folder)


# A disk that is full, a folder that cannot be written to.


@pytest.mark.parametrize("die", [False, True])
def test_no_room_for_the_weights(die: bool, tmp_path: Path) -> None:
    """The system stops the write in the middle of the weights: by an error, or by a signal."""
    folder = save(tmp_path / "head")

    def child() -> None:
        if die:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        with pytest.raises(OSError) as caught:
            save(folder, NEW)
        assert "cannot be saved" in one_line(caught.value)
        assert [path.name for path in tmp_path.iterdir()] == ["head"]

    assert in_child(child) == (-signal.SIGXFSZ if die else 0)
    assert value_of(folder) == OLD
    assert save(folder, NEW) and value_of(folder) == NEW


def test_a_read_only_folder(tmp_path: Path) -> None:
    folder = save(tmp_path / "head")
    with read_only(tmp_path):
        with pytest.raises(OSError, match=r"head .*Permission denied.*untouched") as caught:
            save(Path("head"), NEW)
        with pytest.raises(OSError):
            save(Path("other"), NEW)
    one_line(caught.value)
    assert value_of(folder) == OLD
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_nothing_else_is_replaced(tmp_path: Path) -> None:
    """A folder of other things, or a file, is not what an artifact may take the place of."""
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("mine")
    for name in ("documents", "file"):
        with pytest.raises(ArtifactError, match="no artifact") as caught:
            save(tmp_path / name)
        one_line(caught.value)
    assert (tmp_path / "documents" / "thesis.txt").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    assert value_of(save(tmp_path / "empty")) == OLD


# What stood there before, and the message.


@pytest.mark.parametrize("relative", [False, True])
def test_a_link_gives_way_and_its_folder_stays(relative: bool, tmp_path: Path) -> None:
    """A run's `heads` is such a link, to the folder of the stage that wrote it."""
    theirs, link = save(tmp_path / "heads-1"), tmp_path / "heads"
    link.symlink_to(theirs.name if relative else theirs)
    assert value_of(save(link, NEW)) == NEW
    assert not link.is_symlink() and value_of(theirs) == OLD
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heads", "heads-1"]


def test_a_link_that_a_killed_save_left(tmp_path: Path) -> None:
    theirs = save(tmp_path / "heads-1")
    (tmp_path / ".heads.retired").symlink_to(theirs.name)
    assert value_of(tmp_path / "heads") == OLD
    assert value_of(save(tmp_path / "heads", NEW)) == NEW and value_of(theirs) == OLD
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heads", "heads-1"]


def test_an_old_artifact_that_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The new one is in its place: the save does not fail, and says what is left over."""
    folder, remove = save(tmp_path / "head"), shutil.rmtree

    def closed(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError("closed")
        remove(path, ignore_errors=True)

    monkeypatch.setattr(shutil, "rmtree", closed)
    assert value_of(save(folder, NEW)) == NEW
    assert f"{folder} is saved" in caplog.text and f"delete {tmp_path}/.head.partial" in caplog.text
    monkeypatch.undo()
    assert value_of(save(folder)) == OLD and os.listdir(tmp_path) == ["head"]


def test_an_artifact_that_the_disk_may_not_hold_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After both renames the folder that lists them is flushed; where that fails, the old stays."""
    folder = save(tmp_path / "head")

    def broken(path: Path) -> None:
        assert path == tmp_path and value_of(folder) == NEW
        raise OSError("broken disk")

    monkeypatch.setattr("headstart.heads.artifacts.saving.flush_to_disk", broken)
    with pytest.raises(OSError, match=r"broken disk.*what stood there is untouched"):
        save(folder, NEW)
    assert value_of(folder) == OLD and os.listdir(tmp_path) == ["head"]
