"""An artifact's folder: found by its name, and its small files."""

from pathlib import Path

import pytest

from headstart.heads import ArtifactError
from headstart.heads.artifacts.files import artifact_folder, read_tree
from tests.support.artifacts import save
from tests.support.tiny import one_line


@pytest.mark.parametrize("name", ["..nothing", "a/b/c", "/nothing/here", "x y", "a/b@", "@"])
def test_names_of_nothing(name: str) -> None:
    with pytest.raises(ArtifactError, match="no drafter at") as caught:
        artifact_folder(name)
    one_line(caught.value)


def test_the_tree(tmp_path: Path) -> None:
    folder = save(tmp_path / "head")
    assert read_tree(folder) is None
    (folder / "tree.json").write_text("[[0], [0, 0]]")
    assert read_tree(folder) == [[0], [0, 0]]
    (folder / "tree.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"tree\.json"):
        read_tree(folder)
