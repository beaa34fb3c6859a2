"""`quickstart --drafter`: each family's recipe, all of them on one target, and what is compared."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headstart.cli import main
from headstart.commands.quickstart import load_all, quickstart_of, quickstarts
from headstart.heads import FAMILIES, family
from tests.support.recipes import TINY
from tests.support.reports import REPORT


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
        (["--drafter", "no_such"], "expected one of medusa, "),
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


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["medusa", "lookup", "redrafter", "draft_model"], id="some"),
        pytest.param([*quickstarts()], id="all", marks=pytest.mark.proof),
    ],
)
def test_all_run_on_one_target_and_a_failure_costs_the_others_nothing(
    names: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    known = quickstarts()
    monkeypatch.setattr(
        "headstart.commands.quickstart.quickstarts", lambda: {name: known[name] for name in names}
    )
    for name in ("draw_metrics", "draw_acceptance"):  # the runs' own, not that of the comparison
        monkeypatch.setattr(f"headstart.train.drafter_stage.{name}", lambda *_: False)
    for name in ("_svg", "save_png"):
        monkeypatch.setattr(f"headstart.train.figures.report.page.{name}", lambda *_: "")
    shared = {name: TINY[name] for name in ("corpus", "target", "distill", "train", "decode")}
    small = ["train.max_steps=4", "decode.prompts=1", "decode.new_tokens=8"]
    command = ["quickstart", "--drafter", "all", *overrides(shared), *small]
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    found = document["drafters"]
    assert list(found) == names
    untrained = {name for name in FAMILIES if not family(name).trainable}
    for name, report in found.items():
        assert set(REPORT) | {"parameters", "train_seconds"} <= set(report), name
        assert report["identical_to_plain"] and report["identical_to_generate"], name
        assert (report["train_seconds"] > 0) == (report["parameters"] > 0)
        assert (report["parameters"] > 0) == (name not in untrained), name
    assert document["plot"] == "runs/quickstart/drafters.png"
    assert Path(document["plot"]).read_bytes().startswith(b"\x89PNG")
    # One corpus, target and text for all.
    records = Path("runs").glob("*/*/stage.json")
    made = {(path.parts[1], json.loads(path.read_text())["name"]) for path in records}
    shared_ones = {(run, stage) for run, stage in made if stage in ("corpus", "target", "distill")}
    assert shared_ones == {("quickstart", stage) for stage in ("corpus", "target", "distill")}

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
