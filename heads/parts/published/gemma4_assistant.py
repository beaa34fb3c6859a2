"""The drafters that Google publishes for Gemma 4, `google/gemma-4-…-it-assistant`."""

from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig

from ...checkpoint import Found
from ...core import ArtifactError, brief
from ...core.errors import MALFORMED
from ...core.unsafe_settings import unsafe_settings

_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
_TABLE, _OUTPUT, _MASKED = "model.embed_tokens.weight", "lm_head.weight", "masked_embedding."
_ORDER = f"{_MASKED}token_ordering"


def gemma4_assistant(config: dict[str, Any], tensors: dict[str, Tensor]) -> Found | None:
    """The authors' checkpoints; `rope_parameters` among the fields are for `check_rotary`."""
    if config.get("model_type") not in _TYPES or "pre_projection.weight" not in tensors:
        return None
    inner = config.get("text_config")
    if not isinstance(inner, dict) or list(unsafe_settings(inner)):
        raise ArtifactError(
            "its config has no text_config that can be used; restore the one that was published."
        )
    try:
        made: Any = AutoConfig.for_model(**inner)
    except (*MALFORMED, StrictDataclassError) as error:
        raise ArtifactError(
            f"its text_config describes no layers of Gemma 4 ({brief(error, 100)}); restore the "
            "one that was published."
        ) from error
    found = dict(tensors)
    table = found.pop(_TABLE, None)  # which no draft reads, since tokens are the target's
    if _OUTPUT not in found and table is not None:
        found[_OUTPUT] = table
    ordered = bool(config.get("use_ordered_embeddings"))
    if not ordered:
        found = {name: each for name, each in found.items() if not name.startswith(_MASKED)}
    elif _ORDER in found:
        found[_ORDER] = _ids(found[_ORDER], len(found[_OUTPUT]))
    names = [f"model.layers.{number}.self_attn" for number in range(len(made.layer_types))]
    sizes = [len(found[f"{name}.q_norm.weight"]) for name in names]
    known = {
        "hidden_size": len(found["post_projection.weight"]), "vocab_size": len(found[_OUTPUT]),
        "kinds": list(made.layer_types), "width": len(found["model.norm.weight"]),
        "inner_dim": len(found["model.layers.0.mlp.gate_proj.weight"]),
        "query_heads": len(found[f"{names[0]}.q_proj.weight"]) // sizes[0],
        "head_dims": dict(zip(made.layer_types, sizes, strict=True)),
        "window": made.sliding_window, "eps": made.rms_norm_eps,
        "activation": made.hidden_activation, "rope_parameters": made.rope_parameters,
    }  # fmt: skip
    if ordered:
        known |= {
            "centroids": config.get("num_centroids", 2048),
            "top_centroids": config.get("centroid_intermediate_top_k", 32),
        }
    return known, found


def _ids(order: Tensor, vocabulary: int) -> Tensor:
    """The ids of tokens, group by group, as they are read by; an ArtifactError for others."""
    first, last = order.aminmax()
    if order.is_floating_point() or not 0 <= first <= last < vocabulary:
        raise ArtifactError(
            f"its {_ORDER} has {order.dtype} from {first} to {last}, expected ids of the "
            f"{vocabulary} tokens; download it again."
        )
    return order.long()


def check_rotary(kinds: list[str], said: dict[str, Any], target: dict[str, Any]) -> None:
    """An ArtifactError where queries would be turned by other angles than the target's keys."""
    for kind in sorted(set(kinds)):
        if said.get(kind) != target.get(kind):
            raise ArtifactError(
                f"its rotary positions of {kind} are {brief(said.get(kind), 100)}, and the "
                f"target's {brief(target.get(kind), 100)}; load the target that it was trained for."
            )
