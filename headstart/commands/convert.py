"""Convert another project's drafter to an artifact.

headstart convert ORG/NAME runs/converted --target ORG/MODEL
headstart convert ORG/NAME runs/converted --target ORG/MODEL --allow-pickle
"""

import argparse
from pathlib import Path

from headstart.inputs import check_name, load_target
from headstart.terminal import quiet_stdout

from . import options as shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help=shared.ARTIFACT)
    add("folder", metavar="FOLDER", type=Path, help="a new folder to write the artifact to")
    add("--target", metavar="MODEL", required=True, help="the model that it was trained for")
    add("--trust-remote-code", action="store_true", help=shared.TRUST)
    add("--allow-pickle", action="store_true", help=shared.PICKLE)


def run(options: argparse.Namespace) -> int:
    """Convert, and print the artifact's folder."""
    check_name(options.checkpoint)
    from headstart.heads.artifacts.conversion import convert
    from headstart.heads.artifacts.files import check_is_free
    from headstart.heads.artifacts.source import DrafterSource

    check_is_free(options.folder)
    target = load_target(options)
    assert target.tokenizer is not None  # loaded together with the target
    with quiet_stdout():
        source = DrafterSource(options.checkpoint, options.allow_pickle)
        folder = convert(source, target.model, target.tokenizer, options.folder)
    print(folder)
    return 0
