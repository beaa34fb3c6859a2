"""Loading of drafters from what a user names: an artifact, another trainer's checkpoint, …"""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..core import ArtifactError, device_of, output_layer
from ..draft_model import DraftModel
from ..drafter import Drafter
from ..families import family
from ..parts.adapter import Adapter
from ..parts.translation import TRANSLATION
from ..translated_draft_model import TranslatedDraftModel
from .files import CONFIG, MALFORMED, WEIGHTS, brief, read_header
from .foreign_checkpoints import load_checkpoint
from .settings import language_model_config
from .shapes import check_declared
from .source import DrafterSource, SourceKind


def load_drafter(
    name: str | Path | DrafterSource,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    allow_pickle: bool = False,
    other_target: bool = False,
    **options: Any,
) -> Drafter:
    """Load a drafter and bind it to its target, on the device of the target's output layer.

    A drafter that was trained together with its target (Medusa-2) changes the target that is
    passed: its adapter is merged into the weights, in place, and the adapted target is decoded.

    Args:
        name: the folder, or `ORG/NAME` or `ORG/NAME@REVISION` on the Hub, of an artifact, of a
            drafter that another trainer saved (see `foreign_checkpoints`), or of a smaller causal
            language model, also with another tokenizer; or a family without weights, such as
            `lookup`, `mtp` for the module in the target's own files, or `early_exit` for its first
            layers; or a `DrafterSource`.
        tokenizer: checked against the one that the drafter was trained with, if given. A language
            model needs one to compare with its own: the target's is loaded where it is not given.
        allow_pickle: see `DrafterSource`; a source that is passed has its own.
        other_target: load an artifact for a target or tokenizer that it was not trained with, to
            measure how much that costs.
        options: passed to `from_pretrained`, such as `dtype`, by default the target's.

    Raises:
        ArtifactError: damaged files, or not the target or tokenizer that it was trained for.
    """
    source = DrafterSource.of(name, allow_pickle)
    device, options = device_of(output_layer(target)), {"dtype": target.dtype, **options}
    if source.kind in (SourceKind.WEIGHTLESS, SourceKind.IN_TARGET):
        return source.of_target(target).to(device).eval().bind(target)  # type: ignore[arg-type]
    if source.kind is SourceKind.CHECKPOINT:
        drafter = load_checkpoint(source, target, tokenizer, options)
    else:
        if not other_target:
            source.check_target(target, tokenizer)
        drafter = _load_artifact(source, options)
    drafter = drafter.to(device).eval().bind(target)  # type: ignore[arg-type]
    if source.kind is SourceKind.ARTIFACT and drafter.adapter is not None:
        _merge_adapter(drafter.adapter, target, source)
    return drafter


def _load_artifact(source: DrafterSource, options: dict[str, Any]) -> Drafter:
    folder = source.folder
    weights = source.check_files()
    check_declared(source, weights)
    kind: Any = family(source.manifest.family)
    if kind is DraftModel and is_translated(source):
        kind = TranslatedDraftModel
    options |= {"local_files_only": True, "weights_only": True}
    options["use_safetensors"] = weights.name == WEIGHTS
    if kind.saved_as_language_model:
        options["config"], _ = language_model_config(folder)  # `inspect` names what is left out
    try:
        loaded: Any = kind.from_pretrained(folder, output_loading_info=True, **options)
    except torch.OutOfMemoryError:
        raise
    except UnpicklingError as error:
        raise ArtifactError(
            f"{weights} holds more than tensors, or is damaged, and is not read; ask for "
            "safetensors."
        ) from error
    except (*MALFORMED, StrictDataclassError) as error:
        # The weights are those that were saved, so it is the config that does not fit them.
        raise ArtifactError(
            f"{weights} cannot be read as {folder / CONFIG} describes it ({brief(error)}); restore "
            "both files or train again."
        ) from error
    drafter, report = loaded
    if wrong := [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]:
        raise ArtifactError(
            f"{weights} does not fit {folder / CONFIG}: {wrong[0]} is missing, unknown or "
            "of another shape; restore both files."
        )
    return drafter


def is_translated(source: DrafterSource) -> bool:
    """Whether an artifact is a draft model with a tokenizer of its own."""
    weights = source.folder / WEIGHTS
    return weights.is_file() and TRANSLATION[0] in read_header(weights)


def _merge_adapter(adapter: Adapter, target: PreTrainedModel, source: DrafterSource) -> None:
    """Merge an artifact's adapter into the target; after an error the target is as before."""
    adapter.attach(target)
    try:
        found, expected = adapter.digest(), source.manifest.adapter_base
        if found and expected and found != expected:
            raise ArtifactError(
                f"{source.folder} adapts {source.manifest.target}, and this target's layers have "
                f"fingerprint {found[:12]}, expected {expected[:12]}: it was adapted or trained "
                "further; load the target anew."
            )
        adapter.load(source.folder)
    except ArtifactError:
        adapter.detach()
        raise
    adapter.merge()
