"""The manifest of an artifact, the hashes in it, and checks of files and target against it."""

import hashlib
import json
import platform
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel, PreTrainedTokenizerBase

from ..core import ArtifactError, weight_of
from ..families import FAMILIES, family
from ..parts.adapter import ADAPTER_WEIGHTS
from .files import CONFIG, MANIFEST, PICKLE, WEIGHTS, pickled, read_json, unreadable

# Settings of a config.json with which transformers runs other code or reads other files.
_UNSAFE = ("auto_map", "transformers_weights", "quantization_config", "attn_implementation")


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that influence a result, as far as installed."""
    versions = {"python": platform.python_version()}
    for name in ("torch", "transformers", "tokenizers", "accelerate", "numpy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


@strict
@dataclass
class Manifest:
    """Where a drafter came from, and its measured results.

    Attributes:
        target: name or path of the target, as given to the training run; with an adapter, of the
            base model that the adapter changes.
        tokenizer_hash: empty when unknown.
        weights_sha256, adapter_sha256, adapter_base: of `model.safetensors` and the adapter's
            weights, and see `Adapter.digest`; empty without adapter. `save_drafter` sets them.
        origin: the checkpoint that it was converted from, `ORG/NAME@COMMIT` or a folder; empty for
            a drafter trained by headstart.
        recipe: the recipe that trained it, as plain data.
        metrics: measured results, such as tau.
    """

    family: str
    target: str
    target_fingerprint: str
    tokenizer_hash: str = ""
    weights_sha256: str = ""
    adapter_sha256: str = ""
    adapter_base: str = ""
    origin: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=library_versions)


def read_manifest(folder: Path) -> Manifest:
    """The manifest in an artifact's folder; an ArtifactError where it is missing or damaged."""
    path = folder / MANIFEST
    try:
        return Manifest(**read_json(path))
    except (TypeError, StrictDataclassError) as error:
        raise unreadable(path, error) from error


def fingerprint(target: PreTrainedModel) -> str:
    """sha256 of a target's embedding and norm tensors, rounded to bfloat16.

    It is the same in whichever of float64, float32 and bfloat16 the target is loaded.
    """
    digest = hashlib.sha256()
    layers = {"embedding": target.get_input_embeddings()}
    for name, module in target.named_modules():
        weight = getattr(module, "weight", None)
        if "norm" in type(module).__name__.lower() and isinstance(weight, nn.Parameter):
            layers[name] = module
    for name in sorted(layers):
        values = weight_of(layers[name]).detach().to("cpu", torch.bfloat16).contiguous()
        digest.update(f"{name}{tuple(values.shape)}".encode())
        digest.update(values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of a tokenizer's tokens and their ids."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def sha256(path: Path) -> str:
    """sha256 of a file's content, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    """Check an artifact's files, and return the file of weights.

    Raises:
        ArtifactError: one is missing, damaged, pickled, or names other code or files to load.
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
    for path, expected, missing in (
        (weights, manifest.weights_sha256, None),
        (folder / ADAPTER_WEIGHTS, manifest.adapter_sha256, ""),  # a drafter may have no adapter
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
