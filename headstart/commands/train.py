"""Train the drafter that a recipe describes."""

import argparse

from headstart.terminal import quiet_stdout

from . import options as shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a path or a shipped name")
    shared.add_recipe_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Check the recipe, then train as `python -m headstart.train` does."""
    from headstart.train.recipe import load_recipe

    load_recipe(options.recipe, options.overrides)
    from headstart import train

    fresh = ["--fresh"] if options.fresh else []
    with quiet_stdout():
        return train.main([options.recipe, *options.overrides, *fresh]) or 0
