"""Spec-Bench and MT-Bench as they are published, through `headstart bench`, with a recount."""

import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headstart.cli import main
from headstart.infer.measure.noise import compare
from headstart.train.data.questions import read_questions
from tests.support.paths import ROOT

SHARED = ROOT.parent / "shared"
TARGET = SHARED / "models" / "stories260k"
FILES = {"spec_bench": (480, 560), "mt_bench": (80, 160)}


@pytest.mark.parametrize("name", FILES)
def test_the_files_are_read_whole(name: str) -> None:
    path = SHARED / "data" / name / "question.jsonl"
    if not path.is_file():
        pytest.skip("no shared data here")
    found = read_questions(path)
    assert (len(found), sum(question.turns for question in found)) == FILES[name]
    assert all(question.category for question in found)


@pytest.mark.proof
@pytest.mark.parametrize("name", FILES)
def test_a_run_counts_what_it_emits(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = SHARED / "data" / name / "question.jsonl"
    if not (path.is_file() and TARGET.is_dir()):
        pytest.skip("no shared data here")
    command = ["bench", "--target", str(TARGET), "--drafter", "lookup", "--prompts", str(path)]
    command += ["--new-tokens", "16", "--repeats", "1", "--report", str(tmp_path), "--json"]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in (tmp_path / "emitted.jsonl").read_text().splitlines()]
    assert (report["prompts"], len(lines)) == FILES[name]
    assert report["tokens"] == sum(len(line["ids"]) for line in lines)
    for line in lines:
        assert sum(count for count, _ in line["rounds"]) + 1 == len(line["ids"])
    assert report["identical_to_plain"] and report["identical_to_generate"]
    assert any("no chat template" in note for note in report["notes"])


@pytest.mark.proof
def test_against_agrees_with_a_separate_timing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`generate`, timed here by hand, on the first turns of the same questions."""
    path = SHARED / "data" / "mt_bench" / "question.jsonl"
    if not (path.is_file() and TARGET.is_dir()):
        pytest.skip("no shared data here")
    single = tmp_path / "first.jsonl"
    questions = read_questions(path)[:12]
    rows = [{"prompt": question.document.text[:200]} for question in questions]
    single.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["bench", "--target", str(TARGET), "--drafter", "lookup", "--prompts", str(single)]
    command += ["--new-tokens", "48", "--report", "none", "--json", "--against"]
    assert main([*command, "generate,lookup"]) == 0
    report = json.loads(capsys.readouterr().out)
    model: Any = AutoModelForCausalLM.from_pretrained(TARGET).eval()
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    ways = {"generate": {}, "lookup": {"prompt_lookup_num_tokens": 10}}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for row in [rows[0], *rows]:  # the first one warms up
        ids = tokenizer(row["prompt"], return_tensors="pt").input_ids
        for way, more in ways.items():
            took = []
            for new_tokens in (2, 48):  # their difference is without prefill
                begun = time.perf_counter()
                with torch.no_grad():
                    text = model.generate(
                        ids, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, **more
                    )
                took.append((time.perf_counter() - begun, text.shape[1] - ids.shape[1]))
            (short, few), (long, many) = took
            times[way].append(1e3 * (long - short) / (many - few))
    separate = compare(times["generate"][1:], times["lookup"][1:])
    assert separate.low is not None and separate.high is not None
    inside = report["generate_ms_per_token"] / report["lookup_ms_per_token"]
    # The two were timed one after the other, so their ratio is compared, within its interval.
    assert 0.8 * separate.low <= inside <= 1.25 * separate.high
    by_hand = median(times["generate"][1:])
    assert 0.5 <= report["generate_ms_per_token"] / by_hand <= 2
