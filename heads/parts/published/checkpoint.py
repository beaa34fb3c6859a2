"""What a written checkpoint consists of, and the configs that describe layers in one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core import ArtifactError, weight_of


@dataclass(frozen=True)
class Checkpoint:
    """A drafter as another project saves it: a config, and tensors by that project's names."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    file: str = "model.safetensors"
    token_map: tuple[int, ...] = ()
    """The target ids of a trimmed vocabulary, if the engine reads them from a file of their own."""


@dataclass(frozen=True)
class TargetModule:
    """A drafter as the files of its own target hold one.

    Attributes:
        tensors: by their names there.
        prefix: what the names of all its tensors begin with, and of those that they replace.
        settings: of the language model's config, by which an engine finds the module.
        top: whether the engine looks for them at the top of the whole model's config.
    """

    tensors: dict[str, Tensor]
    prefix: str
    settings: dict[str, Any]
    top: bool = False


def embedding_scale(embedding: Any) -> float:
    """What a target's embeddings are multiplied by where they are read; 1 for most targets."""
    rows, ids = weight_of(embedding)[:8], torch.arange(8)
    return (embedding(ids.to(rows.device)).float() / rows.float()).nanmedian().item()


def scaled_embeddings(drafter: Any) -> float | None:
    """The scale of the target's embeddings as a drafter reads them; None where they have none."""
    with torch.no_grad():
        scale = embedding_scale(drafter.target.get_input_embeddings())
    return None if abs(scale - 1) < 0.01 else scale


def cannot_be_written(engine: str, reason: str, remedy: str) -> ArtifactError:
    """The error for a drafter that an engine would run wrongly, or not at all."""
    return ArtifactError(f"{engine} cannot run this drafter: {reason}; {remedy}.")


def refuse_trimmed(drafter: Any, engine: str, remedy: str) -> None:
    """An ArtifactError for a trimmed vocabulary, in a format that has none."""
    own = drafter.config
    if own.draft_vocab_size:
        what = f"it knows {own.output_size:,} of {own.vocab_size:,} tokens"
        raise cannot_be_written(engine, what, remedy)


def other_activation(layer: Mapping[str, Any]) -> str:
    """How a layer's MLP differs from those of the engines, which know SiLU alone; empty if not."""
    name = layer.get("hidden_act", "silu")
    return "" if name == "silu" else f"its MLP has the activation {name}, expected silu"


def turns_a_share(layer: Mapping[str, Any]) -> str:
    """How rotary positions differ from those of whole heads; empty if not."""
    share = layer.get("partial_rotary_factor", 1)
    what = f"its rotary positions turn {share:g} of each head (partial_rotary_factor)"
    return "" if share == 1 else what


_OF_MOST_POSITIONS = ("dynamic", "longrope")
"""Kinds of rotary positions whose angles depend on `max_position_embeddings`."""


def llama_config(drafter: Any, layer: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a Llama of the drafter's layers, or of a Qwen3 where it has that model's norms.

    Args:
        drafter: bound, so that vocabulary, token ids and, where no angle depends on it, the number
            of positions are its target's.
        layer: see `layer_like`.
    """
    target = drafter.target.config.get_text_config(decoder=True)
    sizes = {n: layer[n] for n in layer if not n.startswith("rope_") and n != "qk_norm"}
    if window := layer.get("sliding_window"):
        sizes |= {"use_sliding_window": True, "sliding_window": window}
    rope, most = layer.get("rope_scaling") or {}, target.max_position_embeddings
    if rope.get("rope_type") in _OF_MOST_POSITIONS:
        most = layer.get("max_position_embeddings") or most
    return {
        "model_type": "qwen3" if layer.get("qk_norm") else "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        **sizes,
        "vocab_size": drafter.config.vocab_size,
        "max_position_embeddings": most,
        "rope_theta": layer["rope_theta"],
        "rope_scaling": layer.get("rope_scaling"),
        "attention_bias": layer.get("attention_bias", False),
        "tie_word_embeddings": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
        "torch_dtype": str(drafter.dtype).removeprefix("torch."),
    }


def speculators_config(drafter: Any, kind: str, layer: dict[str, Any]) -> dict[str, Any]:
    """What is the same in the configs of all speculators, around that of the layer."""
    target = drafter.target
    proposal = {"proposal_type": "greedy", "speculative_tokens": drafter.config.depths}
    return {
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {
                "name_or_path": target.name_or_path,
                "architectures": list(target.config.architectures or [type(target).__name__]),
            },
        },
        "transformer_layer_config": layer,
        "torch_dtype": layer["torch_dtype"],
    }
