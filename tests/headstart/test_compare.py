"""`quickstart --drafter`: each family's recipe, all of them on one target, and what is compared."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headstart import compare
from headstart.cli import main
from headstart.compare import draw_drafters, load_all, print_drafters, quickstart_of, quickstarts
from headstart.heads.drafter import FAMILIES
from headstart.reports.tables import KEYS
from tests.support.recipes import TINY

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


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.splitlines()[-1]


def test_every_family_has_a_quickstart() -> None:
    known = quickstarts()
    assert set(FAMILIES) <= set(known)
    assert next(iter(known.items())) == ("medusa", "quickstart")  # it makes what others share
    assert known["draft_model"] == quickstart_of("draft-model") == "draft-model"
    for name, recipe in load_all(["seed=3"]).items():
        assert recipe.seed == 3 and recipe.name == known[name]
        assert recipe.shares == (None if recipe.name == "quickstart" else "quickstart")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--drafter", "redraftr"], "did you mean 'redrafter'"),
        (["--drafter", "bigram"], "expected one of medusa, "),
        (["--drafter", "al"], "did you mean 'all'"),
        (["--drafter", "all", "drafter.heads=3"], "'drafter.heads=3' is for one drafter"),
        (["--drafter", "all", "name=x"], "'name=x' is for one drafter"),
        (["--drafter", "all", "train.max_step=3"], "did you mean 'max_steps'"),
        (["--drafter", "lookup", "--recipe", "quickstart"], "not allowed with argument"),
    ],
)
def test_mistakes_answer_before_any_work(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("headstart.train.pipeline.run", lambda *_, **__: pytest.fail("it ran"))
    assert main(["quickstart", *arguments]) == 2
    assert said in last_line(capsys)


def test_one_drafter_is_its_recipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run(recipe: Any, fresh: bool) -> dict[str, Any]:
        ran.append((recipe.name, recipe.drafter.family, recipe.decode.prompts, fresh))
        return {"tau": 2.5, "artifact": None}

    monkeypatch.setattr("headstart.train.pipeline.run", run)
    arguments = ["quickstart", "--drafter", "draft_model", "decode.prompts=3", "--json"]
    assert main(arguments) == 0
    assert ran == [("draft-model", "draft_model", 3, False)]
    assert json.loads(capsys.readouterr().out) == {"tau": 2.5, "artifact": None}


def overrides(settings: dict[str, Any], before: str = "") -> Iterator[str]:
    """A recipe's sections as `a.b=value`."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from overrides(value, f"{before}{name}.")
        else:
            yield f"{before}{name}={json.dumps(value)}"


def test_all_run_on_one_target_and_a_failure_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shared = {name: TINY[name] for name in ("corpus", "target", "distill", "train", "decode")}
    command = ["quickstart", "--drafter", "all", *overrides(shared), "train.max_steps=8"]
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    found = document["drafters"]
    assert list(found) == list(quickstarts())
    for name, report in found.items():
        assert set(KEYS) | {"parameters", "train_seconds"} <= set(report), name
        assert report["identical_to_plain"] and report["identical_to_generate"], name
        assert (report["train_seconds"] > 0) == (report["parameters"] > 0) == (name != "lookup")
    assert document["plot"] == "runs/quickstart/drafters.png"
    assert Path(document["plot"]).read_bytes().startswith(b"\x89PNG")
    # One corpus, target and text for all.
    made = {path.parent.name for path in Path("runs").glob("*/*/stage.json")} - {"heads", "bench"}
    where = {path.parts[1] for path in Path("runs").glob("*/*/stage.json") if path.parts[2] in made}
    assert (made, where) == ({"corpus", "target", "distill"}, {"quickstart"})

    from headstart.train import pipeline

    run = pipeline.run

    def broken(recipe: Any, fresh: bool) -> dict[str, Any]:
        if recipe.name == "redrafter":
            raise RuntimeError("no room\nfor it")
        return run(recipe, fresh)

    monkeypatch.setattr(pipeline, "run", broken)
    assert main([*command, "--json"]) == 1
    again = json.loads(capsys.readouterr().out)["drafters"]
    assert again.pop("redrafter") == {"error": "RuntimeError: no room for it"}
    assert again == {name: report for name, report in found.items() if name != "redrafter"}
    assert main(command) == 1
    printed = capsys.readouterr().out
    assert "redrafter failed: RuntimeError: no room for it" in printed
    assert sum(line.startswith(tuple(again)) for line in printed.splitlines()) >= len(again)


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


def test_nothing_measured_is_said_too() -> None:
    text = printed({"medusa": {"error": "it broke"}})
    assert "medusa failed: it broke" in text
    assert "fastest" not in text and "plot" not in text


def test_a_missing_matplotlib_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compare.importlib.util, "find_spec", lambda name: None)
    assert draw_drafters({"medusa": REPORT}, tmp_path) is None and not list(tmp_path.iterdir())
    assert "it needs matplotlib" in printed({"medusa": REPORT})


def test_a_plot_of_sampled_runs(tmp_path: Path) -> None:
    """`generate` was not measured."""
    pytest.importorskip("matplotlib")
    sampled = REPORT | {"speedup_vs_generate": None}
    path = draw_drafters({"medusa": sampled, "redrafter": {"error": "it broke"}}, tmp_path)
    assert path == tmp_path / "drafters.png"
    assert (tmp_path / "drafters.png").stat().st_size > 5_000
