"""Block drafters of other projects: DFlash, DSpark, JetSpec and Domino.

The authors' have the config of a Qwen3 of a few layers, in which `dflash_config` names the mask
token and the layers of the target (by their output), and tensors named as here but for the layers'
prefix (github.com/z-lab/dflash). There are no embeddings and no output layer: these are the
target's. The engines read the same files. The config of speculators nests that of the layers,
names the target's layers by their input, and may have a trimmed output layer. The assistant of Muse
Glimmer (`MuseGlimmerAssistantModel` of transformers) names what mixes the target's features
`encoder`, has all settings at the top of its config, and its blocks are seen both ways.

Layers of the type `sliding_attention` see a window of the text, and in them a place does not see
those after it; `is_causal` or, where it is not set, `dflash_config.causal` decides for all layers.
In the config of speculators `sliding_window_non_causal` decides for the layers with a window, and
in all others a place sees those after it. The place of the newest token predicts the first draft
where `sample_from_anchor` (of Domino `shift_label`) says so or, of DSpark's own checkpoints, where
nothing is said.
"""

from typing import Any, get_args

from torch import Tensor

from ...checkpoint import Found
from ...core import ArtifactError, brief
from ..pair_terms import MarkovKind
from ..vocabulary import has_norm
from .checkpoint import embedding_scale
from .eagle import with_prefix
from .layer_ids import read_layer_ids
from .layers import check_neutral, layer_config, read_layers, share_of
from .vocabulary import read_vocabulary

_MARKOV = "markov_head.markov_w1.weight"
BOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
"""Of a DFlash2, whose files leave out `.weight` in these names."""
DFLASH2_SAYS = (
    "selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size", "output_multiplier",
    "final_logit_softcapping",
)  # fmt: skip
OF_DFLASH = (
    *("DFlashDraftModel", "Qwen3DFlashDraftModel", "QwenDFlashDraftModel"),  # the last AngelSlim's
    "DFlashSpeculator",
)
OF_DSPARK = ("DSparkDraftModel", "Qwen3DSparkModel", "DSparkSpeculator")
OF_DFLASH2 = "DFlash2DraftModel"
OF_DOMINO = "DominoDraftModel"
_MUSE = ("MuseGlimmerAssistantModel", "DFlashMuseGlimmerAssistantModel")
_NAMES = {
    "layers.": "model.layers.", "midlayer.": "model.layers.0.",
    "encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm.",  # Muse Glimmer's
    "context_proj.": "fc.", "context_norm.": "hidden_norm.", "final_norm.": "norm.",  # TorchSpec's
}  # fmt: skip
"""What their names of tensors begin with, and ours, where these differ."""
NAMES_OF_DOMINO = {
    "prefix_gru.weight_ih_l0": "domino.gru_input.weight",
    "prefix_gru.weight_hh_l0": "domino.gru_state.weight",
    "embed_proj.0.weight": "domino.inner.weight", "embed_proj.2.weight": "domino.outer.weight",
}  # fmt: skip
"""Domino's names of tensors, and ours."""
_UNUSED = ("confidence_head.", "verifier_")
"""What names begin with that are not read: the last are the target's own, for training alone."""
_BLOCK = 16
"""How many places a block has whose config does not say it, in the authors' code and SGLang."""
_WINDOWS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
_MUSE_SAYS = {"is_causal": False}  # as its class in transformers has it, whatever a layer's type is
ARCHITECTURES = (*OF_DFLASH, *OF_DSPARK, OF_DFLASH2, OF_DOMINO, *_MUSE)
"""What the architectures are called that are run here."""


def dflash(config: dict[str, Any], tensors: dict[str, Tensor]) -> Found | None:
    """The authors' checkpoints, others' in their form, and those of speculators.

    A head that predicts how likely its drafts are accepted (`confidence_head`) is left out: it
    decides how many drafts are verified, and nothing else.
    """
    found = _renamed(tensors)
    if "hidden_norm.weight" not in found:
        return None
    architecture = next(iter(config.get("architectures") or [""]))
    if architecture not in ARCHITECTURES and "dflash_config" not in config:
        return None
    if architecture in _MUSE:
        config = _MUSE_SAYS | config
    if nested := config.get("dspark_config"):  # as SGLang reads it, too
        config = config | {"dflash_config": (config.get("dflash_config") or {}) | nested}
    if (inner := config.get("transformer_layer_config")) is not None:  # vLLM reads these outside
        outside = {name: config[name] for name in _WINDOWS if config.get(name) is not None}
        config = config | {"transformer_layer_config": inner | outside}
    said: dict[str, Any] = config | (config.get("dflash_config") or {})
    _check_attention(found)
    layer, read = read_layers(config, found), read_layer_ids(config)
    size = len(found["fc.weight"])
    if not layer.get("qk_norm"):
        raise ArtifactError(
            "its layers have no norms of queries and keys, which is not run here; expected Qwen3's "
            "layers."
        )
    if said.get("use_swa") or _without_window(config, layer):
        raise ArtifactError(
            "its config gives layers a window by use_swa, or names sliding_attention without a "
            "window; expected layer_types, and a sliding_window that is in use."
        )
    window = layer_config(config).get("sliding_window")
    check_neutral(said, {"attention_value_scale": 1, "swa_window_size": window})
    token, block = said.get("mask_token_id"), said.get("block_size", _BLOCK)
    layers = layer.get("num_hidden_layers", 1)
    whole = type(token) is int and type(block) is int
    if not whole or not block or found["fc.weight"].shape[1] != (len(read) or layers) * size:
        named = f"target_layer_ids for {len(read)} layers" if read else "no target_layer_ids"
        raise ArtifactError(
            f"its config says mask_token_id {token}, block_size {block} and {named}, and fc reads "
            f"{found['fc.weight'].shape[1]} entries, not those of {len(read) or layers} layers of "
            "the target; restore the config that was published."
        )
    from_anchor = architecture in OF_DSPARK and "speculators_model_type" not in said
    for name in ("shift_label", "sample_from_anchor"):  # the first in older speculators
        if said.get(name) is not None:
            from_anchor = bool(said[name])
    vocabulary = layer_config(config).get("vocab_size")
    known = {
        "hidden_size": size, "vocab_size": vocabulary, "layer": layer,
        "layers": layers, "feature_layers": read or None,
        "mask_token_id": token, "window": layer.get("sliding_window", 0),
        "sample_from_anchor": from_anchor, "depths": block - (not from_anchor),
        **_causality(said), **share_of(layer),
    }  # fmt: skip
    if not known["window"]:
        del known["causal_windows"]  # which decides nothing then
    known |= _terms(said, found, architecture == OF_DOMINO)
    known |= {name: said[name] for name in DFLASH2_SAYS if said.get(name) is not None}
    if (scale := said.get("input_embedding_scale")) is not None:
        known["input_embedding_scale"] = float(scale)  # see `check_embedding_scale`
    if trimmed := read_vocabulary(found, vocabulary):
        known |= trimmed
    elif "lm_head.weight" in found:
        known["output"] = "own"  # unless it is the target's, see `Drafter.completed`
    if "embed_tokens.weight" in found:
        known["embedding"] = "own"  # likewise
    return {name: value for name, value in known.items() if value is not None}, found


def _terms(said: dict[str, Any], found: dict[str, Tensor], domino: bool) -> dict[str, Any]:
    """What the config and the tensors say of the terms of DSpark and Domino.

    Args:
        domino: whether the architecture says that it has the latter.
    """
    known: dict[str, Any] = {}
    if _MARKOV in found:
        known["markov_rank"] = found[_MARKOV].shape[1]
        known["markov_head_type"] = kind = said.get("markov_head_type") or "vanilla"
        if kind not in get_args(MarkovKind):
            raise ArtifactError(
                f"its config says markov_head_type {brief(repr(kind), 60)}, which is not run here; "
                f"expected one of: {', '.join(get_args(MarkovKind))}."
            )
    missing = [name for name, ours in NAMES_OF_DOMINO.items() if ours not in found]
    if missing and (domino or said.get("projector_type") == "domino"):
        raise ArtifactError(
            f"its config says that it is a Domino, and {missing[0]} is missing; download both "
            "again."
        )
    if not missing:
        known |= {
            "domino_rank": len(found["domino.inner.weight"]),
            "gru_hidden_dim": found["domino.gru_state.weight"].shape[1],
            "pure_draft_prefix_len": said.get("pure_draft_prefix_len", 0),
        }
    return known


def _renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's tensors under our names, without those that are not read."""
    inside = "model.fc.weight" in tensors
    found = {}
    for name, tensor in tensors.items():
        bare = name.removeprefix("model.") if inside else name
        bare = with_prefix(bare.removeprefix("logit_head."), _NAMES)  # in SpecForge's first ones
        bare = NAMES_OF_DOMINO.get(bare, bare)
        if not bare.startswith(_UNUSED):
            found[f"{bare}.weight" if bare in BOOKS else bare] = tensor
    return found


def _check_attention(found: dict[str, Tensor]) -> None:
    """An ArtifactError, which names the part, for attention of another kind."""
    if odd := next((name for name in found if ".kv_a_proj" in name), None):
        raise ArtifactError(
            f"its layers have multi-head latent attention ({odd.split('.')[-2]}), which is not run "
            "here; expected q_proj, k_proj and v_proj."
        )


def check_embedding_scale(scale: float, embedding: Any) -> None:
    """An ArtifactError unless a target's embeddings are multiplied by what a config says."""
    own = 1.0 if has_norm(embedding) else embedding_scale(embedding)
    if not abs(own - scale) <= 0.01 * abs(scale):
        raise ArtifactError(
            f"it reads embeddings times {scale:g} (input_embedding_scale), and this target's are "
            f"times {own:g}; load the target that it was trained for."
        )


def _without_window(config: dict[str, Any], layer: dict[str, Any]) -> bool:
    types = layer_config(config).get("layer_types") or ()
    return "sliding_attention" in types and not layer.get("sliding_window")


def _causality(said: dict[str, Any]) -> dict[str, bool]:
    if (kind := said.get("speculators_model_type")) is not None:
        both_ways = said.get("sliding_window_non_causal", kind == "dflash2")
        return {"causal": False, "causal_windows": not both_ways}
    causal = said.get("is_causal")
    causal = said.get("causal") if causal is None else causal
    return {"causal": bool(causal), "causal_windows": causal is None or bool(causal)}
