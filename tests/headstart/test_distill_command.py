"""`headstart distill`: the rows and no more, with the counts and the speed."""

import json
from pathlib import Path

import pytest
import yaml

from headstart.cli import main
from headstart.train import pipeline
from headstart.train.data.training_rows import Rows
from headstart.train.recipe import load_recipe
from tests.support.recipes import TINY


def test_the_rows_are_written_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY | {"output": str(tmp_path / "runs")}))
    assert main(["distill", str(path), "distill.examples=10", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    rows = Rows.load(Path(said["folder"]))
    assert len(rows) == said["counts"]["rows"] == 10 and said["tokens_per_second"] > 0
    assert said["counts"]["supervised"] == rows.token_counts(300).sum() == 160
    assert len(said["target_fingerprint"]) == 64 and said["writer"] == "own"
    assert said["settings"]["distill"]["new_tokens"] == 16
    assert not (tmp_path / "runs" / "tiny" / "heads").exists()

    stage = pipeline.write_text(load_recipe(path, ["distill.examples=10"]))
    assert stage.reused  # the chats' settings decide it, as the writer's do
    again = pipeline.write_text(load_recipe(path, ["distill.examples=10", "chat.date=2026-01-01"]))
    assert not again.reused
    assert main(["distill", str(path), "distill.examples=10", "chat.date=2026-01-01"]) == 0
    out = capsys.readouterr().out
    assert "10 rows of 320 tokens, 160 of them to be learnt, in 4 shards" in out
    assert "--fresh writes them anew" in out
