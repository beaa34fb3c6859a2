"""Hydra heads of their authors (github.com/zankner/Hydra).

Head i, from 0, has blocks `hydra_mlp.{i}.{j}` and an output layer `hydra_lm_head.{i}`; with the
prefix, a one-layer model, every other place of both is a dropout's.
"""

import re
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ...checkpoint import Found
from ...core import ArtifactError, output_rows
from ..own_layers import like_published
from .checkpoint import Checkpoint, cannot_be_written, refuse_trimmed

_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.((?:linear|res_connection)\.(?:weight|bias))")
_OUTPUT = re.compile(r"hydra_lm_head\.(\d+)\.(?:1\.)?(weight|bias)")
_UNUSED = re.compile(r"prefix_embeding_layer\.embed_tokens\.weight|.*\.rotary_emb\..*")
"""Names in a checkpoint of the authors; the last are never read, or follow from a config."""

_INSIDE = "hydra_head."  # what the names of heads begin with in a whole model's weights


def hydra(config: dict[str, Any], tensors: dict[str, Tensor]) -> Found | None:
    """The authors' heads, with or without the prefix; see `StoredDrafter.from_checkpoint`.

    The blocks after a head's first are one under several names, of which a file may hold one alone;
    here they are copies. The prefix layer has the target's own config.
    """
    if inside := [name for name in tensors if name.startswith(_INSIDE)]:
        tensors = {name.removeprefix(_INSIDE): tensors[name] for name in inside}
    if not any(name.startswith("hydra_mlp.") for name in tensors):
        return None
    arch, offset = config.get("hydra_head_arch", "mlp"), config.get("hidden_state_offset", 0)
    prefix = any(name.startswith("prefix_embeding_layer.") for name in tensors)
    grounded = any(".res_connection." in name for name in tensors)
    if arch not in ("mlp", "prefix-mlp") or not grounded or offset:
        raise ArtifactError(
            f"its hydra_head_arch is {arch!r}, grounded_heads {grounded} and "
            f"hidden_state_offset {offset}; expected 'mlp' or 'prefix-mlp', True and 0."
        )
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if block := _BLOCK.fullmatch(name):
            head, place, part = block.groups()
            found[f"mlp.{head}.{int(place) // (2 if prefix else 1)}.{part}"] = tensor
        elif output := _OUTPUT.fullmatch(name):
            found[f"output.{output[1]}.{output[2]}"] = tensor
        elif name == "input_embed_fn.weight":
            found["embed_tokens.weight"] = tensor
        elif not _UNUSED.fullmatch(name):
            found[name.replace("prefix_embeding_layer.", "prefix.")] = tensor
    heads = sum(name.endswith(".res_connection.weight") for name in found)
    layers = sum(re.fullmatch(r"mlp\.0\.\d+\.linear\.weight", name) is not None for name in found)
    if layers == 2:
        layers = max(layers, config.get("hydra_num_layers", layers))
    for head, layer, part in product(range(heads), range(2, layers), ("weight", "bias")):
        if (second := found.get(f"mlp.{head}.1.linear.{part}")) is not None:
            found[f"mlp.{head}.{layer}.linear.{part}"] = second.clone()
    known: dict[str, Any] = {"heads": heads, "layers": layers, "prefix": prefix}
    known |= {"output": "own", "embedding": "own" if "embed_tokens.weight" in found else "shared"}
    if (output := found.get("output.0.weight")) is not None:
        known |= {"vocab_size": output.shape[0], "hidden_size": output.shape[1]}
    return known, found


def _write_hydra(drafter: Any) -> Checkpoint:
    """A Hydra drafter by its authors' names; with the target's output layer, if that is shared."""
    own, found = drafter.config, dict(drafter.state_dict())
    if own.prefix and own.layer != like_published(drafter.target):
        raise cannot_be_written(
            "the authors' code", "its prefix layer has other settings than its target's layers",
            "train it again: a new one has the target's",
        )  # fmt: skip
    refuse_trimmed(drafter, "the authors' code", "train it with drafter.output=own or shared")
    step, first = (2, 1) if own.prefix else (1, 0)
    tensors: dict[str, Tensor] = {}
    for head, block in product(range(own.heads), range(own.layers)):
        for part in ("linear", "res_connection") if block == 0 else ("linear",):
            for kind in ("weight", "bias"):
                tensor = found[f"mlp.{head}.{block}.{part}.{kind}"]
                if block == 0 and kind == "weight":  # they read embeddings without a scale
                    size, tensor = own.hidden_size, tensor.clone()
                    tensor[:, size:] *= own.embedding_scale
                tensors[f"hydra_mlp.{head}.{step * block + first}.{part}.{kind}"] = tensor
    for head, block, kind in product(range(own.heads), range(2, own.layers), ("weight", "bias")):
        second = found[f"mlp.{head}.1.linear.{kind}"]
        if not torch.equal(second, found[f"mlp.{head}.{block}.linear.{kind}"]):
            raise cannot_be_written(
                "the authors' code", "its blocks after the first differ, and theirs are one block",
                "train it with drafter.layers=2 or fewer",
            )  # fmt: skip
    shared = output_rows(drafter.target).to(drafter.dtype)
    for head in range(own.heads):
        name = f"hydra_lm_head.{head}" + (".1" if own.prefix else "")
        tensors[f"{name}.weight"] = found.get(f"output.{head}.weight", shared)
        none = shared.new_zeros(own.vocab_size)
        tensors[f"{name}.bias"] = found.get(f"output.{head}.bias", none)
    if own.embedding == "own":
        tensors["input_embed_fn.weight"] = found["embed_tokens.weight"]
    for name, tensor in found.items():
        if name.startswith("prefix."):
            tensors[name.replace("prefix.", "prefix_embeding_layer.", 1)] = tensor
    config = {
        "hydra_num_heads": own.heads, "hydra_num_layers": own.layers, "grounded_heads": True,
        "hydra_head_arch": "prefix-mlp" if own.prefix else "mlp", "hidden_state_offset": 0,
        "base_model_name_or_path": drafter.target.name_or_path,
    }  # fmt: skip
    return Checkpoint(config, tensors, "hydra_lm_head.safetensors")


HYDRA = {"original": _write_hydra}
"""What writes a drafter in each format."""
