"""What a drafter's name stands for: found once, and downloaded by one call."""

from pathlib import Path

import pytest

from headstart.heads import ArtifactError
from headstart.heads.artifacts.source import DrafterSource, SourceKind
from tests.support.artifacts import save
from tests.support.tiny import one_line


@pytest.mark.parametrize("name", ["..nothing", "a/b/c", "/nothing/here", "x y", "a/b@", "@"])
def test_names_of_nothing(name: str) -> None:
    with pytest.raises(ArtifactError, match="no drafter at") as caught:
        _ = DrafterSource(name).folder
    one_line(caught.value)


def test_a_folder_beside_the_drafters_names_it(tmp_path: Path) -> None:
    heads = save(tmp_path / "heads")
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "config.json").write_text('{"model_type": "headstart_medusa"}')
    with pytest.raises(ArtifactError, match="is another folder of a run") as caught:
        _ = DrafterSource(tmp_path / "train").manifest
    assert f"its drafter is in {heads}" in str(caught.value)
    with pytest.raises(ArtifactError, match="is the folder of a run"):
        _ = DrafterSource(tmp_path).manifest


def test_the_tree(tmp_path: Path) -> None:
    folder = save(tmp_path / "head")
    assert DrafterSource(folder).tree is None
    (folder / "tree.json").write_text("[[0], [0, 0]]")
    assert DrafterSource(folder).tree == [[0], [0, 0]]
    (folder / "tree.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"tree\.json"):
        _ = DrafterSource(folder).tree


def test_the_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert DrafterSource("lookup").kind is SourceKind.WEIGHTLESS
    assert DrafterSource("lookup").tree is None
    with pytest.raises(ArtifactError, match="'lookup' drafts without weights, so there are no"):
        _ = DrafterSource("lookup").folder
    save(tmp_path / "lookup")  # a folder of this name comes first
    assert DrafterSource("lookup").kind is SourceKind.ARTIFACT
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text('{"model_type": "llama"}')
    assert DrafterSource("small").kind is SourceKind.CHECKPOINT
    (tmp_path / "small" / "config.json").write_text('{"model_type": "headstart_medusa"}')
    assert DrafterSource("small").kind is SourceKind.ARTIFACT
    with pytest.raises(ArtifactError, match=r"holds no headstart\.json"):
        _ = DrafterSource("small").manifest


@pytest.mark.parametrize(
    ("names", "with_pickles", "without"),
    [
        (["headstart.json", "pytorch_model.bin"], {"pytorch_model.bin"}, set()),
        (["config.json", "medusa_lm_head.pt"], {"medusa_lm_head.pt"}, set()),
        (["config.json", "pytorch_model.bin", "x.py"], {"pytorch_model.bin"}, set()),
        (["config.json", "medusa_lm_head.safetensors", "model.safetensors", "x.py"],
         {"medusa_lm_head.safetensors"}, {"medusa_lm_head.safetensors"}),
        (["config.json", "model.safetensors", "model-1.safetensors", "tokenizer.json", "a/b.json"],
         {"model.safetensors", "tokenizer.json"}, {"model.safetensors", "tokenizer.json"}),
        (["config.json", "model-1.safetensors", "model.safetensors.index.json", "consolidated.pth",
          "pytorch_model.bin"],
         {"model-1.safetensors", "model.safetensors.index.json"},
         {"model-1.safetensors", "model.safetensors.index.json"}),
    ],
)  # fmt: skip
def test_only_needed_files_are_downloaded(
    names: list[str], with_pickles: set[str], without: set[str],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    module = "headstart.heads.artifacts.source"
    asked: list[set[str]] = []
    monkeypatch.setattr(f"{module}.file_names", lambda name: names)
    monkeypatch.setattr(
        f"{module}.download", lambda name, files: asked.append(set(files)) or tmp_path
    )
    for allow_pickle in (True, False):
        source = DrafterSource("org/name", allow_pickle)
        assert source.folder == source.folder == tmp_path
    ours = {name for name in names if name in ("config.json", "headstart.json")}
    found = [files & set(names) for files in asked]
    assert found == [with_pickles | ours, without | ours]
