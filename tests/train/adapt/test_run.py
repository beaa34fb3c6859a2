"""Adaptation from recorded requests to an artifact, or to none where it does not pay."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import headstart
from headstart.cli import main
from headstart.heads import FAMILIES, Manifest, family, fingerprint, load_drafter, save_drafter
from headstart.heads.artifacts.manifest import read_manifest, tokenizer_hash
from headstart.train import pipeline
from headstart.train.data.training_rows import Rows
from headstart.train.fit import trainer
from headstart.train.recipe import load_recipe
from tests.support.counting import SIZE, counting_drafter, counting_target
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
        patch.setitem(sys.modules, "matplotlib", None)  # as `no_pictures`
        root = tmp_path_factory.mktemp("adapt")
        (root / "tiny.yaml").write_text(yaml.safe_dump(TINY | {"output": str(root / "runs")}))
        few = ["train.max_steps=1", "train.eval_every=1", "train.learning_rate=1e-2"]
        artifact = pipeline.train(load_recipe(root / "tiny.yaml", few))
    record(artifact.parent, root / "traffic.jsonl")
    return artifact.parent


def printed(capsys: Any) -> dict[str, Any]:
    """The JSON on stdout; deepspeed may say something in front of it when it is first imported."""
    out = capsys.readouterr().out
    return json.loads(out[out.index("{\n") :])


def adapted(run: Path, capsys: Any, *more: str, status: int = 0) -> dict[str, Any]:
    command = ["adapt", "--drafter", f"{run}/heads", "--json"]
    given = [] if "--traffic" in more else ["--traffic", str(run.parent.parent / "traffic.jsonl")]
    assert main([*command, *given, *more]) == status, capsys.readouterr().err
    return printed(capsys)


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


def counting(folder: Path, off_by: int) -> Path:
    """The folder of a target that counts, with heads that are off by so many."""
    target = counting_target()
    known = {str(number): number for number in range(SIZE)}
    words = Tokenizer(models.WordLevel(known, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    for part in (target, tokenizer):
        part.save_pretrained(folder / "target")
    hashes = fingerprint(target), tokenizer_hash(tokenizer)
    manifest = Manifest("medusa", str(folder / "target"), *hashes)
    save_drafter(counting_drafter(target, 2, off_by), folder / "drafter", manifest, "")
    (folder / "drafter" / "tree.json").write_text("[[0], [0, 0]]")
    return folder


def counted(folder: Path, count: int = 60, **more: Any) -> Path:
    """Requests to it, of which no two begin alike, as a recorder would write them."""
    target = {"target_fingerprint": fingerprint(counting_target()), "model": "counting"}
    path = folder / "traffic.jsonl"
    with path.open("w") as file:
        for number in range(count):
            first = [number % SIZE, number // SIZE, 7, 9]
            answer = [(10 + step) % SIZE for step in range(12)]
            said = [" ".join(map(str, ids)) for ids in (first, answer)]
            line = {"prompt": said[0], "completion": said[1], **target}
            line |= {"prompt_token_ids": first, "token_ids": answer, **more}
            file.write(json.dumps({k: v for k, v in line.items() if v is not None}) + "\n")
    return path


def command(folder: Path, *more: str) -> list[str]:
    return ["adapt", "--drafter", str(folder / "drafter"), "--out", str(folder / "out"), "--json",
            "--traffic", str(folder / "traffic.jsonl"), "train.rows_per_step=8",
            "train.batch_size=8", "train.eval_every=null", "target.dtype=float32",
            *more]  # fmt: skip


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("temperature", [0, 0.5])
def test_a_drafter_without_a_recipe_learns_what_is_asked(
    tmp_path: Path, capsys: Any, temperature: float
) -> None:
    """By the settings of its family, greedily and as the requests were sampled."""
    counted(counting(tmp_path, 3), sampling={"temperature": temperature, "top_k": 4})
    assert main(command(tmp_path, "train.learning_rate=0.2", "train.epochs=10")) == 0
    found = printed(capsys)
    assert found["tau"][0] < 1.3 and found["tau"][1] > 2.5 and found["kept"]
    assert found["sampling"]["temperature"] == temperature
    both = [json.loads((tmp_path / "out" / name / "counts.json").read_text())["traffic"]["counts"]
            for name in ("before", "after")]  # fmt: skip
    tokens, rounds = np.array(both).transpose(2, 0, 1)  # [drafters, prompts] each
    assert (tokens[0] == tokens[1]).all() and (rounds[0] > rounds[1]).any()  # of the same text
    recipe = read_manifest(tmp_path / "out" / "heads").recipe
    assert recipe["decode"]["rule"] == ("coupled" if temperature else "greedy")
    assert recipe["train"]["from"] == str(tmp_path / "drafter")


@pytest.mark.parametrize(
    ("off_by", "rate", "tree"), [(0, 0.1, "[[0], [0, 0]]"), (3, 1e-12, "chain:2"), (0, 0.1, None)]
)
def test_a_drafter_that_is_not_better_is_not_kept(
    tmp_path: Path, capsys: Any, off_by: int, rate: float, tree: str | None
) -> None:
    """One that cannot be better, and one that learns nothing; also with a tree for each."""
    counted(counting(tmp_path, off_by))
    (tmp_path / "drafter" / "tree.json").unlink()  # the family's is sparse
    given = [] if tree is None else [f"decode.tree={tree}"]
    assert main(command(tmp_path, f"train.learning_rate={rate}", *given)) == 1
    found = printed(capsys)
    assert not found["kept"] and found["artifact"] is None
    assert found["tau"][1] <= found["tau"][0]
    assert not (tmp_path / "out" / "heads").exists()
    assert (tmp_path / "drafter" / "headstart.json").is_file()


def test_answers_of_another_model_are_refused(tmp_path: Path, capsys: Any) -> None:
    path = counted(counting(tmp_path, 0), target_fingerprint="0" * 64, model="another")
    for more in ([], ["--target", str(tmp_path / "target")]):
        assert main(command(tmp_path, *more)) == 2
        said = capsys.readouterr().err
        assert "60 of 60 requests were answered by another model (another" in said
        assert "--rewrite" in said and str(path) in said
    assert not (tmp_path / "out" / "before").exists()


def test_text_that_the_target_would_not_write_is_refused(tmp_path: Path, capsys: Any) -> None:
    """Though nothing says who wrote it."""
    odd = [step * 7 % SIZE for step in range(12)]
    counted(counting(tmp_path, 0), token_ids=odd, target_fingerprint=None, model=None)
    assert main(command(tmp_path)) == 2
    said = capsys.readouterr().err
    assert "own text: they surprise it by" in said and "--rewrite" in said
    assert not (tmp_path / "out" / "heads").exists()


def test_the_target_answers_anew(tmp_path: Path, capsys: Any) -> None:
    odd = [step * 7 % SIZE for step in range(12)]
    counted(counting(tmp_path, 0), token_ids=odd, target_fingerprint="0" * 64)
    assert main(command(tmp_path, "--rewrite")) == 1
    rows = Rows.load(tmp_path / "out" / "distill")
    texts = [rows.row(number) for number in range(len(rows))]
    for row in texts:
        asked = len(row.prompt())
        counts = (row.tokens[asked - 1] + np.arange(len(row.tokens) - asked + 1)) % SIZE
        assert row.tokens[asked - 1 :].tolist() == counts.tolist()


def test_an_interrupted_adaptation_goes_on(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted(counting(tmp_path, 0))
    fit, record = trainer.DrafterTrainer.fit, tmp_path / "out" / "before" / "stage.json"

    def killed(self: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer.DrafterTrainer, "fit", killed)
    assert main(command(tmp_path)) == 130
    before = record.read_text()
    monkeypatch.setattr(trainer.DrafterTrainer, "fit", fit)
    assert main(command(tmp_path)) == 1
    assert record.read_text() == before


def test_half_a_line_is_left_out(tmp_path: Path, capsys: Any) -> None:
    path = counted(counting(tmp_path, 0))
    with path.open("a") as file:
        file.write('{"prompt": "3 4 5", "compl')
    assert main(command(tmp_path)) == 1
    assert printed(capsys)["requests"] == 60


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["corpus.held_out=0.05"], "expected at least 6 and 3: record more"),
        (["--traffic", "none.jsonl"], "none.jsonl: no such file"),
        (["--out", "drafter/.."], "is the folder of the drafter's own run"),
        (["train.rate=1"], "unknown key"),
    ],
)
def test_what_cannot_be(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, more: list[str], said: str
) -> None:
    counted(counting(tmp_path, 0))
    (tmp_path / "drafter").rename(tmp_path / "heads")
    monkeypatch.chdir(tmp_path)
    given = [str(tmp_path / "heads") if word == str(tmp_path / "drafter") else word
             for word in command(tmp_path)]  # fmt: skip
    assert main([*given, *(word.replace("drafter/", "heads/") for word in more)]) == 2
    found = capsys.readouterr().err
    assert said in found and found.count("\n") <= 3
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [("lookup", "lookup drafter, which learns nothing"), ("medusa2", "headstart merge")],
)
def test_drafters_that_cannot_learn_further(
    tmp_path: Path, capsys: Any, name: str, said: str
) -> None:
    counted(counting(tmp_path, 0))
    target = counting_target()
    kind: Any = family(name)
    drafter = kind(kind.config_class.for_target(target, **FAMILIES[name].small)).bind(target)
    if drafter.adapter is not None:
        drafter.adapter.attach(target)
    manifest = Manifest(name, str(tmp_path / "target"), fingerprint(target))
    save_drafter(drafter, tmp_path / "other", manifest, "")
    for drafted in (str(tmp_path / "other"), *(["lookup"] if name == "lookup" else [])):
        assert main([*command(tmp_path), "--drafter", drafted]) == 2
        found = capsys.readouterr().err
        assert said in found or "expected a drafter that headstart saved" in found
    assert not (tmp_path / "out").exists()
