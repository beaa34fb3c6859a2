"""The table and the plot of every drafter family on one target."""

import io
from pathlib import Path
from typing import Any

import pytest

from headstart.reports import comparison
from headstart.reports.comparison import draw_drafters, print_drafters

REPORT: dict[str, Any] = {
    "tau": 2.5,
    "identical_to_plain": True,
    "identical_to_generate": True,
    "speedup_vs_plain": {"median": 1.5, "min": 1.25, "max": 2.0},
    "speedup_vs_generate": {"median": 1.75, "min": 1.5, "max": 2.25},
    "plain_ms_per_token": 2.0,
    "ms_per_round": 3.25,
    "nodes": 8,
    "tree": "sparse:3/2/1/1",
    "rule": "greedy",
    "dtype": "float32",
    "prompts": 24,
    "tokens": 3072,
    "distinct_4grams": 0.75,
    "threads": 2,
    "artifact": "runs/quickstart/heads",
    "parameters": 82_560,
    "train_seconds": 30.2,
}
FAST = REPORT | {
    "artifact": "runs/redrafter/heads",
    "tau": 3.5,
    "speedup_vs_plain": {"median": 2.5, "min": 2.0, "max": 3.0},
    "tree": "chain:7",
}


def printed(reports: dict[str, dict[str, Any]], plot: Path | None = None) -> str:
    out = io.StringIO()
    print_drafters(reports, plot, out)
    return out.getvalue()


def test_the_table_fits_and_names_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    reports = {"medusa": REPORT, "redrafter": FAST | {"identical_to_plain": False}}
    reports["draft_model"] = {"error": "it broke"}
    text = printed(reports, Path("runs/quickstart/drafters.png"))
    table, _, rest = text.partition("The plot is runs/quickstart/drafters.png\n")
    assert "\x1b" not in text and max(map(len, table.splitlines())) <= 80
    rows = [line.split() for line in table.splitlines()]
    figures = ["8", "2.50", "3.25", "1.50", "1.75", "yes", "83k", "30", "s"]
    assert ["medusa", "sparse:3/2/1/1", *figures] in rows
    figures = ["8", "3.50", "3.25", "2.50", "1.75", "NO", "83k", "30", "s"]
    assert ["redrafter", "chain:7", *figures] in rows
    assert ["draft_model", "failed", *["–"] * 8] in rows
    assert "draft_model failed: it broke" in table and "The outputs differ" in table
    assert "The fastest is redrafter." in rest
    assert "headstart generate --drafter runs/redrafter/heads" in rest


def test_ratios_within_noise_are_marked_and_explained() -> None:
    ratio = {"median": 0.98, "min": 0.8, "max": 1.2, "within_noise": True}
    text = printed({"medusa": REPORT, "redrafter": FAST | {"speedup_vs_plain": ratio}})
    assert "~0.98" in text and "~: within noise" in text
    assert "within noise" not in printed({"medusa": REPORT})


def test_nothing_measured_is_said_too() -> None:
    text = printed({"medusa": {"error": "it broke"}})
    assert "medusa failed: it broke" in text
    assert "fastest" not in text and "plot" not in text


def test_a_missing_matplotlib_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(comparison.importlib.util, "find_spec", lambda name: None)
    assert draw_drafters({"medusa": REPORT}, tmp_path) is None and not list(tmp_path.iterdir())
    assert "it needs matplotlib" in printed({"medusa": REPORT})


def test_a_plot_of_sampled_runs(tmp_path: Path) -> None:
    """`generate` was not measured."""
    pytest.importorskip("matplotlib")
    sampled = REPORT | {"speedup_vs_generate": None}
    path = draw_drafters({"medusa": sampled, "redrafter": {"error": "it broke"}}, tmp_path)
    assert path == tmp_path / "drafters.png"
    assert (tmp_path / "drafters.png").stat().st_size > 5_000
