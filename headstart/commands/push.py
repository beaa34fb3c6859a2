"""Publish a drafter on the Hub.

headstart push runs/my-model/heads ORG/NAME --license apache-2.0 --dry-run
headstart push runs/my-model/heads ORG/NAME --license apache-2.0 --private
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from headstart.inputs import check_name, load_speculator
from headstart.licenses import license_id
from headstart.terminal import UsageError, quiet_stdout, tell, visible

from . import options as shared

_TARGET_NAME = (
    "what to call the target: its Hub name, or a label where it has none (needed when it was "
    "trained from a folder)"
)

_ENGINES = ("vllm", "sglang", "tensorrt-llm", "llama.cpp", "speculators", "transformers")
"""Formats of `headstart export`, but `original`, which no engine reads."""

_EXPORT = (
    "also push it in the formats of other engines, each on its own branch, FORMAT or "
    f"BRANCH-FORMAT: {', '.join(_ENGINES)}"
)

_HOLDS_TEXT = (
    "This drafter holds the texts that it was made of, with the last tokens of their prompts: "
    "anyone who has it can read them."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("artifact", metavar="ARTIFACT", help=shared.ARTIFACT)
    add("repository", metavar="ORG/NAME", help="the repository; created if there is none")
    add("--target-name", metavar="NAME", help=_TARGET_NAME)
    add("--license", metavar="ID", type=license_id, help="for the model card, e.g. apache-2.0")
    add("--license-name", metavar="NAME", help="with --license other: what the licence is called")
    add("--license-link", metavar="URL", help="with --license other: the address of its text")
    add("--private", action="store_true", help="make a new repository private")
    add("--revision", metavar="BRANCH", help="push to a branch (default: main)")
    add("--export", metavar="FORMAT,…", type=_formats, default=[], help=_EXPORT)
    add("--target", metavar="MODEL", help=f"for --export: {shared.TARGET}")
    add("--dry-run", action="store_true", help="list files and sizes and show the card, offline")


def run(options: argparse.Namespace) -> int:
    """Print the repository's address, or what a dry run would push."""
    check_name(options.artifact)
    license = _license(options)
    from headstart.heads.artifacts.hub import export_branch, upload, upload_export
    from headstart.heads.artifacts.publish import clean_copy, public_target
    from headstart.heads.artifacts.source import DrafterSource
    from headstart.heads.core.files import writing
    from headstart.heads.families import declared_by

    name, branch = _place(options)
    repository = f"{name}@{branch}" if branch else name
    remedy = "make room there, or set TMPDIR to another folder"
    with tempfile.TemporaryDirectory(prefix="headstart-") as scratch:
        folder, lines = Path(scratch) / "artifact", {}
        folder.mkdir()
        with writing("the copy to push", folder, remedy):
            source = DrafterSource.of(options.artifact)
            if options.export:
                _check_formats(options.export, source.manifest.family)
                target = public_target(source, options.target_name)
                with quiet_stdout():
                    lines = _export(options, Path(scratch), target, name, branch)
            files = clean_copy(source, folder, repository, options.target_name, license, lines)
        declared = declared_by(source.manifest.family)
        if declared is not None and declared.collects:
            tell([_HOLDS_TEXT])
        if options.dry_run:
            print(f"{repository} would hold\n")
            for path in files:
                print(f"{path.stat().st_size:>14,}  {path.name}")
            for form in options.export:
                where = f"in the branch {export_branch(form, branch)}"
                for path in sorted((Path(scratch) / form).iterdir()):
                    print(f"{path.stat().st_size:>14,}  {path.name} {where}")
            print(f"\nREADME.md\n\n{visible(files[-1].read_text(encoding='utf-8'))}")
            return 0
        with quiet_stdout():
            address = upload(folder, repository, options.private)
            for form in options.export:
                upload_export(Path(scratch) / form, repository, form)
    print(address)
    return 0


def _license(options: argparse.Namespace) -> dict[str, str]:
    """What the model card's metadata say of the licence.

    Raises:
        UsageError: `other` without the name and the address that the Hub shows of such a licence,
            or these of one that it knows.
    """
    own = {"license_name": options.license_name, "license_link": options.license_link}
    given = {name: said for name, said in own.items() if said}
    if options.license != "other":
        if given:
            raise UsageError(
                "--license-name and --license-link are for a licence that the Hub does not know; "
                "expected --license other with them"
            )
        return {"license": options.license} if options.license else {}
    if len(given) < len(own) or not options.license_link.startswith(("https://", "http://")):
        raise UsageError(
            "--license other: expected its name and the address of its text too, which the Hub "
            "shows: --license-name my-licence --license-link https://…"
        )
    return {"license": "other", **given}


def _place(options: argparse.Namespace) -> tuple[str, str | None]:
    """The repository's name, and the branch to push to; None for the main one.

    Raises:
        UsageError: two branches are given, or one that an export may be on.
    """
    from headstart.heads.artifacts.hub import split_revision

    name, branch = split_revision(options.repository)
    if branch and options.revision and branch != options.revision:
        raise UsageError(
            f"{options.repository} and --revision {options.revision} name two branches; give one"
        )
    branch = options.revision or branch
    if branch and any(f"-{branch}".endswith(f"-{form}") for form in _ENGINES):
        raise UsageError(
            f"--revision {branch} has the name of a branch that --export writes; expected one that "
            f"does not end with {' or '.join(_ENGINES)}"
        )
    return name, branch


def _export(
    options: argparse.Namespace, scratch: Path, target: str, name: str, branch: str | None
) -> dict[str, str]:
    """Write the exports below `scratch`; returns the lines that start their engines.

    Args:
        name, branch: where the artifact is pushed to.
    """
    from headstart.heads.artifacts.engines import serve_line
    from headstart.heads.artifacts.export import export_drafter
    from headstart.heads.artifacts.hub import export_branch

    # The drafter is needed, whatever a plan says.
    told = argparse.Namespace(target=options.target, drafter=options.artifact, tree="plain")
    speculator = load_speculator(told)
    drafter: Any = speculator.drafter
    # What an export says of its target is what others can load.
    drafter.target.name_or_path = target
    lines = {}
    for form in options.export:
        export_drafter(drafter, form, scratch / form, speculator.tokenizer)
        lines[form] = serve_line(drafter, form, name, export_branch(form, branch)) or ""
    return {form: line for form, line in lines.items() if line}


def _check_formats(forms: list[str], family: str) -> None:
    """A UsageError for a format that drafters of a family are not published in."""
    from headstart.heads.artifacts.export import formats_of, is_copy_of_target
    from headstart.heads.families import with_article

    able = [each for each in formats_of(family) if each in _ENGINES]
    for form in forms:
        if form not in able:
            raise UsageError(
                f"--export {form}: {with_article(family)} drafter cannot be written so; expected "
                f"one of: {', '.join(able) or 'none for this family'}"
            )
        if is_copy_of_target(family, form):
            raise UsageError(
                f"--export {form} of {family} is a copy of the whole target, which push does not "
                "publish; write it with headstart export, and upload that folder by itself"
            )


def _formats(text: str) -> list[str]:
    found = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for each in found:
        if each not in _ENGINES:
            told = f"found {each!r}, expected some of {','.join(_ENGINES)}"
            raise argparse.ArgumentTypeError(told)
    return found
