"""Check a recipe on its real model and data, before training.

headstart check quickstart
headstart check own-model target.model=ORG/MODEL corpus.source=prompts.jsonl
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from headstart.terminal import quiet_stdout, tell

from . import options as shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help=shared.RECIPE)
    parser.add_argument(
        "overrides", metavar="a.b=value", nargs="*", default=[], help=shared.OVERRIDES
    )
    shared.add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Print what was found; the status is 1 where something speaks against the run."""
    from headstart.train.recipe import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    from headstart.reports.inspection import print_inspection, to_report
    from headstart.reports.tables import to_json
    from headstart.train.checks.inspect import inspect_run

    if sys.stderr.isatty():
        tell([f"Checking {recipe.name}, which takes a minute or two"])
    with quiet_stdout():
        found: Any = inspect_run(recipe, lambda said: tell([f"check: {said}"]))
    if options.json:
        print(to_json(to_report(recipe, found)))
    else:
        print_inspection(recipe, found, sys.stdout)
    return 0 if found.fine else 1
