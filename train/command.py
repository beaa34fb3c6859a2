"""The training command: what `python -m headstart.train` and `headstart train` run."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence

import torch

from .pipeline import train
from .recipe import load_recipe


def main(argv: Sequence[str] | None = None) -> int:
    """`RECIPE [a.b=value …] [--fresh]`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="headstart.train", description="Train a drafter.")
    parser.add_argument("recipe", metavar="RECIPE", help="a path or a shipped name")
    parser.add_argument("overrides", metavar="a.b=value", nargs="*", help="settings of the recipe")
    parser.add_argument("--fresh", action="store_true", help="run finished stages again")
    options = parser.parse_intermixed_args(argv)
    folder = train(load_recipe(options.recipe, options.overrides), options.fresh)
    print(f"The drafter is in {folder}", file=sys.stderr)
    _leave()
    return 0


def _leave() -> None:
    """End the process group before the interpreter does: its threads abort a late exit."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        gc.collect()  # the trainer has cycles that hold the wrapped model, and so the group
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
