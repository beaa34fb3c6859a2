"""List the shipped recipes; of those with given parts, estimate memory, disk and hours.

headstart recipes
headstart recipes medusa+llama-3.1-8b+1x80gb
"""

import argparse
import sys

from . import options as shared

_PARTS = (
    "estimates for recipes with these parts, e.g. medusa 1x24gb; the name of one recipe shows it "
    "in full"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("parts", metavar="PART", nargs="*", help=_PARTS)
    parser.add_argument(
        "--estimates", action="store_true", help="without PART: also the estimates for all recipes"
    )
    shared.add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Print the lists, or one recipe's estimate in full."""
    from headstart.reports.recipes import describe_recipes, print_recipes
    from headstart.reports.tables import to_json

    parts = [part for name in options.parts for part in name.split("+")]
    found = describe_recipes(parts, estimated=options.estimates or bool(parts))
    if options.json:
        print(to_json(found))
    else:
        print_recipes(found, sys.stdout)
    return 0
