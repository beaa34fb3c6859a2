"""The manifest of an artifact, and the hashes that identify its target, tokenizer and files."""

import hashlib
import json
import logging
import platform
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError

from ..core import brief
from .files import MANIFEST, read_json, unreadable

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..drafter import Drafter

logger = logging.getLogger(__name__)


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that influence a result, as far as installed."""
    versions = {"python": platform.python_version()}
    for name in ("torch", "transformers", "tokenizers", "accelerate", "numpy"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


@strict
@dataclass
class Manifest:
    """Where a drafter came from, and its measured results.

    Attributes:
        target: name or path of the target, as given to the training run; with an adapter, of the
            base model that the adapter changes.
        target_revision: the commit of a target from the Hub; empty for any other.
        tokenizer_hash: empty when unknown.
        weights_sha256, adapter_sha256, adapter_base: of `model.safetensors` and the adapter's
            weights, and see `Adapter.digest`; empty without adapter. `save_drafter` sets them.
        origin: the checkpoint that it was converted from, `ORG/NAME@COMMIT` or a folder; empty for
            a drafter trained by headstart.
        recipe: the recipe that trained it, as plain data.
        metrics: measured results, such as tau.
        trained: what training saw, see `headstart.train.provenance`; empty where nobody noted it.
    """

    family: str
    target: str
    target_fingerprint: str
    tokenizer_hash: str = ""
    weights_sha256: str = ""
    adapter_sha256: str = ""
    adapter_base: str = ""
    origin: str = ""
    target_revision: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=library_versions)
    trained: dict[str, Any] = field(default_factory=dict)


def manifest_of(
    drafter: "Drafter", tokenizer: "PreTrainedTokenizerBase | None", **fields: Any
) -> Manifest:
    """That of a bound drafter that no recipe trained; `fields` come before what is found."""
    target = drafter.target
    found = {
        "family": drafter.config.family_name(),
        "target": str(target.name_or_path),
        "target_fingerprint": fingerprint(target),
        "target_revision": commit_of(target),
        "tokenizer_hash": tokenizer_hash(tokenizer) if tokenizer is not None else "",
    }
    return Manifest(**(found | fields))


def read_manifest(folder: Path) -> Manifest:
    """The manifest in an artifact's folder, without what a newer headstart says beyond it.

    Raises:
        ArtifactError: it is missing or damaged, or lacks a field.
    """
    path = folder / MANIFEST
    found, every = read_json(path), fields(Manifest)
    known = {each.name for each in every}
    required = [e.name for e in every if e.default is MISSING and e.default_factory is MISSING]
    if missing := [name for name in required if name not in found]:
        raise unreadable(path, f"it has no {missing[0]}")
    if more := sorted(found.keys() - known):
        logger.warning(
            "%s was written by a newer headstart: what it says of %s is ignored.",
            path, brief(", ".join(map(repr, more))),
        )  # fmt: skip
    try:
        return Manifest(**{name: found[name] for name in found if name in known})
    except StrictDataclassError as error:
        raise unreadable(path, error) from error


def commit_of(target: "PreTrainedModel") -> str:
    """The commit of a target from the Hub; empty for any other."""
    return getattr(target.config, "_commit_hash", None) or ""


def fingerprint(target: "PreTrainedModel") -> str:
    """sha256 of a target's embedding and norm tensors, rounded to bfloat16.

    It is the same in whichever of float64, float32 and bfloat16 the target is loaded.
    """
    import torch

    from ..core import weight_of

    digest = hashlib.sha256()
    layers: dict[str, Any] = {"embedding": target.get_input_embeddings()}
    for name, module in target.named_modules():
        weight = getattr(module, "weight", None)
        if "norm" in type(module).__name__.lower() and isinstance(weight, torch.nn.Parameter):
            layers[name] = module
    for name in sorted(layers):
        values = weight_of(layers[name]).detach().to("cpu", torch.bfloat16).contiguous()
        digest.update(f"{name}{tuple(values.shape)}".encode())
        digest.update(values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def tokenizer_hash(tokenizer: "PreTrainedTokenizerBase") -> str:
    """sha256 of a tokenizer's tokens and their ids."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def sha256(path: Path) -> str:
    """sha256 of a file's content, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
