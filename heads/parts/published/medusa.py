"""Medusa heads of their authors (github.com/FasterDecoding/Medusa), and as vLLM reads them."""

import re
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ...checkpoint import Found
from ...core import ArtifactError, output_rows
from .checkpoint import Checkpoint, cannot_be_written, refuse_trimmed
from .vocabulary import put_vocabulary

_INSIDE = "medusa_head."  # what the names of heads begin with in a whole model's weights


@dataclass(frozen=True)
class _Layout:
    """Names of tensors; k numbers the heads, l their blocks, n is how many blocks there are."""

    block: str
    output: str

    def blocks(self, heads: int, layers: int, part: str) -> list[str]:
        """The names of all blocks' weights or biases, block by block."""
        places = [(k, layer) for layer in range(layers) for k in range(heads)]
        return [self.block.format(k=k, l=layer, part=part) for k, layer in places]

    def outputs(self, heads: int, layers: int) -> list[str]:
        return [self.output.format(k=k, n=layers) for k in range(heads)]


_AUTHORS = _Layout("{k}.{l}.linear.{part}", "{k}.{n}.weight")
_VLLM = _Layout("blocks.{k}.layers.{l}.{part}", "lm_heads.{k}.weight")


def medusa(config: dict[str, Any], tensors: dict[str, Tensor]) -> Found | None:
    """Medusa heads of either layout; the authors' may stand inside of their target.

    The authors' first layout has an output layer for each head, and their second none: all heads
    use the target's. How many heads and blocks there are is counted: the config of a published
    checkpoint of five heads says two. Where vLLM's heads have one output layer together
    (`original_lm_head`), each gets a copy of it.
    """
    inside = [name for name in tensors if name.startswith(_INSIDE)]
    found = {name.removeprefix(_INSIDE): tensors[name] for name in inside or tensors}
    layout = next(
        (each for each in (_AUTHORS, _VLLM) if each.blocks(1, 1, "weight")[0] in found), None
    )
    if layout is None:
        return None
    count = sum(layout.blocks(k + 1, 1, "weight")[-1] in found for k in range(len(found)))
    layers = sum(layout.blocks(1, n + 1, "weight")[-1] in found for n in range(len(found)))
    if layout is _AUTHORS and layers == 1:
        layers = _fill(config, found, count, bool(inside))
    blocks = {part: layout.blocks(count, layers, part) for part in ("weight", "bias")}
    outputs, ids = layout.outputs(count, layers), found.pop("token_map", None)
    if layout is _VLLM:
        if (one := found.pop("lm_head.weight", found.get(outputs[0]))) is not None:
            found |= dict.fromkeys(outputs, one) if config.get("original_lm_head") else {}
        for weight, bias in zip(*blocks.values(), strict=True):
            if weight in found:
                found.setdefault(bias, torch.zeros_like(found[weight][:, 0]))
    outputs = outputs if outputs[0] in found else []
    if odd := sorted(found.keys() ^ {*blocks["weight"], *blocks["bias"], *outputs}):
        raise ArtifactError(
            f"of {count} heads of {layers} blocks each {odd[0]} is missing or one too many; "
            "expected heads that are alike."
        )
    stacked = {
        part: torch.stack([found[name] for name in names]).unflatten(0, (layers, count))
        for part, names in blocks.items()
    }  # [L, K, D, D] and [L, K, D]
    known: dict[str, Any] = {"heads": count, "layers": layers}
    known |= {"output": "shared", "hidden_size": stacked["bias"].shape[-1]}
    if outputs:
        stacked["output"] = torch.stack([found[name] for name in outputs])  # [K, Vd, D]
        known |= {"output": "own", "vocab_size": stacked["output"].shape[1]}
    if ids is not None:
        known |= _trim(config, stacked, ids.long())
    return known, stacked


def _fill(config: dict[str, Any], found: dict[str, Tensor], count: int, inside: bool) -> int:
    """Add the blocks that a file leaves out because they are the first one under another name.

    All blocks of a head are one in the authors' code. An output layer stands behind the last one;
    where there is none, the config of a whole model says how many there are.
    """
    places = (int(n[1]) for name in found if (n := re.fullmatch(r"0\.(\d+)\.weight", name)))
    layers = next(places, config.get("medusa_num_layers", 1) if inside else 1)
    for k, layer, part in product(range(count), range(1, layers), ("weight", "bias")):
        first = found[_AUTHORS.block.format(k=k, l=0, part=part)]
        found.setdefault(_AUTHORS.block.format(k=k, l=layer, part=part), first)
    return layers


def _trim(config: dict[str, Any], stacked: dict[str, Tensor], ids: Tensor) -> dict[str, Any]:
    """Keep the rows of vLLM's `token_map` [Vd], in ascending order; returns the config's fields."""
    order = ids.argsort()
    rows = order if stacked["output"].shape[1] == len(ids) else ids[order]
    stacked["output"] = stacked["output"][:, rows]
    known = put_vocabulary(stacked, ids[order])
    return known | {"vocab_size": config.get("vocab_size", int(ids.max()) + 1)}


def _write(drafter: Any, form: str) -> Checkpoint:
    """Medusa heads in a layout."""
    own, found = drafter.config, drafter.state_dict()
    if drafter.adapter is not None:
        raise cannot_be_written(
            form, "its target was adapted together with it",
            "write both with headstart merge, and export what that writes",
        )  # fmt: skip
    remedy = "export the drafter that it was trimmed from, or train one with drafter.output=own"
    refuse_trimmed(drafter, form, f"{remedy} or shared")  # vLLM has a field for it, and fails
    layout = _VLLM if form == "vllm" else _AUTHORS
    alike = (torch.equal(block, found[p][0]) for p in ("weight", "bias") for block in found[p])
    if layout is _AUTHORS and not all(alike):
        raise cannot_be_written(
            "the authors' code", "its blocks differ, and theirs are one block",
            "train it with drafter.layers=1, or export it to vllm",
        )  # fmt: skip
    tensors = {}
    for part in ("weight", "bias"):
        names = layout.blocks(own.heads, own.layers, part)
        tensors |= dict(zip(names, found[part].flatten(0, 1), strict=True))
    outputs = layout.outputs(own.heads, own.layers)
    if (output := found.get("output")) is not None:
        tensors |= dict(zip(outputs, output, strict=True))
    if form == "vllm":
        if output is None:  # vLLM does not share the target's
            tensors[outputs[0]] = output_rows(drafter.target).to(drafter.dtype)
        config = {
            "architectures": ["MedusaModel"], "model_type": "medusa",
            "hidden_size": own.hidden_size, "vocab_size": own.vocab_size,
            "truncated_vocab_size": own.vocab_size, "num_heads": own.heads,
            "num_hidden_layers": own.layers, "medusa_fc_bias": True,
            "original_lm_head": output is None,
            "torch_dtype": str(drafter.dtype).removeprefix("torch."),
        }  # fmt: skip
        return Checkpoint(config, tensors)
    config = {
        "medusa_num_heads": own.heads, "medusa_num_layers": own.layers,
        "base_model_name_or_path": drafter.target.name_or_path,
    }  # fmt: skip
    config |= {"version": "2"} if output is None else {}
    return Checkpoint(config, tensors, "medusa_lm_head.safetensors")


MEDUSA = {form: partial(_write, form=form) for form in ("vllm", "original")}
"""What writes a drafter in each format."""
