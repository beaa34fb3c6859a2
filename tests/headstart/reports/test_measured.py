"""The report: the document and the table, at 80 columns and without a terminal."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from headstart.reports.measured import next_commands, print_next_steps, print_table, remarks
from headstart.reports.tables import to_json
from tests.support.reports import REPORT, line


def table(report: dict[str, Any]) -> str:
    out = io.StringIO()
    print_table(report, out, "headstart quickstart")
    print_next_steps(report, out)
    return out.getvalue()


def test_the_table_says_what_was_measured() -> None:
    text = table(REPORT)
    assert line(text, "tokens per round (τ)") == "2.50 (prompts 2.00–3.00)"
    assert line(text, "acceptance at depth 1, 2, …") == "75% 50% –"
    assert line(text, "one round") == "3.25 ms, of which the loop costs 0.50 ms"
    noisy = table(REPORT | {"loop_overhead_ms": -0.5})
    assert line(noisy, "one round") == "3.25 ms; the loop's cost is lost in noise"
    assert line(text, "speedup against plain") == "1.50× (prompts 1.25–2.00)"
    known = REPORT | {"speedup_vs_plain": REPORT["speedup_vs_plain"] | {"low": 1.3, "high": 1.7}}
    assert line(table(known), "speedup against plain") == "1.50× (95% interval 1.30–1.70)"
    assert line(text, "speedup against generate") == "1.75× (prompts 1.50–2.25)"
    assert line(text, "plain decoding") == "2.00 ms a token"
    assert line(text, "identical to plain") == "yes"
    assert line(text, "distinct 4-grams") == "75%"
    assert line(text, "tree") == "cartesian:2,1,1, 8 nodes"
    assert line(text, "rule, dtype") == "greedy, float32"
    assert line(text, "prompts") == "24, 3,072 tokens"
    assert line(text, "threads") == "2"
    assert "target 80" in text and "(sum 181)" in text
    said = "The same text, 1.5 times as fast as plain decoding and 1.8 times as fast as generate of"
    assert said in " ".join(text.split())


SAMPLED = {
    "temperature": 0.6, "tau": 1.5, "speedup_vs_plain": {"median": 1.25, "min": 1.0, "max": 1.5},
    "identical_to_plain": True, "distinct_4grams": 0.93,
}  # fmt: skip


def test_sampled_text_stands_beside_the_other() -> None:
    text = table(REPORT | {"sampled": SAMPLED})
    assert line(text, "sampled at temperature 0.6") == "τ 1.50, 1.25× plain (prompts 1.00–1.50)"
    assert line(text, "its text") == "identical to plain"
    assert line(text, "its distinct 4-grams") == "93%"
    said = "where the text repeats itself less: the same text, 1.2 times as fast"
    assert said in " ".join(text.split()) and "drafting is" not in text
    slower = SAMPLED | {"speedup_vs_plain": {"median": 0.9, "min": 0.8, "max": 1.1}}
    (costs,) = remarks(REPORT | {"sampled": slower})
    assert "drafting is slower here" in costs
    slower["speedup_vs_plain"] |= {"within_noise": True}
    assert "drafting is not shown to be faster here" in remarks(REPORT | {"sampled": slower})[0]
    wrong = table(REPORT | {"sampled": SAMPLED | {"identical_to_plain": False}})
    assert line(wrong, "its text") == "NOT as plain"
    before_commands = text.split("To try next:")[0]
    assert max(map(len, before_commands.splitlines())) <= 80


def test_noise_is_told_in_the_sentences() -> None:
    noisy = {"median": 1.1, "min": 0.9, "max": 1.3, "within_noise": True}
    text = table(REPORT | {"sampled": SAMPLED | {"speedup_vs_plain": noisy}})
    assert "1.1 times as fast as plain decoding (within noise)." in " ".join(text.split())


def test_what_the_forwards_gain_is_told_apart_from_drafting() -> None:
    faster = REPORT | {"forwards": "kernels"}
    text = " ".join(table(faster).split())
    assert (
        "The same text, 1.5 times as fast as plain decoding with the same kernels and 1.8 times as "
        "fast as generate of transformers without them." in text
    )
    assert "plain against generate 1.25×, without a drafter" in text
    assert line(table(faster), "forwards") == "with kernels"
    assert line(table(faster), "plain decoding") == "2.00 ms a token"
    (said,) = remarks(faster)
    assert "against plain decoding is the drafter's alone" in said
    assert "kernels" not in table(REPORT | {"forwards": "torch"})
    assert remarks(REPORT | {"forwards": "torch"}) == []
    alone = {**faster, "speedup_vs_generate": None, "generate_ms_per_token": None}
    assert remarks(alone) == [] and "against generate" not in table(alone)


def test_what_a_tiny_target_means_is_told() -> None:
    (tiny,) = remarks(REPORT | {"target_parameters": 2_840_000, "target_seconds": 89.6})
    assert "2.8 million parameters, trained for 90 s" in tiny


def test_a_target_that_hardly_learnt_is_told() -> None:
    for loss, expected, told in ((5.0, 4.2, True), (4.2, 4.2, False), (5.0, None, False)):
        said = remarks(REPORT | {"target_loss": loss, "expected_loss": expected})
        assert any("hardly learnt: its training loss is 5.00" in each for each in said[:1]) == told


def test_a_doubt_is_told_once_before_the_gain() -> None:
    text = " ".join(table(REPORT | {"target_loss": 5.0, "expected_loss": 4.2}).split())
    assert text.count("hardly learnt") == 1
    assert text.index("hardly learnt") < text.index("times as fast as plain decoding")


def test_no_gain_is_told_where_texts_differ() -> None:
    assert "times as fast" not in table(REPORT | {"identical_to_generate": False})


def test_the_table_fits_and_has_no_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    text = table(REPORT)
    assert "\x1b" not in text
    before_commands = text.split("To try next:")[0]
    assert max(map(len, before_commands.splitlines())) <= 80


def test_commands_are_whole_lines_that_can_be_pasted(tmp_path: Path) -> None:
    artifact = tmp_path / "a [b]" / "heads"
    held_out = tmp_path / "a [b]" / "corpus" / "held_out.jsonl"
    assert not any("bench" in command for command in next_commands({"artifact": str(artifact)}))
    held_out.parent.mkdir(parents=True)
    held_out.touch()
    text = table(REPORT | {"artifact": str(artifact)})
    assert f"The drafter is in {artifact}\n" in text
    assert f"  headstart bench --drafter '{artifact}' --prompts '{held_out}'" in text
    assert next_commands({"artifact": None}) == []
    elsewhere = next_commands({"artifact": "own/heads", "held_out": str(held_out)})
    assert f"--drafter own/heads --prompts '{held_out}'" in elsewhere[-1]


def test_what_was_not_measured_has_no_line() -> None:
    nothing = dict.fromkeys(REPORT) | {"tau": 1.0, "stage_seconds": {}}
    text = table(nothing)
    assert "tokens per round" in text
    for label in ("speedup", "identical", "round  ", "stage", "threads", "The drafter", "tree"):
        assert label not in text


def test_remarks_only_where_they_apply() -> None:
    assert remarks(REPORT) == []
    (repeats,) = remarks(REPORT | {"distinct_4grams": 0.31})
    assert "31%" in repeats and "look good" in repeats
    (differs,) = remarks(REPORT | {"identical_to_generate": False})
    assert "differ" in differs
    assert line(table(REPORT | {"identical_to_generate": False}), "identical to generate") == "NO"


def test_a_tree_of_paths_is_counted() -> None:
    assert (
        line(table(REPORT | {"tree": [[0], [1]], "tree_label": None, "nodes": 3}), "tree")
        == "2 rank paths, 3 nodes"
    )


def test_the_document_is_strict_json() -> None:
    document = json.loads(to_json(REPORT), parse_constant=pytest.fail)
    assert list(document) == list(REPORT)
    assert document["acceptance_by_depth"] == [0.75, 0.5, None]
    assert document["speedup_vs_plain"] == {"median": 1.5, "min": 1.25, "max": 2.0}
