"""What stays of a training, and is continued by a longer one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from headstart.heads.artifacts.files import WEIGHTS
from headstart.train.fit.checkpoints import last_checkpoint
from headstart.train.stages.kept import continue_from


def test_a_kill_while_checkpoints_are_copied_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best one alone, which has no optimizer's state, is not where training goes on."""
    earlier, folder = tmp_path / "earlier" / "checkpoints", tmp_path / "longer" / "checkpoints"
    for step in (2, 6):
        (place := earlier / f"checkpoint-{step}").mkdir(parents=True)
        (place / WEIGHTS).touch()
        (place / "complete.json").touch()
        best = {"best_model_checkpoint": str(earlier / "checkpoint-2")}
        (place / "trainer_state.json").write_text(json.dumps(best))
    copytree = shutil.copytree

    def killed(source: Path, place: Path) -> Any:
        if source.name == "checkpoint-6":
            raise KeyboardInterrupt
        return copytree(source, place)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copytree", killed)
        with pytest.raises(KeyboardInterrupt):
            continue_from(earlier, folder)
    continue_from(earlier, folder)
    last = folder / "checkpoint-6"
    assert last_checkpoint(folder) == last and (folder / "checkpoint-2").is_dir()
    state = json.loads((last / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(folder / "checkpoint-2")
    # What the longer training has written since stays.
    last.rename(folder / "checkpoint-8")
    continue_from(earlier, folder)
    assert not last.exists()
