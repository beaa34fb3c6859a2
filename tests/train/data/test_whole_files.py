"""A file gets its name when it is whole, and leaves nothing where it is not."""

from pathlib import Path

import pytest

from headstart.train.data.whole_files import WholeFile
from tests.support.disks import files_of_at_most


def test_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "some.bin"
    for text in (b"one", b"two"):
        with WholeFile(path) as whole:
            whole.file.write(text)
            assert text == b"one" or path.read_bytes() == b"one"
        assert path.read_bytes() == text
    with pytest.raises(ZeroDivisionError), WholeFile(path) as whole:
        whole.file.write(b"three" * (1 // 0))
    assert path.read_bytes() == b"two" and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """What is buffered is written only when the file is closed."""
    with files_of_at_most(100), pytest.raises(OSError), WholeFile(tmp_path / "some.bin") as whole:
        whole.file.write(bytes(1000))
    assert not list(tmp_path.iterdir())


def test_two_at_once_have_files_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "some.bin"
    with WholeFile(path) as one, WholeFile(path) as other:
        one.file.write(b"one")
        other.file.write(b"two")
    assert path.read_bytes() == b"one" and list(tmp_path.iterdir()) == [path]
