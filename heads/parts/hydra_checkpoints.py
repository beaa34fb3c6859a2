"""Hydra heads as their authors publish them (github.com/zankner/Hydra)."""

import re
from itertools import product
from typing import Any

from torch import Tensor

from ..checkpoint import Found
from ..core import ArtifactError

_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.((?:linear|res_connection)\.(?:weight|bias))")
_OUTPUT = re.compile(r"hydra_lm_head\.(\d+)\.(?:1\.)?(weight|bias)")
_BORROWED = re.compile(r"input_embed_fn\.weight|.*\.embed_tokens\.weight|.*\.rotary_emb\..*")
"""Names in a checkpoint of the authors; the last are the target's, or follow from its config."""


def hydra(config: dict[str, Any], tensors: dict[str, Tensor]) -> Found | None:
    """The authors' heads, with or without the prefix; see `StoredDrafter.from_checkpoint`.

    Head i, from 0, has blocks `hydra_mlp.{i}.{j}` and an output layer `hydra_lm_head.{i}`; with
    the prefix, every other place of both is a dropout's. There the blocks after a head's first
    are one and the same under several names, of which a file may hold one alone; here they are
    copies. The prefix is a whole one-layer model, with an embedding that nothing reads.
    """
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
        elif not _BORROWED.fullmatch(name):
            found[name.replace("prefix_embeding_layer.", "prefix.")] = tensor
    heads = sum(name.endswith(".res_connection.weight") for name in found)
    layers = sum(re.fullmatch(r"mlp\.0\.\d+\.linear\.weight", name) is not None for name in found)
    if layers == 2:
        layers = max(layers, config.get("hydra_num_layers", layers))
    for head, layer, part in product(range(heads), range(2, layers), ("weight", "bias")):
        second = found.get(f"mlp.{head}.1.linear.{part}")
        if second is not None:
            found.setdefault(f"mlp.{head}.{layer}.linear.{part}", second)
    known = {"heads": heads, "layers": layers, "prefix": prefix, "output": "own"}
    if (output := found.get("output.0.weight")) is not None:
        known |= {"vocab_size": output.shape[0], "hidden_size": output.shape[1]}
    return known, found
