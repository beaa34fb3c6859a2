"""A target that was trained together with its drafter, written as an ordinary model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..core import ArtifactError
from ..core.files import new_folder
from ..drafter import Drafter
from ..families import with_article
from .files import check_is_free
from .manifest import manifest_of
from .saving import model_card, save_drafter

DRAFTER = "drafter"
"""The folder of the drafter, within that of the model."""

_BODY = """The output is the target's own: the
target is the model in the folder above, which holds what it learnt together with this drafter."""


def save_merged(
    drafter: Drafter | None, folder: str | Path, tokenizer: PreTrainedTokenizerBase | None
) -> Path:
    """Write the adapted target into `folder`, and into `folder/drafter` a drafter for it.

    Args:
        drafter: loaded, so that its adapter is merged into its target.
        folder: must be empty, or not exist.

    Returns:
        The drafter's folder. Its target is named by the folder of the model.

    Raises:
        ArtifactError: the drafter has changed nothing in its target; or the folder holds something.
    """
    folder = Path(folder)
    if drafter is None or drafter.adapter is None:
        name = None if drafter is None else drafter.config.family_name()
        what = "no drafter" if name is None else f"{with_article(name)} drafter"
        raise ArtifactError(
            f"{what} changes nothing in its target, so there is nothing to merge; expected "
            "one that was trained together with its target (medusa2)."
        )
    check_is_free(folder)
    target: Any = drafter.target
    with new_folder(folder, "the merged model") as new:
        target.save_pretrained(new)
        if tokenizer is not None:
            tokenizer.save_pretrained(new)
        alone = drafter.without_adapter().bind(target)
        manifest = manifest_of(alone, tokenizer, target=str(folder), target_revision="")
        title = f"A {manifest.family} drafter for `{folder.name}`"
        card = model_card(manifest, title, _BODY, "Nothing was measured after merging.")
        save_drafter(alone, new / DRAFTER, manifest, card)
    return folder / DRAFTER
