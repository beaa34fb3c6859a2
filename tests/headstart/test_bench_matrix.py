"""`headstart bench` with several drafters, question files and transformers' own ways."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from headstart.cli import main
from headstart.infer.measure import matrix as cells
from headstart.matrix import Matrix
from headstart.train.data.questions import read_questions
from tests.support.bytewise import save_heads, save_target
from tests.support.paths import ROOT

ROWS = [
    {"question_id": 1, "category": "writing", "turns": ["abc", "again"]},
    {"question_id": 2, "category": "math", "turns": ["1 + 1"], "reference": ["2"]},
    {"question_id": 3, "category": "writing", "turns": ["xyz", "more"]},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("target")
    save_target(folder)
    return str(folder)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_questions_are_read_as_they_are(questions: Path) -> None:
    found = {question.id: question for question in read_questions(questions)}
    assert {id: (q.category, q.turns) for id, q in found.items()} == {
        "1": ("writing", 2), "2": ("math", 1), "3": ("writing", 2),
    }  # fmt: skip
    messages = found["1"].after(["ABC"]).messages
    assert messages == [
        {"role": "user", "content": "abc"}, {"role": "assistant", "content": "ABC"},
        {"role": "user", "content": "again"},
    ]  # fmt: skip


def test_a_matrix_is_measured_and_its_counts_are_those_of_the_ids(
    target: str, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = save_heads(target, tmp_path / "heads")
    matrix = tmp_path / "matrix.yaml"
    matrix.write_text(
        f"target: {target}\nprompts: {questions}\ndrafters: [{heads}, lookup]\n"
        "trees: [chain:1]\ntemperatures: [0, 1.0]\nbatch_sizes: [1, 2]\nnew_tokens: 5\n"
        f"repeats: 1\nagainst: [generate, assistant, lookup]\nassistant: {target}\n"
    )
    out = tmp_path / "out"
    assert main(["bench", str(matrix), "--json", "--report", str(out)]) == 0
    document = json.loads(capsys.readouterr().out)
    runs = document["runs"]
    places = [(run["drafter"], run["temperature"], run["batch_size"]) for run in runs]
    assert places == [
        (name, temperature, size)
        for temperature in (0, 1.0) for size in (1, 2) for name in ("medusa", "lookup")
    ]  # fmt: skip
    emitted: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for line in map(json.loads, (out / "emitted.jsonl").read_text().splitlines()):
        emitted[line["way"], line["temperature"], line["batch_size"]].append(line)
    for run in runs:
        own = emitted[run["way"], run["temperature"], run["batch_size"]]
        assert len(own) == run["answers"] == 5  # two chats of two turns, one of one
        for line in own:
            assert sum(count for count, _ in line["rounds"]) + 1 == len(line["ids"])
        counts = [count for line in own for count, _ in line["rounds"]]
        assert run["tau"] == sum(counts) / len(counts)
        assert run["tokens"] == sum(len(line["ids"]) for line in own)
        assert run["identical_to_plain"] is True
        assert run["identical_to_generate"] is (True if run["temperature"] == 0 else None)
        assert set(run["by_category"]) == {"math", "writing"}
        assert ("speedup_vs_assistant" in run) == (run["batch_size"] == 1)
        assert run["speedup_vs_plain"]["within_noise"] is None  # three chats cannot tell
    assert any("no chat template" in note for note in document["notes"])
    assert any("one prompt at a time" in note for note in document["notes"])
    assert any("Fewer than 6 prompts or batches of 2" in note for note in document["notes"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prompts: q.jsonl\ntemprature: [1]\n", "did you mean 'temperatures'"),
        ("prompts: q.jsonl\ntemperatures: 1\n", "temperatures: found the integer 1"),
        ("prompts: q.jsonl\ntemperatures: [-1]\n", "found -1, expected finite numbers from 0"),
        ("prompts: q.jsonl\nagainst: [generat]\n", "did you mean 'generate'"),
        ("prompts: q.jsonl\nbatch_sizes: [0]\n", "expected whole numbers from 1"),
        ("prompts: q.jsonl\nbatch_sizes: []\n", "batch_sizes: an empty list"),
        ("prompts: q.jsonl\ndrafters: [[]]\n", "expected drafters that decode together"),
        ("target: t\n", "no prompts to measure on"),
        ("target: t\nprompt: x.jsonl\n", "did you mean 'prompts'"),
        (
            "prompts: none.jsonl\ntarget: t\n",
            "none.jsonl: no such file or folder; expected text with",
        ),
        ("prompts: none\ntarget: t\n", "no prompts at none: no such file or folder; expected text"),
        ("prompts: q.jsonl\n", "neither --target nor --drafter given"),
        ("prompts: q.jsonl\ntarget: ./none\n", "no model at './none'"),
        ("prompts: q.jsonl\ntarget: t\ntrees: [chian:2]\n", "tree is 'chian:2'"),
        ("prompts: q.jsonl\ntarget: t\nrules: [best]\n", "rule is 'best'"),
        ("prompts: q.jsonl\ntarget: t\nagainst: [assistant]\n", "has no assistant"),
        ("prompts: bad.jsonl\ntarget: t\n", "bad.jsonl line 1: turns[1] is not a string"),
        ("[]\n", "found the list []"),
        ("prompts: q.jsonl\ndrafters: [[a, b]]\ntrees: [chain:2]\n", "such as chain:4+chain:4"),
        ("prompts: q.jsonl\ndrafters: [a]\ntrees: [a.json]\n", "tree a.json is no file"),
        (
            "prompts: q.jsonl\ndrafters: [a]\ntrees: [chain:2, chain:2+chain:2]\n",
            "tree chain:2+chain:2 has a part for each of several drafters",
        ),
    ],
)
def test_a_mistake_shows_before_a_model_is_loaded(
    text: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("headstart.measuring.prepare", lambda *_: pytest.fail("it loaded"))
    (tmp_path / "q.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    (tmp_path / "bad.jsonl").write_text('{"turns": ["a", 3]}\n')
    (tmp_path / "t").mkdir()
    (tmp_path / "matrix.yaml").write_text(text)
    assert main(["bench", "--matrix", "matrix.yaml"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("headstart: error: ") and said in error


def test_drafters_alone_and_together_are_measured_with_trees_of_their_own(
    target: str, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = save_heads(target, tmp_path / "heads")
    (tmp_path / "matrix.yaml").write_text(
        f"target: {target}\nprompts: {questions}\nlimit: 1\nnew_tokens: 4\nrepeats: 1\n"
        f"drafters: [{heads}, [{heads}, lookup]]\nagainst: []\n"
        "trees: [chain:2, plain, chain:1+chain:3]\n"
    )
    command = ["bench", str(tmp_path / "matrix.yaml"), "--json", "--report", "none"]
    assert main(command) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["drafter"], run["tree"]) for run in runs] == [
        ("medusa", "chain:2"), ("medusa", "plain"),
        ("medusa + lookup", "plain"), ("medusa + lookup", "chain:1+chain:3"),
    ]  # fmt: skip


def test_what_is_measured_before_ctrl_c_is_told_and_kept(
    target: str, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    true, out = cells.measure_cell, tmp_path / "out"

    def stopped(*given: Any) -> Any:
        if given[-2] == 1.0:  # the temperature
            raise KeyboardInterrupt
        return true(*given)

    monkeypatch.setattr(cells, "measure_cell", stopped)
    command = ["bench", "--target", target, "--drafter", "lookup", "--prompts", str(questions)]
    command += ["--new-tokens", "4", "--against", "none", "--json", "--report", str(out)]
    assert main([*command, "--temperature", "0", "--temperature", "1"]) == 130
    found = capsys.readouterr()
    assert json.loads(found.out)["temperature"] == 0
    assert len(json.loads((out / "results.json").read_text())["runs"]) == 1
    assert found.err.splitlines()[-1] == (
        "headstart: interrupted; the figures are of what was measured before"
    )
    assert main([*command, "--temperature", "1"]) == 130
    assert capsys.readouterr().out == ""


def test_rounds_are_compared_with_one_read_of_the_weights(
    target: str, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("headstart.infer.measure.roofline.read_bandwidth", lambda device: 2e9)
    heads = save_heads(target, tmp_path / "heads")
    command = ["bench", "--drafter", heads, "--target", target, "--prompts", str(questions)]
    options = ["--new-tokens", "5", "--repeats", "1", "--against", "none", "--report", "none"]
    assert main([*command, *options, "--roofline", "--compile", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["forwards"] == "torch"  # its layers are too small to run by anything else
    found, sizes = report["roofline"], AutoModelForCausalLM.from_pretrained(target)
    weights = sum(weight.nbytes for weight in sizes.parameters())
    assert found["read_gb_per_s"] == 2.0
    assert 0.5 * weights < 1e6 * found["weights_mb"] <= weights
    total = found["weights_mb"] + found["cache_mb"] + found["drafter_mb"]
    assert found["cache_mb"] > 0 and found["drafter_mb"] > 0
    assert found["limit_ms"] == pytest.approx(total / 2.0)
    assert found["share"] == pytest.approx(found["limit_ms"] / report["ms_per_round"])
    assert sum(found["parts_ms"].values()) == pytest.approx(report["ms_per_round"], rel=0.8)
    assert set(found["parts_ms"]) == {"target", "drafter", "loop"}
    (said,) = [note for note in report["notes"] if "of the limit" in note]
    assert f"{report['threads']} threads: this machine reads 2.0 GB a second" in said


def test_what_a_round_reads_is_that_of_its_batch_and_its_tree(
    target: str, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("headstart.infer.measure.roofline.read_bandwidth", lambda device: 2e9)
    heads = save_heads(target, tmp_path / "heads")
    command = ["bench", "--drafter", heads, "--target", target, "--prompts", str(questions)]
    options = ["--new-tokens", "4", "--repeats", "1", "--against", "none", "--report", "none"]
    several = ["--batch-size", "1", "--batch-size", "2", "--tree", "plain", "--tree", "chain:1"]
    assert main([*command, *options, *several, "--roofline", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    found = {(run["batch_size"], run["tree"]): run["roofline"] for run in runs}
    one, two = (found[size, "chain:1"]["cache_mb"] for size in (1, 2))
    assert two == pytest.approx(2 * one)
    assert found[1, "plain"]["drafter_mb"] == 0 < found[1, "chain:1"]["drafter_mb"]


def test_the_page_names_every_key() -> None:
    page = (ROOT / "docs" / "measuring.md").read_text(encoding="utf-8")
    _, _, page = page.partition("## A matrix")
    for key in Matrix.__dataclass_fields__:
        assert f"\n{key}: " in page or f"`{key}`" in page, key
