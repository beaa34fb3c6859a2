"""Writes artifacts: the folder appears whole or not at all, whatever happens meanwhile."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path

from safetensors import SafetensorError

from ..core import ArtifactError
from ..drafter import Drafter
from ..parts.adapter import ADAPTER_WEIGHTS
from .files import CARD, MANIFEST, WEIGHTS, beside
from .manifest import Manifest, sha256


def save_drafter(drafter: Drafter, folder: str | Path, manifest: Manifest, card: str = "") -> Path:
    """Write an artifact folder; an older one in its place goes only when the new is complete.

    Args:
        card: the model card, Markdown.

    Returns:
        The folder.

    Raises:
        ArtifactError: the folder holds something else than an artifact, or the drafter's adapter is
            in no target.
        OSError: it cannot be written; an older artifact is still there.
    """
    folder = Path(folder)
    if drafter.adapter is not None and not drafter.adapter.attached:
        raise ArtifactError(
            f"a {manifest.family} drafter is saved with its adapter, which is not in its target "
            "now, or merged already; save it when it was trained, or copy the artifact's folder."
        )
    if folder.exists() and not _replaceable(folder):
        raise ArtifactError(
            f"{folder} exists and is no artifact of headstart (it has no {MANIFEST}); choose "
            "another folder, or empty this one."
        )
    staging, retired = beside(folder, "partial"), beside(folder, "retired")
    try:
        if retired.is_dir():  # an earlier save was killed half way
            _discard(retired, staging) if folder.exists() else retired.rename(folder)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        write_artifact(drafter, staging, manifest, card)
        # A folder cannot be swapped in one step everywhere. Between these two renames only the
        # retired one stands, and `artifact_folder` finds it.
        if folder.exists():
            folder.rename(retired)
        staging.rename(folder)
        _sync(folder.parent)
        if retired.is_dir():
            _discard(retired, staging)
    except (OSError, SafetensorError) as error:
        if retired.is_dir() and not folder.exists():
            retired.rename(folder)
        shutil.rmtree(staging, ignore_errors=True)
        reason = " ".join(str(error).split())
        raise OSError(
            f"the drafter cannot be saved in {folder} ({reason}); what stood there is untouched: "
            "make room, or choose a folder that can be written to."
        ) from error
    return folder


def write_artifact(drafter: Drafter, folder: Path, manifest: Manifest, card: str) -> None:
    """Write an artifact's files into a folder that is there; see `save_drafter`."""
    drafter.save_pretrained(folder)
    manifest = replace(manifest, weights_sha256=sha256(folder / WEIGHTS))
    if drafter.adapter is not None:
        digests = sha256(folder / ADAPTER_WEIGHTS), drafter.adapter.digest()
        manifest = replace(manifest, adapter_sha256=digests[0], adapter_base=digests[1])
    text = json.dumps(asdict(manifest), indent=2) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    if card:
        (folder / CARD).write_text(card, encoding="utf-8")
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def write_file(path: Path, text: str) -> None:
    """Write a file of a finished artifact: a reader sees the old text or all of the new.

    Raises:
        OSError: it cannot be written; the old text is still there.
    """
    staging = path.with_name(f".{path.name}.partial")
    try:
        staging.write_text(text, encoding="utf-8")
        _sync(staging)
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)
    _sync(path.parent)


def _replaceable(folder: Path) -> bool:
    return folder.is_dir() and ((folder / MANIFEST).is_file() or not any(folder.iterdir()))


def _discard(retired: Path, staging: Path) -> None:
    """Delete a retired folder under a name that is never read: it may be half gone for a while."""
    shutil.rmtree(staging, ignore_errors=True)
    retired.rename(staging)
    shutil.rmtree(staging)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
