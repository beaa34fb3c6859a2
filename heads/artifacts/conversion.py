"""Conversion of another trainer's checkpoint, a language model, or a target's own module."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..core import ArtifactError
from ..families import with_article
from .files import check_is_free
from .license import license_of
from .loading import load_drafter
from .manifest import manifest_of
from .saving import model_card, save_drafter
from .source import DrafterSource, SourceKind

_BODY = """The output is the
target's own. The weights are those of `{origin}`, in headstart's layout: its authors,
training and licence are described there.

**Nothing was measured** when it was converted: `headstart plan` and `headstart bench` do that."""


def convert(
    checkpoint: str | Path | DrafterSource,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
) -> Path:
    """Write an artifact made from another trainer's drafter, a language model, or a target's files.

    The weights keep their dtype. The manifest names the checkpoint and has no metrics. Its
    fingerprints are those of the target that is passed: that the checkpoint was trained for it is
    checked by shapes alone. The card names the licence that the card of the checkpoint names.

    Args:
        checkpoint: see `DrafterSource`.
        target: the model that it was trained for, loaded from a folder or the Hub.
        folder: where to write; it must be empty, or not exist.

    Raises:
        ArtifactError: it is an artifact already, or no drafter for this target; or the folder
            holds something.
    """
    folder = Path(folder)
    check_is_free(folder)
    source = DrafterSource.of(checkpoint)
    own = source.kind is SourceKind.IN_TARGET
    if source.kind is not SourceKind.CHECKPOINT and not own:
        raise ArtifactError(
            f"{source} is not a checkpoint of another project; expected one with a config.json and "
            "without headstart.json: an artifact needs no conversion."
        )
    if not target.name_or_path:
        raise ArtifactError(
            "the target has no name for the artifact to remember; load it with from_pretrained."
        )
    drafter = load_drafter(source, target, tokenizer, dtype="auto")
    origin = target.name_or_path if own else source.origin
    manifest = manifest_of(drafter, tokenizer, origin=origin)
    kind = with_article(manifest.family).capitalize()
    card = model_card(
        manifest,
        f"{kind} drafter for `{manifest.target}`, made from `{manifest.origin}`",
        _BODY.format(origin=manifest.origin),
        "" if own else "Whether it was trained for this target was judged by its shapes alone.",
        license=license_of(source, target),
    )
    return save_drafter(drafter, folder, manifest, card)
