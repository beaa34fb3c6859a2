"""Training: recipe, corpus, self-distillation, losses, trainer, validation by real decoding.

Nothing heavy is imported here, so that a mistyped recipe is answered at once.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

if __name__ != "headstart.train":
    raise ImportError(f"imported as {__name__!r}; write `from headstart.train import …` instead.")

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Train what a recipe describes: `RECIPE [a.b=value …] [--fresh] [--smoke]`.

    Returns the exit status. With `--until distill` it stops when the text that the drafter is
    trained on is written; with `--smoke` it is a run in seconds, see `smoke`.
    """
    import argparse
    import contextlib
    import logging
    import sys
    import warnings

    from .recipe import load_recipe

    parser = argparse.ArgumentParser(prog="headstart.train", description="Train a drafter.")
    parser.add_argument(
        "recipe", metavar="RECIPE", help="a path, a shipped name, or parts joined by +"
    )
    parser.add_argument("overrides", metavar="a.b=value", nargs="*", help="settings of the recipe")
    parser.add_argument("--fresh", action="store_true", help="run finished stages again")
    parser.add_argument("--until", choices=["distill"], help="stop after this stage")
    parser.add_argument("--smoke", action="store_true", help="a tiny run of all stages, offline")
    options = parser.parse_intermixed_args(argv)
    recipe = load_recipe(options.recipe, options.overrides)
    with contextlib.redirect_stdout(sys.stderr):  # some libraries print
        from .pipeline import train, write_text
        from .processes.agreement import SaidByAll, is_process_0
        from .processes.lifetime import end_processes
        from .processes.stopping import Interrupted

        if logging.lastResort is not None:  # it prints warnings
            logging.lastResort.addFilter(SaidByAll())
        # DeepSpeed calls what torch deprecates, in every step of every process.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        fresh = options.fresh or options.smoke  # what was done before would show nothing
        if options.smoke:
            from .smoke import smoke

            recipe = smoke(recipe)
        try:
            if options.until == "distill":
                made, folder = "rows are", write_text(recipe, fresh).plain
            else:
                made, folder = "drafter is", train(recipe, fresh)
        except Interrupted:  # all processes were
            end_processes()
            raise
        if is_process_0():
            lines = [f"The {made} in {folder}"]
            if not options.until:
                lines += _next_steps(folder, options.smoke)
            print(*lines, sep="\n", file=sys.stderr)
        end_processes()
    return 0


def _next_steps(folder: Path, smoke: bool) -> list[str]:
    """Where the report of a drafter in a folder is, and what to do with the drafter."""
    lines = [f"The report is {report}"] if (report := folder / "report.html").is_file() else []
    if smoke:
        return [*lines, "All stages work; without --smoke the drafter is trained on your model"]
    held_out = folder.parent / "corpus" / "held_out.jsonl"
    prompts = shlex.quote(str(held_out)) if held_out.is_file() else "PROMPTS.jsonl"
    plan = f"headstart plan --drafter {shlex.quote(str(folder))} --prompts {prompts}"
    return [*lines, "", "To try next:", f"  {plan}"]
