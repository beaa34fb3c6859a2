"""Train the drafter that a recipe describes.

headstart train own-model target.model=ORG/MODEL corpus.source=prompts.jsonl
headstart train medusa+llama-3.1-8b+1x80gb --smoke
"""

import argparse

from headstart.terminal import quiet_stdout

from . import options as shared

_SMOKE = (
    "run all stages in seconds, offline, in runs/NAME-smoke: a tiny random target of the recipe's "
    "architecture, built-in chats, a few steps"
)

KEPT = shared.KEPT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help=shared.RECIPE)
    shared.add_recipe_arguments(parser)
    parser.add_argument("--smoke", action="store_true", help=_SMOKE)


def run(options: argparse.Namespace) -> int:
    """Check the recipe, then train as `python -m headstart.train` does."""
    from headstart.train.recipe import load_recipe

    load_recipe(options.recipe, options.overrides)
    from headstart import train

    flags = [f"--{name}" for name in ("fresh", "smoke") if getattr(options, name)]
    with quiet_stdout():
        return train.main([options.recipe, *options.overrides, *flags]) or 0
