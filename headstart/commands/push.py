"""Publish an artifact on the Hub."""

import argparse
import tempfile
from pathlib import Path

from headstart.inputs import check_name
from headstart.licenses import license_id
from headstart.terminal import quiet_stdout, visible

from . import options as shared

_TARGET_NAME = (
    "what to call the target: its Hub name, or a label where it has none (needed when it was "
    "trained from a folder)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("artifact", metavar="ARTIFACT", help=shared.ARTIFACT)
    add("repository", metavar="ORG/NAME", help="made where it is missing")
    add("--target-name", metavar="NAME", help=_TARGET_NAME)
    add("--license", metavar="ID", type=license_id, help="for the model card, e.g. apache-2.0")
    add("--private", action="store_true", help="if the repository is new")
    add("--revision", metavar="BRANCH", help="push to a branch (default: main)")
    add("--dry-run", action="store_true", help="list files, sizes and card; no network")


def run(options: argparse.Namespace) -> int:
    """Print the repository's address, or what a dry run would push."""
    check_name(options.artifact)
    from headstart.heads.artifacts.hub import upload
    from headstart.heads.artifacts.publish import clean_copy
    from headstart.heads.core.files import writing

    at = f"@{options.revision}" if options.revision else ""
    repository = options.repository + at
    with tempfile.TemporaryDirectory(prefix="headstart-") as folder:
        remedy = "make room there, or set TMPDIR to another folder"
        with writing("the copy to push", Path(folder), remedy):
            files = clean_copy(
                options.artifact, Path(folder), repository, options.target_name, options.license
            )
        if options.dry_run:
            print(f"{repository} would hold\n")
            for path in files:
                print(f"{path.stat().st_size:>14,}  {path.name}")
            print(f"\nREADME.md\n\n{visible(files[-1].read_text(encoding='utf-8'))}")
            return 0
        with quiet_stdout():
            address = upload(Path(folder), repository, options.private)
    print(address)
    return 0
