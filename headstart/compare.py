"""Every family's quickstart recipe, and running all of them on one target."""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from headstart.terminal import UsageError, one_line
from headstart.train.recipe import Recipe, load_recipe, shipped_recipes

ALL = "all"
"""What `quickstart --drafter` takes in place of a family."""

_BASE = "quickstart"


def quickstarts() -> dict[str, str]:
    """The shipped recipe of each family's quickstart, by family; the others share the first one's.

    A recipe that shares the stages of `quickstart` is the quickstart of the family that it is named
    after.

    >>> quickstarts()["medusa"]
    'quickstart'
    """
    names = {load_recipe(_BASE).drafter.family: _BASE}
    for name in shipped_recipes():
        if load_recipe(name).shares == _BASE:
            names[name.replace("-", "_")] = name
    return names


def quickstart_of(drafter: str) -> str:
    """The recipe of one family's quickstart.

    Raises:
        UsageError: there is none of that name.
    """
    known = quickstarts()
    name = drafter.replace("-", "_")
    if name not in known:
        close = difflib.get_close_matches(name, [*known, ALL], n=1, cutoff=0.5)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        raise UsageError(
            f"--drafter {drafter!r} has no quickstart{meant}; expected one of "
            f"{', '.join(known)}, or {ALL}"
        )
    return known[name]


def load_all(overrides: Sequence[str]) -> dict[str, Recipe]:
    """The recipe of every family's quickstart, with the same overrides.

    Raises:
        UsageError: an override that cannot be meant for all of them.
    """
    for override in overrides:
        section = override.partition("=")[0].partition(".")[0].strip()
        if section in ("name", "drafter", "shares"):
            raise UsageError(
                f"override {override!r} is for one drafter; with --drafter {ALL} give settings "
                "of the other sections, or run that drafter alone"
            )
    return {drafter: load_recipe(name, overrides) for drafter, name in quickstarts().items()}


def run_all(recipes: Mapping[str, Recipe], fresh: bool = False) -> dict[str, dict[str, Any]]:
    """Run every recipe; the others go on when one of them fails.

    Returns:
        For each family the report of `pipeline.run`, with the drafter's `parameters` and the
        `train_seconds` of its artifact added; or `error`, why there is none.
    """
    from headstart.reports.describe import describe
    from headstart.train import pipeline

    reports: dict[str, dict[str, Any]] = {}
    for number, (drafter, recipe) in enumerate(recipes.items(), start=1):
        print(f"{drafter} ({number} of {len(recipes)}), in {recipe.folder}", file=sys.stderr)
        try:
            report = pipeline.run(recipe, fresh=fresh)
            found = describe(report["artifact"])
            reports[drafter] = report | {
                "parameters": found["parameters"],
                "train_seconds": found["metrics"]["seconds"],
            }
        except Exception as error:
            if os.environ.get("HEADSTART_DEBUG") == "1":
                traceback.print_exc()
            kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
            reports[drafter] = {"error": kind + one_line(error)}
    return reports
