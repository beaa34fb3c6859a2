"""Print the path of a launch configuration, for `accelerate launch --config_file`.

headstart launch-file
accelerate launch --config_file $(headstart launch-file ddp) -m headstart.train RECIPE
"""

import argparse
from pathlib import Path

from headstart.terminal import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help = "such as ddp or zero3; without it all names are printed"
    parser.add_argument("name", metavar="NAME", nargs="?", help=help)


def run(options: argparse.Namespace) -> int:
    """Print the path, or the names of all."""
    import headstart.recipes

    folder = Path(headstart.recipes.__file__).resolve().parent / "launch"
    files = {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    if options.name is None:
        print("\n".join(files))
        return 0
    if options.name not in files:
        raise UsageError(
            f"no launch file {options.name!r} is shipped; expected one of: {', '.join(files)}"
        )
    print(files[options.name])
    return 0
