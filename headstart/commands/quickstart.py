"""Train a small drafter from nothing and measure it, in a few minutes.

headstart quickstart
headstart quickstart --drafter eagle3
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headstart.terminal import UsageError, one_line, quiet_stdout, tell

from . import options as shared

if TYPE_CHECKING:
    from headstart.train.recipe import Recipe

_BASE, _ALL = "quickstart", "all"
_FAMILY = (
    "the family to train, e.g. medusa or eagle3; all: train every family on the same target and "
    "compare them"
)

_STEPS = (
    "Stages: a small model is trained (target) and generates text (distill); on this",
    "text a drafter is trained (train, heads), and decodes held-out files (bench).",
)

KEPT = shared.KEPT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--recipe", help=f"{shared.RECIPE} (default: quickstart)")
    which.add_argument("--drafter", metavar="NAME", help=_FAMILY)
    shared.add_recipe_arguments(parser)
    shared.add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Run one recipe or all; the status is 1 where a family of `--drafter all` failed."""
    from headstart.train.recipe import load_recipe

    if named := [word for word in options.overrides if "=" not in word]:
        raise UsageError(
            f"unknown argument {named[0]!r}; expected settings of the form a.b=value, and a family "
            "as --drafter NAME"
        )
    if options.drafter is not None:
        if options.drafter == _ALL:
            return _compare(options)
        options.recipe = quickstart_of(options.drafter)
    recipe = load_recipe(options.recipe or _BASE, options.overrides)
    from headstart.heads.families import with_article
    from headstart.reports.measured import print_report
    from headstart.reports.pages import write_quickstart_page
    from headstart.train import pipeline

    if recipe.target.scratch is not None:
        tell(_STEPS)
    with quiet_stdout():
        report = pipeline.run(recipe, fresh=options.fresh)
        page = None
        if report.get("artifact"):
            page = write_quickstart_page(report, recipe.name, recipe.folder)
    title = f"headstart quickstart: {with_article(recipe.drafter.family)} drafter"
    print_report(report, sys.stdout, title, options.json)
    if page is not None and not options.json:
        print(f"\nThe report is {page}")
    return 0


def _compare(options: argparse.Namespace) -> int:
    recipes = load_all(options.overrides)
    from headstart.reports.comparison import draw_drafters, print_drafters
    from headstart.reports.tables import to_json

    with quiet_stdout():
        reports = _run_all(recipes, options.fresh)
        plot = draw_drafters(reports, next(iter(recipes.values())).folder)
    if options.json:
        print(to_json({"drafters": reports, "plot": plot and str(plot)}))
    else:
        print_drafters(reports, plot, sys.stdout)
    return 1 if any("error" in report for report in reports.values()) else 0


def quickstarts() -> dict[str, str]:
    """By family, the shipped recipe of its quickstart; all but the first share that one's stages.

    >>> quickstarts()["medusa"]
    'quickstart'
    """
    from headstart.train.recipe import load_recipe, shipped_recipes

    names = {load_recipe(_BASE).drafter.family: _BASE}
    for name in shipped_recipes():
        if load_recipe(name).shares == _BASE:
            names[name.replace("-", "_")] = name
    return names


def quickstart_of(drafter: str) -> str:
    """The recipe of one family's quickstart."""
    from headstart.train.recipe.fields import nearest

    known = quickstarts()
    name = drafter.replace("-", "_")
    if name not in known:
        meant = nearest(name, [*known, _ALL])
        raise UsageError(
            f"--drafter {drafter!r} has no quickstart{meant}; expected one of "
            f"{', '.join(known)}, or {_ALL}"
        )
    return known[name]


def load_all(overrides: Sequence[str]) -> dict[str, Recipe]:
    """The recipe of every family's quickstart, with the same overrides."""
    from headstart.train.recipe import load_recipe

    for override in overrides:
        section = override.partition("=")[0].partition(".")[0].strip()
        if section in ("name", "drafter", "shares"):
            raise UsageError(
                f"override {override!r} is for one drafter; with --drafter {_ALL} give settings "
                "of the other sections, or run that drafter alone"
            )
    return {drafter: load_recipe(name, overrides) for drafter, name in quickstarts().items()}


def _run_all(recipes: Mapping[str, Recipe], fresh: bool) -> dict[str, dict[str, Any]]:
    """The report of every family's run with `parameters` and `train_seconds`, or its `error`."""
    from headstart.reports.description import describe
    from headstart.reports.pages import write_quickstart_page
    from headstart.train import pipeline

    reports: dict[str, dict[str, Any]] = {}
    for number, (drafter, recipe) in enumerate(recipes.items(), start=1):
        print(f"{drafter} ({number} of {len(recipes)}), in {recipe.folder}", file=sys.stderr)
        try:
            report = pipeline.run(recipe, fresh=fresh)
            write_quickstart_page(report, recipe.name, recipe.folder)
            found = describe(report["artifact"])
            size, seconds = found["parameters"], found["metrics"]["seconds"]
            reports[drafter] = report | {"parameters": size, "train_seconds": seconds}
        except Exception as error:
            if os.environ.get("HEADSTART_DEBUG") == "1":
                traceback.print_exc()
            kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
            reports[drafter] = {"error": kind + one_line(error)}
    return reports
