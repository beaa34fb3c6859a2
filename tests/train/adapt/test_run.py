"""Adaptation from recorded requests to an artifact, or to none where it does not pay."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import headstart
from headstart.cli import main
from headstart.heads import load_drafter
from headstart.heads.artifacts.manifest import read_manifest
from headstart.train import pipeline
from headstart.train.data.training_rows import Rows
from headstart.train.fit import trainer
from headstart.train.recipe import load_recipe
from tests.support.recipes import TINY

WORDS = (
    *("import", "return", "class", "def", "self", "raise", "yield", "while", "for", "if", "else"),
    *("try", "with", "as", "in", "is", "not"),
)


def record(run: Path, path: Path, count: int = 60, **how: Any) -> headstart.Recorder:
    """Requests to the drafter of a run, each with its own prompt."""
    speculator = headstart.load(run / "target", run / "heads", compile=False)
    recorder = headstart.Recorder(path, speculator)
    for number in range(count):
        words = [WORDS[(number * step) % len(WORDS)] for step in (1, 3, 7)]
        prompt = f"{number} {' '.join(words)}\n"
        ids = speculator.tokenizer(prompt, return_tensors="pt").input_ids  # type: ignore[misc]
        recorder.generate(ids[:, :24], max_new_tokens=20, **how)
    return recorder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that has hardly learnt anything, and 60 requests to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headstart.train.drafter_stage.draw_metrics", lambda *of: False)
        root = tmp_path_factory.mktemp("adapt")
        (root / "tiny.yaml").write_text(yaml.safe_dump(TINY | {"output": str(root / "runs")}))
        few = ["train.max_steps=1", "train.eval_every=1", "train.learning_rate=1e-2"]
        artifact = pipeline.train(load_recipe(root / "tiny.yaml", few))
    record(artifact.parent, root / "traffic.jsonl")
    return artifact.parent


def adapted(run: Path, capsys: Any, *more: str, status: int = 0) -> dict[str, Any]:
    command = ["adapt", "--drafter", f"{run}/heads", "--json"]
    given = [] if "--traffic" in more else ["--traffic", str(run.parent.parent / "traffic.jsonl")]
    assert main([*command, *given, *more]) == status, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("no_pictures")
def test_a_drafter_becomes_better_and_is_kept_beside_the_old_one(run: Path, capsys: Any) -> None:
    before = {p: p.read_bytes() for p in (run / "heads").iterdir() if p.is_file()}
    found = adapted(run, capsys, "train.learning_rate=1e-2")
    assert found["kept"] and found["tau"][1] > found["tau"][0] + 2 * found["gain"]["se"]
    assert found["gain"]["tau"] == pytest.approx(found["tau"][1] - found["tau"][0])
    assert found["artifact"] == str(run.with_name("tiny-adapted") / "heads")
    # Every row is what was decoded, and the drafter's first text is among them.
    rows = Rows.load(run.with_name("tiny-adapted") / "distill")
    lines = (run.parent.parent / "traffic.jsonl").read_text().splitlines()
    asked = {(*(e := json.loads(line))["prompt_token_ids"], *e["token_ids"]) for line in lines}
    new = [info["rows"] for info in rows.info if not info.get("earlier")]
    assert all(tuple(rows.row(n).tokens.tolist()) in asked for n in range(sum(new)))
    assert found["earlier_rows"] == len(rows) - sum(new) > 0
    assert found["earlier"]["prompts"] == TINY["decode"]["prompts"]
    manifest, old = read_manifest(Path(found["artifact"])), read_manifest(run / "heads")
    told = manifest.metrics["adapted"]
    assert told["from_sha256"] == old.weights_sha256 and told["tau"] == found["tau"]
    card = (Path(found["artifact"]) / "README.md").read_text()
    assert "adapted from" in card and f"{found['tau'][1]:.2f}" in card
    target = headstart.load(run / "target").model
    load_drafter(found["artifact"], target)
    assert {p: p.read_bytes() for p in (run / "heads").iterdir() if p.is_file()} == before
    assert "60 requests" not in capsys.readouterr().err
    # The same command finds all of it finished; the next adaptation has a folder of its own.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.DrafterTrainer, "fit", None)
        assert adapted(run, capsys, "train.learning_rate=1e-2") == found
    shown = main(["adapt", "--drafter", f"{run}/heads", "train.learning_rate=1e-2", "--traffic",
                  str(run.parent.parent / "traffic.jsonl")])  # fmt: skip
    assert shown == 0 and "It paid" in capsys.readouterr().out


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    "harm", [["train.learning_rate=1e-12"], ["train.learning_rate=1e3", "train.clip=1e9"]]
)
def test_a_drafter_that_is_not_better_is_not_kept(run: Path, capsys: Any, harm: list[str]) -> None:
    out = run.with_name(f"harm-{harm[0][-3:]}")
    found = adapted(run, capsys, "--out", str(out), *harm, status=1)
    assert not found["kept"] and found["artifact"] is None
    assert found["tau"][1] <= found["tau"][0]
    assert not (out / "heads").exists() and (run / "heads" / "headstart.json").is_file()


def test_answers_of_another_model_are_refused(run: Path, tmp_path: Path, capsys: Any) -> None:
    lines = (run.parent.parent / "traffic.jsonl").read_text().splitlines()
    other = [json.loads(line) | {"target_fingerprint": "0" * 64} for line in lines]
    path = tmp_path / "other.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in other[:40]) + "\n".join(lines[40:]))
    command = ["adapt", "--drafter", f"{run}/heads", "--traffic", str(path)]
    assert main([*command, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "40 of 60 requests were answered by another model" in said and "--rewrite" in said
    assert not (tmp_path / "out").exists()
    assert main([*command, "--target", str(run / "target"), "--out", str(tmp_path / "out")]) == 2
    assert "40 of 60 requests were answered by another model" in capsys.readouterr().err


def test_text_that_the_target_would_not_write_is_refused(
    run: Path, tmp_path: Path, capsys: Any
) -> None:
    """Though nothing says who wrote it; the target may answer it anew."""
    path, out = tmp_path / "others.jsonl", tmp_path / "out"
    texts = [f"{n} {' '.join(sorted(WORDS, key=lambda w: hash((w, n))))}" for n in range(60)]
    path.write_text(
        "".join(json.dumps({"prompt": t[:30], "response": t[30:]}) + "\n" for t in texts)
    )
    command = ["adapt", "--drafter", f"{run}/heads", "--traffic", str(path), "--out", str(out)]
    assert main(command) == 2
    assert "are not" in (said := capsys.readouterr().err) and "--rewrite" in said
    assert not (out / "heads").exists()


@pytest.mark.usefixtures("no_pictures")
def test_the_target_answers_anew(run: Path, tmp_path: Path, capsys: Any) -> None:
    lines = (run.parent.parent / "traffic.jsonl").read_text().splitlines()
    others = [json.loads(line) | {"target_fingerprint": "0" * 64} for line in lines]
    path = tmp_path / "other.jsonl"
    path.write_text(
        "".join(json.dumps(each | {"completion": "not its own"}) + "\n" for each in others)
    )
    more = ["--traffic", str(path), "--out", str(tmp_path / "out"), "--rewrite"]
    found = adapted(run, capsys, *more, "train.learning_rate=1e-2", "distill.earlier_share=0")
    rows = Rows.load(tmp_path / "out" / "distill")
    tokenizer: Any = headstart.load(run / "target").tokenizer
    texts = [tokenizer.decode(rows.row(n).tokens) for n in range(len(rows))]
    assert found["earlier_rows"] == 0 and not any("not its own" in text for text in texts)


def test_an_interrupted_adaptation_goes_on(
    run: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit, out = trainer.DrafterTrainer.fit, tmp_path / "out"

    def killed(self: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer.DrafterTrainer, "fit", killed)
    traffic = str(run.parent.parent / "traffic.jsonl")
    command = ["adapt", "--drafter", f"{run}/heads", "--traffic", traffic, "--out", str(out)]
    assert main(command) == 130
    id = json.loads((out / "before" / "stage.json").read_text())["id"]
    monkeypatch.setattr(trainer.DrafterTrainer, "fit", fit)
    assert main(command) in (0, 1)
    assert json.loads((out / "before" / "stage.json").read_text())["id"] == id


def test_too_few_requests(run: Path, tmp_path: Path, capsys: Any) -> None:
    lines = (run.parent.parent / "traffic.jsonl").read_text().splitlines(keepends=True)
    path = tmp_path / "few.jsonl"
    path.write_text("".join(lines[:12]))
    command = ["adapt", "--drafter", f"{run}/heads", "--traffic", str(path)]
    assert main([*command, "--out", str(tmp_path / "out")]) == 2
    assert "expected at least 6 and 3: record" in capsys.readouterr().err
    assert main([*command, "--out", str(run)]) == 2
    assert "the folder of the drafter's own run" in capsys.readouterr().err
    assert main([*command[:-1], str(tmp_path / "none.jsonl")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_a_run_that_was_removed_gives_no_earlier_rows(
    run: Path, tmp_path: Path, capsys: Any
) -> None:
    shutil.copytree(run / "heads", tmp_path / "heads")
    (tmp_path / "heads" / "stage.json").unlink()
    shutil.copytree(run / "target", tmp_path / "target")
    traffic = str(run.parent.parent / "traffic.jsonl")
    command = ["adapt", "--drafter", f"{tmp_path}/heads", "--traffic", traffic, "--json"]
    command += ["--target", str(tmp_path / "target"), "--out", str(tmp_path / "out")]
    assert main(command) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert found["earlier"] is None and found["earlier_rows"] == 0
