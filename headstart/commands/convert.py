"""Make an artifact of another's checkpoint of a drafter."""

import argparse

from headstart.models import load_speculator
from headstart.terminal import quiet_stdout

from .options import ARTIFACT, PICKLE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=ARTIFACT)
    parser.add_argument("folder", metavar="FOLDER", help="where to write the artifact")
    parser.add_argument(
        "--target", metavar="MODEL", required=True, help="the model that it was trained for"
    )
    parser.add_argument("--allow-pickle", action="store_true", help=PICKLE)


def run(options: argparse.Namespace) -> int:
    """Convert, and print the artifact's folder."""
    from headstart.heads.artifacts.conversion import convert

    target = load_speculator(argparse.Namespace(target=options.target, drafter=None))
    assert target.tokenizer is not None  # loaded together with the target
    with quiet_stdout():
        folder = convert(
            options.checkpoint,
            target.model,
            target.tokenizer,
            options.folder,
            allow_pickle=options.allow_pickle,
        )
    print(folder)
    return 0
