"""The manifest of a drafter: where it came from, and what tells one target from another."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..core import weight_of


@dataclass
class Manifest:
    """Where a drafter came from and what it was measured to do.

    Attributes:
        family: the drafter's family.
        target: name or path of the target, as the training run was given it.
        target_fingerprint: see `fingerprint`.
        tokenizer_hash: sha256 of the target's token map; empty when unknown.
        weights_sha256: of `model.safetensors`, filled in by `save_drafter`.
        adapter_sha256: of the adapter's weights, likewise; empty without adapter. The drafter then
            drafts for the target with that adapter, and the target named here is its base.
        adapter_base: see `Adapter.digest`, likewise.
        origin: the checkpoint of others that it was made from, with its commit where it has one;
            empty for what was trained here.
        recipe: the recipe that trained it, as plain data.
        metrics: measured figures, such as tau.
        versions: library versions of the training run.
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
    """sha256 of the token map (every token and its id)."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def sha256(path: Path) -> str:
    """The sha256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
