"""Train a small drafter and measure."""

import argparse
import sys

from headstart.terminal import quiet_stdout

from . import options as shared

_FAMILY = (
    "a family's own quickstart, e.g. medusa; an unknown name lists them; or all: each of them on "
    "one target, compared"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--recipe", help="a path or a shipped name (default: quickstart)")
    which.add_argument("--drafter", metavar="NAME", help=_FAMILY)
    shared.add_recipe_arguments(parser)
    shared.add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Run one recipe or all; the status is 1 where a family of `--drafter all` failed."""
    from headstart.train.recipe import load_recipe

    if options.drafter is not None:
        from headstart.compare import ALL, quickstart_of

        if options.drafter == ALL:
            return _compare(options)
        options.recipe = quickstart_of(options.drafter)
    recipe = load_recipe(options.recipe or "quickstart", options.overrides)
    from headstart.reports.measured import print_report
    from headstart.train import pipeline

    with quiet_stdout():
        report = pipeline.run(recipe, fresh=options.fresh)
    print_report(report, sys.stdout, f"headstart quickstart: {recipe.name}", options.json)
    return 0


def _compare(options: argparse.Namespace) -> int:
    from headstart.compare import load_all, run_all

    recipes = load_all(options.overrides)
    from headstart.reports.document import to_json
    from headstart.reports.drafters import draw_drafters, print_drafters

    with quiet_stdout():
        reports = run_all(recipes, options.fresh)
        plot = draw_drafters(reports, next(iter(recipes.values())).folder)
    if options.json:
        print(to_json({"drafters": reports, "plot": plot and str(plot)}))
    else:
        print_drafters(reports, plot, sys.stdout)
    return 1 if any("error" in report for report in reports.values()) else 0
