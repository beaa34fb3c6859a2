"""Spec-Bench and MT-Bench as they are published, through `headstart bench`, with a recount."""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import headstart
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
    """Decoding and transformers' two ways, timed by hand on the first turns of the same questions.

    Both measurements give a 95% interval of the median ratio over prompts, which have to overlap.
    The machine may be busier during one of them, which slows all ways of it alike: so ratios are
    compared. A timing that is wrong by half is told apart.
    """
    path = SHARED / "data" / "mt_bench" / "question.jsonl"
    if not (path.is_file() and TARGET.is_dir()):
        pytest.skip("no shared data here")
    single = tmp_path / "first.jsonl"
    rows = [{"prompt": question.document.text[:200]} for question in read_questions(path)[:16]]
    single.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["bench", "--target", str(TARGET), "--drafter", "lookup", "--prompts", str(single)]
    command += ["--new-tokens", "48", "--report", "none", "--json", "--against"]
    assert main([*command, "generate,lookup"]) == 0
    report = json.loads(capsys.readouterr().out)
    times = timed_by_hand([row["prompt"] for row in rows], 48)
    for way in ("generate", "lookup"):
        inside, separate = report[f"speedup_vs_{way}"], compare(times[way], times["ours"])
        assert separate is not None and separate.low is not None and separate.high is not None
        print(way, inside, separate)
        assert inside["low"] <= separate.high and separate.low <= inside["high"]
        assert not inside["low"] <= 1.5 * separate.high or not 1.5 * separate.low <= inside["high"]


def timed_by_hand(prompts: list[str], new_tokens: int, repeats: int = 5) -> dict[str, list[float]]:
    """Milliseconds a token after the prefill: of each way, the median of each prompt's repeats."""
    speculator = headstart.load(str(TARGET), "lookup")
    model: Any = AutoModelForCausalLM.from_pretrained(TARGET).eval()
    greedy: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    ways: dict[str, Callable[..., torch.Tensor]] = {
        "ours": partial(speculator.generate, do_sample=False),
        "generate": partial(model.generate, **greedy),
        "lookup": partial(model.generate, **greedy, prompt_lookup_num_tokens=10),
    }
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    found: dict[str, list[float]] = {way: [] for way in ways}
    for prompt in [prompts[0], *prompts]:  # the first one warms up
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        each: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(repeats):
            for way, decode in ways.items():
                took = []
                for count in (2, new_tokens):  # their difference is without prefill
                    begun = time.perf_counter()
                    with torch.no_grad():
                        text = decode(ids, max_new_tokens=count)
                    took.append((time.perf_counter() - begun, text.shape[1]))
                (short, few), (long, many) = took
                each[way].append(1e3 * (long - short) / (many - few))
        for way, repeated in each.items():
            found[way].append(median(repeated))
    return {way: values[1:] for way, values in found.items()}
