"""The artifact: a folder (or Hub repository) that holds a trained drafter and where it came from.

`config.json` (family and shapes), `model.safetensors`, `headstart.json` (manifest) and `README.md`
(model card). Nothing is pickled. The folder appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .core import ArtifactError, output_layer
from .drafter import Drafter, family

MANIFEST = "headstart.json"
WEIGHTS = "model.safetensors"


@dataclass
class Manifest:
    """Where a drafter came from and what it was measured to do.

    Attributes:
        family: the drafter's family.
        target: name or path of the target, as the training run was given it.
        target_fingerprint: see `fingerprint`.
        tokenizer_hash: sha256 of the target's token map; empty when unknown.
        weights_sha256: of `model.safetensors`, filled in by `save_drafter`.
        recipe: the recipe that trained it, as plain data.
        metrics: measured figures, such as tau.
        versions: library versions of the training run.
    """

    family: str
    target: str
    target_fingerprint: str
    tokenizer_hash: str = ""
    weights_sha256: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(
        default_factory=lambda: {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
    )


def fingerprint(target: PreTrainedModel) -> str:
    """sha256 of a target's embedding and norm tensors, rounded to bfloat16.

    The rounding makes it the same whether the target is loaded in float64, float32 or bfloat16.
    """
    digest = hashlib.sha256()
    tensors = {"embedding": cast(Tensor, target.get_input_embeddings().weight)}
    for name, module in target.named_modules():
        weight = getattr(module, "weight", None)
        if "norm" in type(module).__name__.lower() and isinstance(weight, nn.Parameter):
            tensors[name] = weight
    for name in sorted(tensors):
        values = tensors[name].detach().to("cpu", torch.bfloat16).contiguous()
        digest.update(f"{name}{tuple(values.shape)}".encode())
        digest.update(values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of the token map (every token and its id)."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def save_drafter(drafter: Drafter, folder: str | Path, manifest: Manifest, card: str = "") -> Path:
    """Write an artifact folder; an older one in its place goes only when the new is complete.

    Args:
        card: the model card, Markdown.

    Returns:
        The folder.
    """
    folder = Path(folder)
    staging = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    drafter.save_pretrained(staging)
    manifest = replace(manifest, weights_sha256=_sha256(staging / WEIGHTS))
    (staging / MANIFEST).write_text(json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8")
    if card:
        (staging / "README.md").write_text(card, encoding="utf-8")
    for file in staging.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    retired = folder.with_name(f".{folder.name}.retired")
    shutil.rmtree(retired, ignore_errors=True)
    if folder.exists():
        folder.rename(retired)
    staging.rename(folder)
    shutil.rmtree(retired, ignore_errors=True)
    return folder


def artifact_folder(name: str | Path) -> Path:
    """The local folder of an artifact: a path as it is, or a Hub repository once downloaded."""
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(
            snapshot_download(str(name), allow_patterns=["*.json", "*.safetensors", "README.md"])
        )
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ArtifactError(
            f"no drafter at {str(name)!r}: neither a folder nor a Hub repository that can be "
            "reached; check the name."
        ) from error


def read_manifest(name: str | Path) -> Manifest:
    """The manifest of an artifact.

    Raises:
        ArtifactError: there is none, or it cannot be read.
    """
    path = artifact_folder(name) / MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Manifest(**data)
    except FileNotFoundError:
        raise ArtifactError(
            f"{path.parent} holds no {MANIFEST}; expected a folder that headstart saved."
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
        raise ArtifactError(
            f"{path} cannot be read ({error}); restore the file or train again."
        ) from error


def load_drafter(
    name: str | Path,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **options: Any,
) -> Drafter:
    """Load an artifact and bind it to its target, on the target's device.

    Args:
        name: folder or Hub repository.
        target: the causal language model that the drafter was trained for.
        tokenizer: checked against the one the drafter was trained with, where given.
        options: passed to `from_pretrained`, such as `dtype`.

    Raises:
        ArtifactError: damaged files, or not the target or tokenizer that it was trained for.
    """
    folder = artifact_folder(name)
    manifest = read_manifest(folder)
    _check("target", manifest.target_fingerprint, fingerprint(target), folder, manifest.target)
    if tokenizer is not None and manifest.tokenizer_hash:
        _check(
            "tokenizer", manifest.tokenizer_hash, tokenizer_hash(tokenizer), folder, manifest.target
        )
    if not (folder / "config.json").is_file():
        raise ArtifactError(
            f"{folder} holds no config.json; restore it or download the drafter again."
        )
    weights = folder / WEIGHTS
    if not weights.is_file() or _sha256(weights) != manifest.weights_sha256:
        raise ArtifactError(
            f"{weights} is missing or not the file that was saved (its sha256 differs from the "
            "manifest's); restore it or download the drafter again."
        )
    cls, options = family(manifest.family), {"dtype": target.dtype, **options}
    loaded: Any = cls.from_pretrained(
        folder, local_files_only=True, output_loading_info=True, **options
    )
    drafter, report = loaded
    if wrong := [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]:
        raise ArtifactError(
            f"{weights} does not fit {folder / 'config.json'}: {wrong[0]} is missing, unknown or "
            "of another shape; restore both files."
        )
    device = output_layer(target).weight.device
    return drafter.to(device).eval().bind(target)  # type: ignore[arg-type]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(what: str, expected: str, found: str, folder: Path, name: str) -> None:
    if expected != found:
        raise ArtifactError(
            f"{folder} was trained for another {what}: expected fingerprint {expected[:12]} "
            f"({name}), found {found[:12]}; load the {what} it was trained for, or train a drafter "
            "for this one."
        )
