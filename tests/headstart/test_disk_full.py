"""A full disk and a closed folder: whatever writes names the place and a remedy; the old stays."""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import yaml

from headstart.cli import main
from headstart.heads.artifacts.conversion import convert
from headstart.heads.artifacts.export import export_drafter
from headstart.heads.artifacts.merging import save_merged
from headstart.heads.artifacts.plan import Plan, write_plan
from headstart.heads.medusa2 import Medusa2, Medusa2Config
from headstart.train import pipeline
from headstart.train.recipe import load_recipe
from tests.support.artifacts import NEW, medusa, save
from tests.support.disks import files_of_at_most, read_only
from tests.support.recipes import TINY
from tests.support.tiny import letters, one_line, tiny

PLAN = {
    "device": "x", "dtype": "float64", "batch_size": 1, "policy": "chain:1", "tree": [[0]],
    "tau": 1.5, "speedup": 1.2, "acceptance": [[0.5]], "costs": {}, "prompts": 1, "new_tokens": 1,
}  # fmt: skip


def adapted() -> Any:
    target = tiny("gpt2", 3)
    drafter: Any = Medusa2(Medusa2Config.for_target(target, heads=1, rank=1)).double().bind(target)
    drafter.adapter.attach(target)
    drafter.adapter.merge()
    return drafter.eval()


def planned(policy: str) -> Plan:
    whole: dict[str, Any] = PLAN | {"candidates": [{"name": policy * 2000}]}
    return Plan(**whole)


def train(name: str) -> None:
    """What a command raises is what it prints."""
    pipeline.train(load_recipe(f"{name}.yaml"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders that hold something already, and one with what is read."""
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    monkeypatch.setattr(tiny("llama"), "name_or_path", "tiny")
    save(tmp_path / "source")
    export_drafter(medusa(NEW), "original", tmp_path / "theirs")
    (tmp_path / "out").mkdir()
    save(tmp_path / "out" / "old")
    write_plan(tmp_path / "out" / "old", planned("a"))
    for path in tmp_path.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)  # readable to anybody
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(TINY | {"output": "out"}))
    return tmp_path


WRITERS: dict[str, tuple[Callable[[], Any], str]] = {
    "save": (lambda: save(Path("out/old"), NEW), "out/old"),
    "convert": (lambda: convert("theirs", tiny("llama"), letters(), "out/new"), "out/new"),
    "export": (lambda: export_drafter(medusa(NEW), "vllm", "out/new"), "out/new"),
    "merge": (lambda: save_merged(adapted(), "out/new", None), "out/new"),
    "plan": (lambda: write_plan(Path("out/old"), planned("b")), "out/old"),
    "train": (lambda: train("run"), "out/tiny"),
}
ROOM = ("make room", "choose")


def contents(folder: Path) -> dict[str, str]:
    """The sha256 of each file, but for what a run keeps of files and of its owner."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and "out/tiny" not in str(path)
    }


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("disk", ["full", "closed"])
def test_the_place_and_a_remedy_are_named_and_the_old_stays(
    name: str, disk: str, place: Path
) -> None:
    write, where = WRITERS[name]
    before = contents(place)
    trouble: AbstractContextManager[Any] = files_of_at_most(600)
    if disk == "closed":
        trouble = read_only(place / "out", place)
    with trouble, pytest.raises((OSError, ValueError)) as caught:
        write()
    said = one_line(caught.value)
    assert where in said and all(word in said for word in ROOM), said
    assert contents(place) == before
    if name != "train":
        write()


def test_push_copies_into_a_folder_of_the_system_s(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["push", "out/old", "org/name", "--target-name", "org/model", "--dry-run"]
    before = contents(place)
    with files_of_at_most(600):
        assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the copy to push cannot be saved in" in line and "TMPDIR" in line
    assert contents(place) == before and main(command) == 0
