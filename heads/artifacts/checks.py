"""Checks of an artifact before it is loaded or pushed: its files, and the target it belongs to."""

from __future__ import annotations

from pathlib import Path

from transformers import CONFIG_MAPPING, PreTrainedModel, PreTrainedTokenizerBase

from ..core import ArtifactError
from ..families import FAMILIES, family
from ..parts.adapter import ADAPTER_WEIGHTS
from .files import CONFIG, MANIFEST, PICKLE, WEIGHTS, pickled, read_json
from .manifest import Manifest, fingerprint, sha256, tokenizer_hash

# Settings of a config.json with which transformers runs other code or reads other files.
_UNSAFE = ("auto_map", "transformers_weights", "quantization_config", "attn_implementation")


def check_target(
    manifest: Manifest,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
) -> None:
    """Refuse a target, or a tokenizer where one is given, that the drafter was not trained for.

    Raises:
        ArtifactError: the fingerprints differ.
    """
    pairs = [("target", manifest.target_fingerprint, fingerprint(target))]
    if tokenizer is not None and manifest.tokenizer_hash:
        pairs.append(("tokenizer", manifest.tokenizer_hash, tokenizer_hash(tokenizer)))
    for what, expected, found in pairs:
        if expected != found:
            raise ArtifactError(
                f"{folder} was trained for another {what}: expected fingerprint {expected[:12]} "
                f"({manifest.target}), found {found[:12]}; load the {what} it was trained for, or "
                "train a drafter for this one."
            )


def check_files(folder: Path, manifest: Manifest, allow_pickle: bool = False) -> Path:
    """Check that an artifact's files are complete, undamaged, and load no other code or files.

    Returns:
        The file of weights.

    Raises:
        ArtifactError: a file is missing, damaged, pickled, or names code or files to load.
    """
    _check_config(folder, manifest.family)
    weights = folder / WEIGHTS
    if not weights.is_file():
        if allow_pickle and (folder / PICKLE).is_file():
            weights = folder / PICKLE
        elif pickles := pickled(path.name for path in folder.iterdir()):
            raise ArtifactError(
                f"{folder} holds no {WEIGHTS} but {pickles[0]}, a pickle, which can run any code; "
                f"ask for safetensors, or trust a {PICKLE} with allow_pickle=True."
            )
    adapter = folder / ADAPTER_WEIGHTS
    for path, expected, missing in (
        (weights, manifest.weights_sha256, None),
        (adapter, manifest.adapter_sha256, ""),  # the manifest of a drafter without adapter
    ):
        if (sha256(path) if path.is_file() else missing) != expected:
            raise ArtifactError(
                f"{path} is missing or not the file that was saved (its sha256 differs from the "
                "manifest's); restore it or download the drafter again."
            )
    return weights


def _check_config(folder: Path, name: str) -> None:
    config = read_json(folder / CONFIG)
    found, expected = config.get("model_type"), f"headstart_{name}"
    if name in FAMILIES and family(name).saved_as_language_model:
        expected = found if found in CONFIG_MAPPING else "one of transformers' own"
    if found != expected:
        raise ArtifactError(
            f"{folder / CONFIG} is of model type {found!r}, expected {expected!r} as {MANIFEST} "
            "says; restore both files."
        )
    if unsafe := [key for key in _UNSAFE if key in config]:
        raise ArtifactError(
            f"{folder / CONFIG} sets {unsafe[0]}, which can load other code or files; a drafter "
            "needs none: do not use it, or remove the entry."
        )
