"""What cannot work ends before the first stage, in one line, and leaves nothing behind."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from headstart.train import pipeline
from headstart.train.checks import early, needs
from headstart.train.checks.early import check_run
from headstart.train.data.documents import Document
from headstart.train.recipe import Recipe, Scratch, parse_recipe
from headstart.train.scratch_target import build_model, train_tokenizer
from tests.support.paths import ROOT
from tests.support.recipes import TINY, launch
from tests.support.tiny import one_line

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target of 128 tokens of context, with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("target")
    words = " ".join(f"word{n} {n * n}" for n in range(400))
    tokenizer = train_tokenizer([Document("words", words)], 300, 128)
    spec = Scratch(vocab_size=300, hidden_size=32, layers=2, intermediate_size=64, context=128)
    build_model(spec, tokenizer, 0).save_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def chats(folder: Path, count: int = 30) -> Path:
    path = folder / "chats.jsonl"
    rows = [
        {"messages": [
            {"role": "user", "content": f"word{n} and {n * n}?"},
            {"role": "assistant", "content": f"word{n + 1}"},
        ]}
        for n in range(count)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recipe(folder: Path, model: Path, /, **sections: dict[str, Any]) -> Recipe:
    """A recipe of chats that works, with keys of its sections changed."""
    data: dict[str, Any] = TINY | {
        "output": str(folder / "runs"),
        "target": {"model": str(model)},
        "corpus": {"source": str(chats(folder)), "held_out": 0.4},
        "distill": {**TINY["distill"], "prefix": "prompt", "prefix_tokens": 40},
    }
    for section, changes in sections.items():
        # The options of one family are unknown to another.
        kept = {} if "family" in changes else data[section]
        data[section] = {**kept, **changes}
    return parse_recipe(data)


def test_a_run_that_can_work_says_what_it_needs(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = check_run(recipe(tmp_path, target), parts=("validation", "bench"))
    assert plan.context == 128 and plan.drafter.device.type == "meta"
    line, _ = capsys.readouterr().err.splitlines()
    assert line.startswith("tiny: a drafter of 2,112 parameters; at least 238 kB of memory")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("small", [True, False])
def test_prompts_are_counted_once(
    tmp_path: Path, target: Path, small: bool, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Those of a small corpus before its stage, and those of others after it."""
    monkeypatch.setattr(early, "_SMALL", 8_000_000 if small else 0)
    made = recipe(tmp_path, target)
    with open(tmp_path / "chats.jsonl", "a") as file:
        rows = [{"prompt": f"{n} " * 60} for n in range(30)]
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    assert check_run(made).counted is small
    capsys.readouterr()
    with pipeline.Run(made, False) as run:
        corpus, _ = run._begin(True)
    assert corpus.info["train_documents"]
    said = capsys.readouterr().err.splitlines()
    assert len([line for line in said if "longer than distill.prefix_tokens 40" in line]) == 1


def test_the_time_that_is_told_counts_what_a_target_may_learn_past_its_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = {"max_seconds": 90, "min_tokens": 6000}
    given: dict[str, Any] = TINY | {"output": str(tmp_path / "runs")}
    given |= {"target": {"scratch": {**TINY["target"]["scratch"], **made}}}
    given |= {name: {**TINY[name], "max_seconds": 60} for name in ("distill", "train")}
    check_run(parse_recipe(given))
    _, line = capsys.readouterr().err.splitlines()
    assert line.endswith("about 5 min without measuring it")


def test_what_bounds_leave_out_is_said_once_and_noted(
    tmp_path: Path, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"writer": "given", "max_length": 100, "examples": 5}
    made = recipe(tmp_path, target, distill=given, corpus={"max_bytes": 1000})
    stage = pipeline.write_text(made)
    corpus = json.loads((made.folder / "corpus" / "stage.json").read_text())["info"]
    count = corpus["train_documents"] + corpus["held_out_documents"]
    assert 10 < count < 30 and corpus["ended_by_max_bytes"]
    assert stage.info["not_taken"] == corpus["train_documents"] - 5 > 0
    lines = [line for line in caplog.messages if "max_bytes" in line or "examples" in line]
    assert lines == [
        f"corpus: corpus.max_bytes 1,000 ends the corpus after {count} documents",
        f"distill: 5 of {corpus['train_documents']} documents are taken (distill.examples)",
    ]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "option": ({"drafter": {"TYPO": 1}}, r"drafter\.TYPO is not an option of 'medusa'"),
    "value": ({"drafter": {"heads": 0}}, "heads"),
    "family": ({"drafter": {"family": "medusae"}}, "drafter.family is 'medusae'"),
    "feature layer": (
        {"drafter": {"family": "eagle3", "feature_layers": [0, 1, 9]}}, "feature layer 9",
    ),
    "vocabulary": ({"drafter": {"output": "trimmed", "draft_vocab_size": 400}}, "400"),
    "no such target": ({"target": {"model": "org/none-such"}}, "org/none-such is not a folder"),
    "a folder of something else": ({}, "holds no config.json; expected the folder of a model"),
    "revision of a folder": ({"target": {"revision": "zzz"}}, "'zzz', but target.model .* folder"),
    "type": ({"drafter": {"heads": "three"}}, r"drafter\.heads: expected int, got str"),
    "4bit": ({"target": {"dtype": "4bit"}}, "bitsandbytes"),
    "no such corpus": ({"corpus": {"source": "none.jsonl"}}, "no such file"),
    "rows": ({"distill": {"new_tokens": 100}}, "make 140 tokens, but the target's context is 128"),
    "validation": ({"decode": {"new_tokens": 100}}, r"decode\.new_tokens 100 make 140 tokens"),
    "held-out": ({"decode": {"prompts": 50}}, "thirds of them, expected 50; give more documents"),
    "prompts": ({"distill": {"prefix_tokens": 3}}, "of at most 3 tokens"),
    "earlier": ({"distill": {"earlier": "nowhere"}}, "distill.earlier: nowhere holds no manifest"),
    "writing": ({"distill": {"drafter": "./nowhere"}}, "nowhere"),
    "tree": ({"decode": {"tree": "chain:4"}}, "decode.tree is 4 deep, but a medusa drafter"),
    "loss": ({"train": {"feature_weight": 1.0}}, "feature_weight"),
    "packed": ({"train": {"packing": True, "packed_length": 30}}, "packed_length is 30, but a"),
    "depth": ({"drafter": {"heads": 4000}}, "drafter.heads is 4000, but a training row has"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_work_ends_before_the_first_stage(
    tmp_path: Path, target: Path, name: str
) -> None:
    changes, said = WRONG[name]
    if name == "a folder of something else":
        changes = {"target": {"model": str(tmp_path)}}
    with pytest.raises(ValueError, match=said) as error:
        pipeline.run(recipe(tmp_path, target, **changes))
    one_line(error.value)
    assert not (tmp_path / "runs").exists()


def test_what_a_corpus_lacks_is_said_once(
    tmp_path: Path, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Though it is read twice: before the first stage, and by it."""
    made = recipe(tmp_path, target, corpus={"on_error": "skip"})
    with chats(tmp_path).open("a") as file:
        file.write("{}\n")
    pipeline.write_text(made)
    (said,) = [line for line in caplog.messages if line.startswith("corpus: ")]
    assert said.startswith("corpus: 1 row skipped; the first: ")


def test_settings_without_effect_are_warned_of(
    tmp_path: Path, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_run(recipe(tmp_path, target, train={"packed_length": 30}))
    said = "tiny: train.packed_length has no effect here: it needs train.packing"
    assert caplog.messages == [said]


def test_disk_and_memory_are_judged(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = recipe(tmp_path, target, distill={"examples": 10**12})
    with pytest.raises(ValueError, match=r"may write 280000\.0 GB into .*lower distill.examples"):
        check_run(huge)
    monkeypatch.setattr(needs, "total_memory", lambda: 10**6)
    with pytest.raises(ValueError, match=r"at least 2\.\d MB of memory"):
        check_run(recipe(tmp_path, target, train={"batch_size": 200}))


def test_a_missing_template_is_said(tmp_path: Path, target: Path) -> None:
    check_run(recipe(tmp_path, target, distill={"chat": "template"}))
    bare = tmp_path / "bare"
    shutil.copytree(target, bare, ignore=shutil.ignore_patterns("chat_template*"))
    made = recipe(tmp_path, bare, distill={"chat": "template"})
    with pytest.raises(ValueError, match="has no chat template; set distill"):
        check_run(made)


def test_a_student_knows_the_targets_tokens(tmp_path: Path, target: Path) -> None:
    student = tmp_path / "student"
    shutil.copytree(target, student)
    made = recipe(tmp_path, target, drafter={"family": "draft_model", "model": str(student)})
    check_run(made)
    words = " ".join(f"other{n} {n}" for n in range(400))
    train_tokenizer([Document("words", words)], 300, 128).save_pretrained(student)
    said = rf"student has another tokenizer .* of 300 have the same ids\).*--drafter {student}\)"
    with pytest.raises(ValueError, match=said) as error:
        check_run(made)
    one_line(error.value)


@pytest.mark.proof
def test_all_processes_end_alike_and_one_says_why(tmp_path: Path, target: Path) -> None:
    path = tmp_path / "recipe.yaml"
    typo = {"drafter": {"family": "medusa", "TYPO": 1}}
    path.write_text(yaml.safe_dump(recipe(tmp_path, target).to_dict() | typo))
    config = str(ROOT / "recipes" / "launch" / "ddp_cpu.yaml")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
    done = launch(
        [*command, "-m", "headstart.train", str(path)], ACCELERATE_USE_CPU="true",
        PYTHONPATH=str(ROOT),
    )  # fmt: skip
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if "headstart.train: error:" in line]
    assert len(lines) == 1 and "drafter.TYPO is not an option" in lines[0]
    assert not (tmp_path / "runs").exists()
