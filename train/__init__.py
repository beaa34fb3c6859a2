"""Training: recipe, corpus, self-distillation, losses, trainer, validation by real decoding.

Nothing heavy is imported here, so that a mistyped recipe is answered at once.
"""

from collections.abc import Sequence

if __name__ != "headstart.train":
    raise ImportError(f"imported as {__name__!r}; write `from headstart.train import …` instead.")

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Train what a recipe describes: `RECIPE [a.b=value …] [--fresh]`; returns the exit status.

    With `--until distill` it stops when the text that the drafter is trained on is written.
    """
    import argparse
    import sys

    from .recipe import load_recipe

    parser = argparse.ArgumentParser(prog="headstart.train", description="Train a drafter.")
    parser.add_argument("recipe", metavar="RECIPE", help="a path or a shipped name")
    parser.add_argument("overrides", metavar="a.b=value", nargs="*", help="settings of the recipe")
    parser.add_argument("--fresh", action="store_true", help="run finished stages again")
    parser.add_argument("--until", choices=["distill"], help="stop after this stage")
    options = parser.parse_intermixed_args(argv)
    recipe = load_recipe(options.recipe, options.overrides)
    from .pipeline import train, write_text
    from .processes import end_processes

    if options.until == "distill":
        folder = write_text(recipe, options.fresh).plain
        print(f"The rows are in {folder}", file=sys.stderr)
    else:
        folder = train(recipe, options.fresh)
        print(f"The drafter is in {folder}", file=sys.stderr)
    end_processes()
    return 0
