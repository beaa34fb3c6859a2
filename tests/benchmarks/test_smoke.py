"""The GPU's smoke test at toy size: every group, a line an item, and going on after failures."""

import inspect
import json
import logging
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.gpu import smoke, smoke_items
from benchmarks.gpu.paths import Fallback, Paths
from benchmarks.gpu.smoke import GROUPS, main
from benchmarks.gpu.smoke_items import Place
from headstart.heads.suffix import Suffix
from headstart.infer.kept import KeptTexts

HERE = ["--here", "--device", "cpu", "--size", "toy"]


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    return [json.loads(line) for line in found]


def test_groups_run_in_processes_of_their_own(
    tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "smoke.jsonl"
    given = ["--device", "cpu", "--size", "toy", "--group", "machine", "--group", "kernels"]
    assert main([*given, "--output", str(output), "--jobs", "2"]) == 0
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert {each["group"] for each in written} == {"machine", "kernels"}
    assert all(each["ok"] and each["seconds"] >= 0 for each in written)
    (versions,) = [each["versions"] for each in written if each["item"] == "versions"]
    assert {"torch", "transformers", "python"} <= set(versions)


def test_what_fails_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def bad_item() -> Any:
        logging.getLogger("headstart.infer").info("no %s", "graphs")
        return 1 / 0

    def items(place: Place) -> Any:
        yield "bad", bad_item
        yield "good", lambda: {"value": 1}

    monkeypatch.setitem(GROUPS, "machine", items)
    assert main([*HERE, "--group", "machine"]) == 1
    bad, good = lines(capsys)
    assert not bad["ok"] and bad["error"] == "ZeroDivisionError: division by zero"
    where = f"{__file__}:{inspect.getsourcelines(bad_item)[1] + 2}"
    assert bad["at"][-1] == where and bad["log"] == ["no graphs"]
    assert good["ok"] and good["value"] == 1 and "log" not in good
    killed = [sys.executable, "-c", "import os; print('{\"ok\": true}', flush=True); os.abort()"]
    found, error = smoke._apart(killed)
    assert found == [{"ok": True}] and "ended with status -6" in error
    cut = [sys.executable, "-c", "import os; print('{\"ok\": tr', flush=True); os.abort()"]
    found, error = smoke._apart(cut)
    assert not found and "ended with status -6" in error
    monkeypatch.setattr(smoke, "_LIMIT", 0.5)
    hangs = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert smoke._apart(hangs) == ([], "it took more than 0.5 seconds")
    begun = time.perf_counter()
    code = f"import subprocess, sys; subprocess.run({hangs!r})"  # which has the output, too
    assert smoke._apart([sys.executable, "-c", code]) == ([], "it took more than 0.5 seconds")
    assert time.perf_counter() - begun < 30


def test_lines_are_in_the_file_as_soon_as_they_are_known(tmp_path: Path) -> None:
    """What runs the command may end it, and keeps the files."""
    output, late = tmp_path / "smoke.jsonl", tmp_path / "late"
    code = (
        "import pathlib, time; print('{\"ok\": true}', flush=True)\n"
        f"while not pathlib.Path({str(late)!r}).exists(): time.sleep(0.01)"
    )
    with open(output, "w") as file, ThreadPoolExecutor(1) as pool:
        running = pool.submit(smoke._apart, [sys.executable, "-c", code], file)
        while not output.read_text() and not running.done():
            time.sleep(0.01)
        assert not running.done() and json.loads(output.read_text()) == {"ok": True}
        late.touch()
        assert running.result() == ([{"ok": True}], "")


@pytest.mark.parametrize("what", ["wrote another text", "accepted other drafts"])
def test_what_captured_rounds_do_otherwise_is_found(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control: captured rounds that write something else, or draft worse, are not ok."""
    true = smoke_items._texts

    def other(*given: Any, captured: bool = True, **options: Any) -> list[Any]:
        *first, (text, counts) = true(*given, captured=captured, **options)
        if "text" in what:
            return [*first, (text + captured, counts)]
        return [*first, (text, counts[captured:])]

    monkeypatch.setattr(smoke_items, "_texts", other)
    place = Place(torch.device("cpu"), "toy")
    with pytest.raises(AssertionError, match=f"request 2 {what}"):
        smoke_items._compared(place, "medusa", [1, 2], tree="chain:2")


def test_what_requests_leave_is_read_by_later_ones() -> None:
    """Of prompts that are kept, and of answers that are remembered; with controls."""
    works = dict(GROUPS["kept"](Place(torch.device("cpu"), "toy")))
    assert works["turns of a chat, eagle3"]()["requests"] == 4
    assert works["an answer again, suffix"]()["tau"][-1] > 3
    nothing = mock.patch.object(KeptTexts, "find", lambda kept, tokens: (None, 0))
    with nothing, pytest.raises(AssertionError, match="turn 2 was run whole"):
        works["turns of a chat, eagle3"]()
    with mock.patch.object(Suffix, "remember"), pytest.raises(AssertionError, match="expected > 3"):
        works["an answer again, suffix"]()


def test_a_family_is_compared_over_three_requests(capsys: pytest.CaptureFixture[str]) -> None:
    place = Place(torch.device("cpu"), "toy")
    groups = [f"{kind}-{way}" for kind in ("static", "dynamic") for way in ("greedy", "coupled")]
    works = {name: work for group in groups for name, work in GROUPS[group](place)}
    assert len(works) == 4 * len(smoke_items.FAMILIES)
    assert works["eagle, static, coupled, batch 1"]()["requests"] == 3


def test_how_an_item_ran_is_known_of_what_it_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of profiles, fused and compiled forwards too, an item that fell back is not ok."""
    place = Place(torch.device("cpu"), "toy")
    groups = {"profile": ["1 nodes", "64 nodes, fused"], "fused": ["the same text"]}
    items = [dict(GROUPS[group](place))[name] for group, names in groups.items() for name in names]
    for item in items:
        found = item()
        assert not found["captured"] and not found["tree_attention"]
    true = Paths.check

    def as_on_a_gpu(paths: Paths) -> None:
        true(replace(paths, on_gpu=True))

    monkeypatch.setattr(Paths, "check", as_on_a_gpu)
    for item in items:
        with pytest.raises(Fallback, match="captured no rounds"):
            item()


def test_on_a_gpu_no_item_is_judged_by_what_runs_without_a_kernel() -> None:
    gpu, cpu = Place(torch.device("cuda"), "full"), Place(torch.device("cpu"), "toy")
    assert smoke_items.without(cpu, "no compiler") == {"kernel": "no compiler"}
    with pytest.raises(Fallback, match="no compiler"):
        smoke_items.without(gpu, "no compiler")


def test_what_the_host_calls_is_no_launch() -> None:
    def event(name: str, device: str, took: float) -> Any:
        kind = SimpleNamespace(name=device)
        return SimpleNamespace(name=name, device_type=kind, device_time_total=took)

    events = [event("gemm", "CUDA", 2e3), event("cudaGraphLaunch", "CPU", 0)]
    events.append(event("gemm", "CUDA", 1e3))
    place = Place(torch.device("cuda"), "full")
    assert smoke_items.times_by_name(events, place) == {"gemm": [2.0, 1.0]}


def test_layers_are_read_from_disk(capsys: pytest.CaptureFixture[str]) -> None:
    works = dict(GROUPS["streamed"](Place(torch.device("cpu"), "toy")))
    assert len(works) == 4
    assert works["the same text, from disk"]() == {"brought_ahead": 0}, "accelerate fetches them"
    assert works["share of the link, from disk"]()["forward_ms"] > 0


@pytest.mark.proof
@pytest.mark.parametrize("group", GROUPS)
def test_every_item_is_ok(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*HERE, "--group", group]) == 0
    assert all(each["ok"] for each in lines(capsys))
