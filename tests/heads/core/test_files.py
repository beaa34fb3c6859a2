"""Writers of whole files and whole lines."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headstart.heads.core import files
from headstart.heads.core.files import append_line, flush_folder, write_atomically


def test_a_failing_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "deep" / "file"
    write_atomically(file, b"old")

    def fail(handle: int) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as context:
        context.setattr("headstart.heads.core.files.os.fsync", fail)
        with pytest.raises(OSError, match="disk full"):
            write_atomically(file, b"new")
    assert file.read_bytes() == b"old"
    assert list(file.parent.iterdir()) == [file]
    write_atomically(file, "τ")
    assert file.read_text(encoding="utf-8") == "τ"


@pytest.mark.parametrize(
    ("there", "kept"),
    [
        ("", []),
        ('{"a": 1}\n', [{"a": 1}]),
        ('{"a": 1}\n{"a": 2, "b": "half a li', [{"a": 1}]),  # of a process that was killed
        ('{"a": 1}\n{"a": 2}', [{"a": 1}, {"a": 2}]),  # an editor left out the last end of line
        ('{"a": "' + "x" * 200_000, []),
    ],
)
def test_a_line_is_appended_behind_whole_ones(
    tmp_path: Path, there: str, kept: list[dict[str, int]]
) -> None:
    path = tmp_path / "lines"
    path.write_text(there)
    append_line(path, json.dumps({"τ": "ü"}, ensure_ascii=False))
    assert [*map(json.loads, path.read_text("utf-8").splitlines())] == [*kept, {"τ": "ü"}]


def test_the_owner_alone_may_read_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, None)
    assert path.read_bytes() == b"" and stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(("folder_mode", "file_mode"), [(0o755, 0o644), (0o700, 0o600)])
def test_weights_may_be_read_by_those_who_may_read_their_folder(
    tmp_path: Path, folder_mode: int, file_mode: int
) -> None:
    folder = tmp_path / "heads"
    folder.mkdir()
    folder.chmod(folder_mode)
    save_file({"weight": torch.zeros(2)}, folder / "model.safetensors")
    secret = folder / "journal"
    append_line(secret, None)
    flush_folder(folder)
    assert stat.S_IMODE((folder / "model.safetensors").stat().st_mode) == file_mode
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


def test_a_full_disk_leaves_no_part_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "lines", os.write
    append_line(path, "{}")

    def full(file: int, data: bytes) -> int:
        if len(data) < 90:
            raise OSError(28, "No space left on device")
        return write(file, data[:10])

    monkeypatch.setattr(files.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        append_line(path, json.dumps({"a": "x" * 90}))
    assert path.read_text() == "{}\n"


APPEND = """
import sys
from pathlib import Path
from headstart.heads.core.files import append_line
for number in range(200):
    append_line(Path(sys.argv[1]), '{"n": %d, "x": "%s"}' % (number, sys.argv[2] * 9000))
"""


def test_processes_append_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    command = [sys.executable, "-c", APPEND, str(path)]
    running = [subprocess.Popen([*command, letter]) for letter in "abc"]
    assert [each.wait(60) for each in running] == [0, 0, 0]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 600 and all(len(set(row["x"])) == 1 for row in rows)
    assert all([r["n"] for r in rows if r["x"][0] == c] == [*range(200)] for c in "abc")
