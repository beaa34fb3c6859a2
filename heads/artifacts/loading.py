"""Loads drafters by name: an artifact, with its adapter; another's drafter or model; `lookup`."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..core import ArtifactError, device_of, output_layer
from ..draft_model import DraftModel
from ..drafter import Drafter
from ..families import family
from ..parts.adapter import Adapter
from .files import (
    CONFIG,
    WEIGHTS,
    artifact_folder,
    check_files,
    check_target,
    is_foreign,
    is_weightless,
    read_manifest,
)
from .foreign_checkpoints import load_foreign
from .hub import split_revision
from .manifest import Manifest, tokenizer_hash


def load_drafter(
    name: str | Path,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    allow_pickle: bool = False,
    **options: Any,
) -> Drafter:
    """Load a drafter and bind it to its target, where the target's output layer runs.

    A drafter that was trained with its target (Medusa-2) changes the target that is passed: its
    adapter is merged into the weights, in place, and decoding has the adapted target's output.

    Args:
        name: an artifact's folder, or `ORG/NAME` or `ORG/NAME@REVISION` on the Hub; or those of a
            drafter that others trained, see `dialects`; or of any smaller causal language model
            with the target's tokenizer; or `lookup`, which has no weights.
        target: the causal language model that the drafter was trained for.
        tokenizer: checked against the one the drafter was trained with, where given; for a language
            model that headstart did not save, the target's own is loaded where it is not given.
        allow_pickle: read `pytorch_model.bin`, or another's file of heads, where there are no
            safetensors; tensors alone are unpickled.
        options: passed to `from_pretrained`, such as `dtype`; the default is the target's.

    Raises:
        ArtifactError: damaged files, or not the target or tokenizer that it was trained for.
    """
    device = device_of(output_layer(target))
    if is_weightless(name):
        cls = family(str(name))
        return cls(cls.config_class.for_target(target)).eval().bind(target)  # type: ignore[arg-type]
    options = {"dtype": target.dtype, **options}
    if is_foreign(name):
        found = load_foreign(name, target, allow_pickle, options)
        found = found or _load_model(str(name), target, tokenizer, options)
        return found.to(device).eval().bind(target)  # type: ignore[arg-type]
    folder = artifact_folder(name, allow_pickle)
    manifest = read_manifest(folder)
    check_target(manifest, target, tokenizer, folder)
    weights = check_files(folder, manifest, allow_pickle)
    cls = family(manifest.family)
    try:
        loaded: Any = cls.from_pretrained(
            folder,
            local_files_only=True,
            output_loading_info=True,
            use_safetensors=weights.name == WEIGHTS,
            weights_only=True,
            **options,
        )
    except torch.OutOfMemoryError:
        raise
    except UnpicklingError as error:
        raise ArtifactError(
            f"{weights} holds more than tensors, or is damaged, and is not read; ask for "
            "safetensors."
        ) from error
    except (RuntimeError, ValueError, StrictDataclassError) as error:
        # The weights are those that were saved, so it is the config that does not fit them.
        reason = " ".join(str(error).split())[:160]
        raise ArtifactError(
            f"{weights} cannot be read as {folder / CONFIG} describes it ({reason}); restore both "
            "files or train again."
        ) from error
    drafter, report = loaded
    if wrong := [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]:
        raise ArtifactError(
            f"{weights} does not fit {folder / CONFIG}: {wrong[0]} is missing, unknown or "
            "of another shape; restore both files."
        )
    drafter = drafter.to(device).eval().bind(target)  # type: ignore[arg-type]
    if drafter.adapter is not None:
        _adapt(drafter.adapter, target, manifest, folder)
    return drafter


def _adapt(adapter: Adapter, target: PreTrainedModel, manifest: Manifest, folder: Path) -> None:
    """Merge an artifact's adapter into the target, or leave the target as it was.

    Raises:
        ArtifactError: the target is adapted already, or the adapter is not the one for it.
    """
    adapter.attach(target)
    try:
        found, expected = adapter.digest(), manifest.adapter_base
        if found and expected and found != expected:
            raise ArtifactError(
                f"{folder} adapts {manifest.target}, and this target's layers have fingerprint "
                f"{found[:12]}, expected {expected[:12]}: it was adapted or trained further; load "
                "the target anew."
            )
        adapter.load(folder)
    except ArtifactError:
        adapter.detach()
        raise
    adapter.merge()


def _load_model(
    name: str,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    options: dict[str, Any],
) -> Drafter:
    """A causal language model that somebody else saved, as the draft model of a target."""
    repository, revision = (name, None) if Path(name).is_dir() else split_revision(name)
    place = {} if revision is None else {"revision": revision}
    try:
        own = AutoTokenizer.from_pretrained(repository, **place)
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{name} holds no tokenizer that can be loaded, so nobody knows whether its ids are "
            "the target's; save the tokenizer beside the model."
        ) from error
    if tokenizer is None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(target.name_or_path)
        except (OSError, ValueError) as error:
            raise ArtifactError(
                f"{name} is compared with the target by their tokenizers, and the target's was "
                "not found; pass tokenizer=…."
            ) from error
    assert own is not None and tokenizer is not None
    if tokenizer_hash(own) != tokenizer_hash(tokenizer):
        raise ArtifactError(
            f"{name} has another tokenizer than the target ({len(own)} tokens, expected those of "
            f"the target's {len(tokenizer)}); use a smaller model of the target's own family."
        )
    try:
        return DraftModel.from_pretrained(repository, use_safetensors=True, **place, **options)
    except torch.OutOfMemoryError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ArtifactError(
            f"{name} cannot be loaded as a causal language model ({reason}); expected one with "
            "weights in safetensors."
        ) from error
