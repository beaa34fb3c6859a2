"""EAGLE heads of other projects.

There are three formats. The authors' own (github.com/SafeAILab/EAGLE) has the config of a Llama of
one layer; SpecForge's (github.com/sgl-project/SpecForge) is the same, and may add `eagle_config`;
that of speculators (github.com/vllm-project/speculators) nests the layer's config in its own. Both
vLLM and SGLang read the first. All names may begin with `model.`.
"""

import re
from typing import Any

import torch
from torch import Tensor

from ...checkpoint import Found
from ...core import FINAL, ArtifactError
from .layer_ids import read_layer_ids
from .layers import layer_config, read_layers, share_of
from .vocabulary import put_vocabulary, read_vocabulary

_LAYERS, _FIRST = "model.layers.", "model.layers.0."
AUTHORS_1, AUTHORS_3 = {_LAYERS: "layers."}, {_FIRST: "midlayer.", _LAYERS: "layers."}
SPECULATORS_1 = {_FIRST: "transformer.", "fc.": "fusion_fc."}
SPECULATORS_3 = {_LAYERS: "layers."}
"""What our names of tensors begin with, and those of a format; all other names are the same."""

_FORMATS = (AUTHORS_1, AUTHORS_3, SPECULATORS_1, SPECULATORS_3)
_NAMES = {there: here for form in _FORMATS for here, there in form.items()}
_NAMES |= {  # as SGLang called them first
    f"aux_norm_{name}.": f"fc_norm.{i}." for i, name in enumerate(("low", "mid", "high"))
}

_EMBEDDING, _OUTPUT = "embed_tokens.weight", "lm_head.weight"
HOT = "lm_head.hot_token_ids"
"""The target ids that a trimmed EAGLE-1 head for SGLang proposes, so that it can be read back.
SGLang ignores tensors with `lm_head` in their names, and reads the ids from a file of its own."""


def eagle1(config: dict[str, Any], tensors: dict[str, Tensor]) -> Found | None:
    """EAGLE-1 and 2 heads of the authors and of speculators, and HASS's."""
    found = _renamed(tensors)
    if _widths(found) != (2, 1):
        return None
    if config.get("layernorms"):
        raise ArtifactError(
            "its config sets layernorms, a variant of EAGLE-1 that is not run here; expected a "
            "head without them."
        )
    known = _known(config, found, layer_config(config).get("vocab_size"))
    known["hidden_size"] = len(found["fc.weight"])
    if _OUTPUT in found:
        known["output"] = "own"
    if (ids := found.pop(HOT, None)) is not None:
        known |= put_vocabulary(found, ids)
    return known | {"bias": "fc.bias" in found}, found


def eagle3(config: dict[str, Any], tensors: dict[str, Tensor]) -> Found | None:
    """EAGLE-3 heads of the authors and SpecForge (`midlayer`), or of speculators (`layers.0`).

    Some of ModelOpt's read the target's final state alone, as it is: such a head gets an `fc` that
    changes nothing, and one in its file is left out, as vLLM and TensorRT-LLM do.
    """
    found = _renamed(tensors)
    final = _reads_final_state(config, found)
    if final:
        found["fc.weight"] = torch.eye(len(found["norm.weight"]), dtype=found["norm.weight"].dtype)
    if _widths(found)[1] != 2:
        return None
    mask = found.get("t2d")
    size = layer_config(config).get("vocab_size") if mask is None else len(mask)
    known = _known(config, found, size) | _norms(config, found) | _parallel(config, found)
    known["layers"] = known["layer"].get("num_hidden_layers", 1)
    known["norm_before_residual"] = bool(_said(config, "norm_before_residual"))
    layers, read = [FINAL] if final else read_layer_ids(config), found["fc.weight"].shape[1]
    if read % (len(layers) or 3):
        raise ArtifactError(
            f"its fc reads {read} entries, which are not those of {len(layers) or 3} layers of a "
            "target; restore the config that was published, with its layer ids."
        )
    known["hidden_size"] = read // (len(layers) or 3)
    if layers:
        known["feature_layers"] = layers
    return known | read_vocabulary(found, size), found


def _reads_final_state(config: dict[str, Any], found: dict[str, Tensor]) -> bool:
    """Whether it reads what the target's last norm returns, and not states between layers.

    Raises:
        ArtifactError: it reads such states, and nothing that mixes them is there.
    """
    if f"{_FIRST}hidden_norm.weight" not in found:  # which EAGLE-3 alone has
        return False
    final = _said(config, "use_aux_hidden_state") is False
    if not final and "fc.weight" not in found:
        raise ArtifactError(
            "its fc.weight is missing, which mixes states of several layers, and its config does "
            "not set use_aux_hidden_state to false; download both again."
        )
    return final


def _known(config: dict[str, Any], found: dict[str, Tensor], size: int | None) -> dict[str, Any]:
    """What every checkpoint says of the family's config; size is that of the vocabulary."""
    layer = read_layers(config, found)
    known: dict[str, Any] = {"layer": layer, **share_of(layer)}
    if _EMBEDDING in found:
        known["embedding"] = "own"  # unless it is the target's, see `Drafter.completed`
        size = size or len(found[_EMBEDDING])
    return known if size is None else {**known, "vocab_size": size}


def _said(config: dict[str, Any], *names: str) -> Any:
    """The first of some settings that a config makes, at its top or in `eagle_config`."""
    inner = config.get("eagle_config") or {}
    values = (where.get(name) for name in names for where in (config, inner))
    return next((value for value in values if value is not None), None)


def _norms(config: dict[str, Any], found: dict[str, Tensor]) -> dict[str, Any]:
    """The norms before `fc`, by their tensors, and whether the normed state is handed on."""
    handed_on = bool(_said(config, "norm_output", "return_hidden_post_norm"))  # ModelOpt's name
    known: dict[str, Any] = {"norm_output": handed_on}
    for field, names, tensor in (
        ("norm_before_fc", ("norm_before_fc",), "input_norm.weight"),
        ("fc_norm", ("fc_norm", "use_aux_norm"), "fc_norm.0.weight"),
    ):
        known[field] = tensor in found
        if _said(config, *names) and not known[field]:
            raise ArtifactError(
                f"its config sets {field}, and {tensor} is missing; download both again."
            )
    if _said(config, "embed_requires_grad") and _EMBEDDING not in found:
        raise ArtifactError(
            f"its config sets embed_requires_grad, and the trained {_EMBEDDING} is missing; "
            "download both again."
        )
    return known


def _parallel(config: dict[str, Any], found: dict[str, Tensor]) -> dict[str, Any]:
    """P-EAGLE's mask token and learned state; nothing for a head that drafts one after another."""
    state = found.pop("mask_hidden", None)
    token = _said(config, "mask_token_id", "ptd_token_id", "pard_token")
    steps = _said(config, "parallel_draft_step") or 1
    if config.get("speculators_model_type") != "peagle" and state is None and steps == 1:
        return {}
    if state is None or token is None:
        raise ArtifactError(
            f"it drafts several tokens at once, and has mask_hidden {state is not None} and "
            f"mask_token_id {token}; expected both, as P-EAGLE has them."
        )
    found["mask_hidden"] = state.flatten()
    proposals = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    depths = proposals[0].get("speculative_tokens") or config.get("num_depths")
    return {"mask_token_id": int(token)} | ({"depths": depths} if depths else {})


def _renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's tensors under our names, without those that follow from the config."""
    inside = "model.fc.weight" in tensors or "model.fusion_fc.weight" in tensors
    found = {}
    for name, tensor in tensors.items():
        whole = inside or name == "model.embed_tokens.weight"
        bare = name.removeprefix("model.") if whole else name
        bare = re.sub(r"^midlayer\.(?=\d+\.)", "layers.", bare)  # ModelOpt's, of several layers
        if not bare.endswith("rotary_emb.inv_freq"):
            found[with_prefix(bare, _NAMES)] = tensor
    return found


def with_prefix(name: str, prefixes: dict[str, str]) -> str:
    """A name whose beginning is replaced by what stands for it in `prefixes`, if it is there."""
    old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
    return prefixes[old] + name.removeprefix(old) if old else name


def _widths(found: dict[str, Tensor]) -> tuple[float, float]:
    """How many times as wide as the hidden state are what `fc` and what attention read."""
    fc, query = found.get("fc.weight"), found.get(f"{_FIRST}self_attn.q_proj.weight")
    if fc is not None and query is None and any(".kv_a_proj" in name for name in found):
        raise ArtifactError(
            "its layer has multi-head latent attention (kv_a_proj_with_mqa), which is not run "
            "here; expected q_proj, k_proj and v_proj."
        )
    if fc is None or query is None or fc.dim() != 2 or query.dim() != 2:
        return 0, 0
    return fc.shape[1] / fc.shape[0], query.shape[1] / fc.shape[0]
