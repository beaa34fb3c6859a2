"""The atomic writer."""

from pathlib import Path

import pytest

from headstart.heads.core.files import write_atomically


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
