"""Write a target adapted in training (Medusa-2) as an ordinary model, with its drafter.

headstart merge runs/medusa2/heads merged
headstart merge ORG/NAME merged --target ORG/MODEL
"""

import argparse
from pathlib import Path

from headstart.inputs import load_speculator
from headstart.terminal import quiet_stdout

from . import options as shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("drafter", metavar="ARTIFACT", help=shared.ARTIFACT)
    add("folder", metavar="FOLDER", type=Path, help="a new folder to write to")
    add("--target", metavar="MODEL", help=shared.TARGET)
    add("--trust-remote-code", action="store_true", help=shared.TRUST)


def run(options: argparse.Namespace) -> int:
    """Print the folders of the model and of its drafter."""
    from headstart.heads import Drafter
    from headstart.heads.artifacts.merging import save_merged

    options.tree = "plain"  # the drafter is needed, whatever a plan says
    speculator = load_speculator(options)
    drafter = speculator.drafter
    assert drafter is None or isinstance(drafter, Drafter), "one drafter is named"
    with quiet_stdout():
        heads = save_merged(drafter, options.folder, speculator.tokenizer)
    print(options.folder)
    print(heads)
    return 0
