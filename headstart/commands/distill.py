"""Generate the training text of a recipe, without training.

headstart distill quickstart
headstart distill own-model target.model=ORG/MODEL corpus.source=prompts.jsonl
"""

import argparse
import json

from headstart.heads.core import counted
from headstart.terminal import quiet_stdout

from . import options as shared

KEPT = shared.KEPT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help=shared.RECIPE)
    shared.add_recipe_arguments(parser)
    shared.add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Run the stages up to distillation; print where the rows are, how many, and how fast."""
    from headstart.train.recipe import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    from headstart.train.data.distill import MANIFEST
    from headstart.train.pipeline import write_text

    with quiet_stdout():
        stage = write_text(recipe, options.fresh)
    manifest = json.loads((stage.plain / MANIFEST).read_text())
    if options.json:
        print(json.dumps({"folder": str(stage.plain), **manifest}, indent=2))
        return 0
    counts = manifest["counts"]
    print(
        f"{counted(counts['rows'], 'row')} of {counted(counts['tokens'], 'token')}, "
        f"{counts['supervised']:,} of them to be learnt, in {counted(counts['shards'], 'shard')}: "
        f"{stage.plain}"
    )
    if stage.reused:
        print("They were there; --fresh writes them anew.")
    elif manifest["tokens_per_second"]:
        print(f"{manifest['tokens_per_second']:.0f} tokens per second were written.")
    return 0
