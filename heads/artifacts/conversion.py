"""Makes an artifact of somebody else's checkpoint: ours from then on, and not measured yet."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..core import ArtifactError
from .card import model_card
from .files import is_foreign, is_weightless
from .foreign_checkpoints import checkpoint_folder
from .hub import split_revision
from .loading import load_drafter
from .manifest import Manifest, fingerprint, tokenizer_hash
from .saving import save_drafter


def convert(
    name: str | Path,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    allow_pickle: bool = False,
) -> Path:
    """Write an artifact from another's drafter, or from a language model that drafts.

    The weights keep their type. The manifest says what it was made from, and holds no figures: none
    were measured. The fingerprints are those of the target that is passed, and nothing but shapes
    proves that the checkpoint was trained for it.

    Args:
        name: a folder, or `ORG/NAME` or `ORG/NAME@REVISION` on the Hub.
        target: the model that it was trained for, loaded from a folder or the Hub.
        folder: where to write; an artifact that stands there is replaced.
        allow_pickle: see `load_drafter`.

    Raises:
        ArtifactError: it is an artifact already or no drafter at all, or not for this target.
    """
    if is_weightless(name) or not is_foreign(name):
        raise ArtifactError(
            f"{name} is not somebody else's checkpoint; expected one with a config.json and "
            "without headstart.json: an artifact needs no conversion."
        )
    if not target.name_or_path:
        raise ArtifactError(
            "the target has no name for the artifact to remember; load it with from_pretrained."
        )
    drafter = load_drafter(name, target, tokenizer, allow_pickle=allow_pickle, dtype="auto")
    origin = str(name)
    if not Path(name).is_dir():
        commit = checkpoint_folder(name).name  # of the snapshot in the cache
        origin = f"{split_revision(origin)[0]}@{commit}"
    manifest = Manifest(
        family=drafter.config.family_name(),
        target=target.name_or_path,
        target_fingerprint=fingerprint(target),
        tokenizer_hash=tokenizer_hash(tokenizer),
        origin=origin,
    )
    return save_drafter(drafter, folder, manifest, _card(manifest))


def _card(manifest: Manifest) -> str:
    body = f"""The output is the
target's own. The weights are those of `{manifest.origin}`, in headstart's layout: its authors,
training and licence are described there.

**Nothing was measured** when it was converted: `headstart plan` and `headstart bench` do that."""
    return model_card(
        manifest,
        f"A {manifest.family} drafter for `{manifest.target}`, made from `{manifest.origin}`",
        body,
        "Whether it was trained for this target was judged by its shapes alone.",
    )
