"""Saving of artifacts: a reader finds the old folder or the whole new one, even after a crash."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import yaml
from safetensors import SafetensorError

from ..core import ArtifactError, brief
from ..core.files import flush_folder, flush_to_disk, writing
from ..declared.adapter import ADAPTER_WEIGHTS
from ..drafter import Drafter
from ..families import with_article
from .files import CARD, MANIFEST, WEIGHTS, card_example, retired_folder
from .hub import has_page
from .manifest import Manifest, sha256

logger = logging.getLogger(__name__)


def save_drafter(drafter: Drafter, folder: str | Path, manifest: Manifest, card: str = "") -> Path:
    """Write an artifact folder; an older one in its place is removed when the new is complete.

    Where a link to a folder stands, the new one takes its place, and the folder of the link stays.

    Args:
        manifest: its `weights_sha256` and `adapter_sha256` are filled in, and `adapter_base` where
            it is empty.
        card: see `model_card`.

    Raises:
        ArtifactError: the folder holds something else than an artifact, or the drafter's adapter is
            in no target.
        OSError: it cannot be written; an older artifact is still there.
    """
    folder = Path(folder)
    if drafter.adapter is not None and not drafter.adapter.attached:
        raise ArtifactError(
            f"{with_article(manifest.family)} drafter is saved with its adapter, which is not in "
            "its target now, or merged already; save it when it was trained, or copy the "
            "artifact's folder."
        )
    ours = (folder / MANIFEST).is_file() or (folder.is_dir() and not any(folder.iterdir()))
    if folder.exists() and not ours:
        raise ArtifactError(
            f"{folder} exists and is no artifact of headstart (it has no {MANIFEST}); choose "
            "another folder, or empty this one."
        )
    new, old = folder.with_name(f".{folder.name}.partial"), retired_folder(folder)
    with writing("the drafter", folder):
        _replace(drafter, folder, new, old, manifest, card)
    return folder


def _replace(
    drafter: Drafter, folder: Path, new: Path, old: Path, manifest: Manifest, card: str
) -> None:
    if old.is_dir():  # an earlier save was killed between its two renames, or just after them
        _remove(old, new) if folder.exists() else old.rename(folder)
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        write_artifact(drafter, new, manifest, card)
        # Few systems swap two folders in one step. Between these renames there is only the old
        # one under its other name, where `DrafterSource` finds it.
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        flush_to_disk(folder.parent)
    except (OSError, SafetensorError):
        if old.is_dir():
            if folder.exists():
                folder.rename(new)
            old.rename(folder)
        shutil.rmtree(new, ignore_errors=True)
        raise
    if old.is_dir():  # the new one is in its place, whether or not the old one can be removed
        try:
            _remove(old, new)
        except OSError as error:
            logger.warning(
                "%s is saved; what stood there before cannot be removed (%s): delete %s",
                folder, brief(error, None), new if new.exists() else old,
            )  # fmt: skip


def write_artifact(drafter: Drafter, folder: Path, manifest: Manifest, card: str) -> None:
    """Write an artifact's files into an existing folder; see `save_drafter`."""
    drafter.save_pretrained(folder)
    manifest = replace(manifest, weights_sha256=sha256(folder / WEIGHTS))
    if drafter.adapter is not None:
        base = manifest.adapter_base or drafter.adapter.digest()
        weights = sha256(folder / ADAPTER_WEIGHTS)
        manifest = replace(manifest, adapter_sha256=weights, adapter_base=base)
    text = json.dumps(asdict(manifest), indent=2) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    if card:
        (folder / CARD).write_text(card, encoding="utf-8")
    flush_folder(folder)


def _remove(old: Path, new: Path) -> None:
    """Delete the old folder under the new one's temporary name, from which nothing is loaded.

    Of a link, such as a run's `heads` is, the link alone is deleted, and its folder stays.
    """
    if old.is_symlink():
        old.unlink()
        return
    shutil.rmtree(new, ignore_errors=True)
    old.rename(new)
    shutil.rmtree(new)


_PROMPT = {
    False: 'ids = speculator.tokenizer("Once upon a time", return_tensors="pt").input_ids',
    True: """chat = [{"role": "user", "content": "Why is the sky blue?"}]
ids = speculator.tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
).input_ids""",
}
"""In a card's example: a text, or for a drafter that was trained through a chat template a chat."""


_GENERATE = """
text = speculator.generate(ids, max_new_tokens=64)
print(speculator.tokenizer.decode(text[0], skip_special_tokens=True))
"""


def _base_model(target: str) -> str:
    """The card's line that links the target's page, if it has one on the Hub."""
    named = has_page(target) and not Path(target).exists()
    return f"base_model: {target}\n" if named else ""


def model_card(
    manifest: Manifest,
    title: str,
    body: str,
    note: str,
    datasets: Sequence[str] = (),
    license: Mapping[str, str] | None = None,
) -> str:
    """The README.md of an artifact, with the front matter that the Hub reads.

    Args:
        body: whose output it is, and what was measured.
        note: a last sentence; there may be none.
        datasets: the names of data sets on the Hub that it was trained with.
        license: see `license_of`.
    """
    sets = f"datasets: [{', '.join(datasets)}]\n" if datasets else ""
    said = yaml.safe_dump(dict(license), sort_keys=False) if license else ""
    chat: dict = manifest.trained.get("chat") or {}
    prompt = _PROMPT[chat.get("how") == "template"]
    if settings := chat.get("template_kwargs"):
        prompt = prompt.replace('"pt", ', f'"pt", **{settings!r}, ')
    return f"""---
library_name: headstart
pipeline_tag: text-generation
tags: [speculative-decoding, {manifest.family}, headstart]
{_base_model(manifest.target)}{sets}{said}---

# {title}

It drafts several tokens per round, which the target verifies in one forward. {body}

{card_example(manifest.target, prompt + _GENERATE)}
It works only with this target (fingerprint `{manifest.target_fingerprint[:12]}`), which is checked
when it is loaded.{note and f" {note}"}
"""
