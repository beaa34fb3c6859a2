"""The GPU's smoke test at toy size: every group, a line an item, and going on after failures."""

import json
import sys
from typing import Any

import pytest
import torch

from benchmarks.gpu import smoke, smoke_items
from benchmarks.gpu.smoke import GROUPS, main
from benchmarks.gpu.smoke_items import Place

HERE = ["--here", "--device", "cpu", "--size", "toy"]


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    return [json.loads(line) for line in found]


def test_groups_run_in_processes_of_their_own(
    tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "smoke.jsonl"
    given = ["--device", "cpu", "--size", "toy", "--group", "machine", "--group", "kernels"]
    assert main([*given, "--output", str(output)]) == 0
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert {each["group"] for each in written} == {"machine", "kernels"}
    assert all(each["ok"] and each["seconds"] >= 0 for each in written)
    assert {"torch", "transformers", "python"} <= set(written[0]["versions"])


def test_what_fails_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def items(place: Place) -> Any:
        yield "bad", lambda: 1 / 0
        yield "good", lambda: {"value": 1}

    monkeypatch.setitem(GROUPS, "machine", items)
    assert main([*HERE, "--group", "machine"]) == 1
    bad, good = lines(capsys)
    assert not bad["ok"] and bad["error"] == "ZeroDivisionError: division by zero"
    assert good["ok"] and good["value"] == 1
    killed = [sys.executable, "-c", "import os; print('{\"ok\": true}', flush=True); os.abort()"]
    found, error = smoke._apart(killed)
    assert found == [{"ok": True}] and "ended with status -6" in error
    monkeypatch.setattr(smoke, "_LIMIT", 0.5)
    hangs = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert smoke._apart(hangs) == ([], "it took more than 0.5 seconds")


def test_another_text_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: captured rounds that write something else are not ok."""
    true = smoke_items._texts

    def other(*given: Any, captured: bool = True, **options: Any) -> list[torch.Tensor]:
        texts = true(*given, captured=captured, **options)
        return [*texts[:-1], texts[-1] + captured]

    monkeypatch.setattr(smoke_items, "_texts", other)
    place = Place(torch.device("cpu"), "toy")
    with pytest.raises(AssertionError, match="request 2 wrote another text"):
        smoke_items._compared(place, "medusa", [1, 2], tree="chain:2")


def test_a_family_is_compared_over_three_requests(capsys: pytest.CaptureFixture[str]) -> None:
    place = Place(torch.device("cpu"), "toy")
    works = dict(GROUPS["families"](place))
    assert len(works) == 4 * len(smoke_items.FAMILIES)
    assert works["eagle, static, coupled, batch 1"]()["requests"] == 3


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
