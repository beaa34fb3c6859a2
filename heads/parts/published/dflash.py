"""Block drafters of other projects: DFlash, DSpark and JetSpec.

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
where `sample_from_anchor` says so or, of DSpark's own checkpoints, where nothing is said.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ...checkpoint import Found
from ...core import ArtifactError
from ..vocabulary import has_norm
from .checkpoint import (
    Checkpoint,
    cannot_be_written,
    embedding_scale,
    llama_config,
    other_activation,
    scaled_embeddings,
    speculators_config,
    turns_a_share,
)
from .eagle import with_prefix
from .layer_ids import check_writable, read_layer_ids
from .layers import check_neutral, layer_config, read_layers, share_of
from .vocabulary import read_vocabulary, write_vocabulary

_MARKOV = "markov_head.markov_w1.weight"
_BOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
"""Of a DFlash2, whose files leave out `.weight` in these names."""
_DFLASH2_SAYS = (
    "selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size", "output_multiplier",
    "final_logit_softcapping",
)  # fmt: skip
_DFLASH = (
    *("DFlashDraftModel", "Qwen3DFlashDraftModel", "QwenDFlashDraftModel"),  # the last AngelSlim's
    "DFlashSpeculator",
)
_DSPARK = ("DSparkDraftModel", "Qwen3DSparkModel", "DSparkSpeculator")
_DFLASH2 = "DFlash2DraftModel"
_MUSE = ("MuseGlimmerAssistantModel", "DFlashMuseGlimmerAssistantModel")
_NAMES = {
    "layers.": "model.layers.", "midlayer.": "model.layers.0.",
    "logit_head.": "",  # in SpecForge's first ones
    "encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm.",  # Muse Glimmer's
    "context_proj.": "fc.", "context_norm.": "hidden_norm.", "final_norm.": "norm.",  # TorchSpec's
}  # fmt: skip
"""What their names of tensors begin with, and ours, where these differ."""
_UNUSED = ("confidence_head.", "verifier_")
"""What names begin with that are not read: the last are the target's own, for training alone."""
_BLOCK = 16
"""How many places a block has whose config does not say it, in the authors' code and SGLang."""
_WINDOWS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
_MUSE_SAYS = {"is_causal": False}  # as its class in transformers has it, whatever a layer's type is
_SPECULATORS = {"dflash": _DFLASH[-1], "dspark": _DSPARK[-1], "dflash2": _DFLASH2}
ARCHITECTURES = (*_DFLASH, *_DSPARK, _DFLASH2, *_MUSE)
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
    from_anchor = architecture in _DSPARK and "speculators_model_type" not in said
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
    if _MARKOV in found:
        known["markov_rank"] = found[_MARKOV].shape[1]
    known |= {name: said[name] for name in _DFLASH2_SAYS if said.get(name) is not None}
    if (scale := said.get("input_embedding_scale")) is not None:
        known["input_embedding_scale"] = float(scale)  # see `check_embedding_scale`
    if trimmed := read_vocabulary(found, vocabulary):
        known |= trimmed
    elif "lm_head.weight" in found:
        known["output"] = "own"  # unless it is the target's, see `Drafter.completed`
    if "embed_tokens.weight" in found:
        known["embedding"] = "own"  # likewise
    return {name: value for name, value in known.items() if value is not None}, found


def _renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's tensors under our names, without those that are not read."""
    inside = "model.fc.weight" in tensors
    found = {}
    for name, tensor in tensors.items():
        bare = with_prefix(name.removeprefix("model.") if inside else name, _NAMES)
        if not bare.startswith(_UNUSED):
            found[f"{bare}.weight" if bare in _BOOKS else bare] = tensor
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


def _write(drafter: Any, form: str) -> Checkpoint:
    """A drafter in the authors' form, which the engines read too."""
    own = drafter.config
    if form == "llama.cpp" and own.markov_rank:
        return _write_speculators(drafter, form)
    _check_embedding(own, form)
    for special, what, remedy in (
        (own.output == "trimmed" and (form != "vllm" or own.selector_rank),
         f"it knows {own.output_size} of its target's tokens", "output=shared"),
        (own.markov_rank, "it has no confidence_head beside its markov_rank", "markov_rank=0"),
        (bool(own.selector_rank) != bool(own.conv_kernel_size),
         "it has one of DFlash2's selector and convolutions, expected both",
         "selector_rank and drafter.conv_kernel_size"),
        (own.sample_from_anchor, "its newest token's place drafts (sample_from_anchor)",
         "sample_from_anchor=false"),
    ):  # fmt: skip
        if special:
            remedy = f"train it with drafter.{remedy}, or export it to speculators"
            raise cannot_be_written(form, what, remedy)
    _check_parts(drafter, form)
    if form in ("tensorrt-llm", "llama.cpp"):
        _check_causal(own, form)
    second = bool(own.selector_rank)
    if second and form == "tensorrt-llm":
        what = "it has the selector and the convolutions of DFlash2"
        raise cannot_be_written(form, what, "export it to vllm or sglang")
    config = llama_config(drafter, own.layer) | {
        "architectures": [_DFLASH2 if second else "DFlashDraftModel"],
        "block_size": own.depths + 1,
        "num_target_layers": drafter.target.config.get_text_config(decoder=True).num_hidden_layers,
        "dflash_config": {
            "mask_token_id": own.mask_token_id,
            "target_layer_ids": [number - 1 for number in own.feature_layers],
        },
    }  # fmt: skip
    causal = own.is_causal(own.window or None) if form == "llama.cpp" else own.causal
    if form == "llama.cpp" or causal == own.is_causal(own.window or None):
        config["is_causal"] = config["dflash_config"]["causal"] = causal  # else a layer's type does
    said = _DFLASH2_SAYS if second else _DFLASH2_SAYS[-2:]
    config["dflash_config"] |= {name: getattr(own, name) for name in said}
    config["dflash_config"] |= _scale(drafter, form, form != "vllm" or second)
    tensors = _written(drafter)
    write_vocabulary(tensors, own.vocab_size)
    if own.output == "trimmed":
        config["draft_vocab_size"] = own.output_size
    return Checkpoint(config, _books_renamed(tensors) if second else tensors)


def _write_speculators(drafter: Any, form: str = "speculators") -> Checkpoint:
    """A drafter in the form of speculators, in which llama.cpp reads DSpark's."""
    own, tensors = drafter.config, _written(drafter)
    second = bool(own.selector_rank)
    here = "decode with it here"
    for special, what, remedy in (
        (second != bool(own.conv_kernel_size), "it has one of DFlash2's parts, expected both",
         here),
        (second and own.markov_rank, "it has the terms of DFlash2 and of DSpark", here),
        (second and own.output == "trimmed", f"it knows {own.output_size} tokens, as a DFlash2",
         here),
        (own.output_multiplier != 1 or own.final_logit_softcapping, "its logits are scaled",
         "export it to vllm"),
        (form == "llama.cpp" and own.is_causal(own.window or None),
         "a place of its block does not see those after it", here),
    ):  # fmt: skip
        if special:
            raise cannot_be_written(form, what, remedy)
    _check_embedding(own, form)
    _check_parts(drafter, form)
    _check_causal(own, "speculators")
    write_vocabulary(tensors, own.vocab_size)
    kind = "dspark" if own.markov_rank else "dflash2" if second else "dflash"
    config = speculators_config(drafter, kind, llama_config(drafter, own.layer)) | {
        "architectures": [_SPECULATORS[kind]],
        "aux_hidden_state_layer_ids": list(own.feature_layers),
        "block_size": own.depths + (not own.sample_from_anchor),
        "draft_vocab_size": own.output_size, "mask_token_id": own.mask_token_id,
        "sample_from_anchor": own.sample_from_anchor,
    }  # fmt: skip
    if own.window:
        config["sliding_window_non_causal"] = not own.is_causal(own.window)
    if own.markov_rank:
        config |= {"markov_rank": own.markov_rank, "markov_head_type": "vanilla"}
        config |= {"enable_confidence_head": False, "confidence_head_with_markov": False}
    config |= _scale(drafter, form, form == "llama.cpp")
    if second:
        config |= {name: getattr(own, name) for name in _DFLASH2_SAYS[:4]}
        tensors = _books_renamed(tensors)
    return Checkpoint(config, tensors)


def _check_parts(drafter: Any, form: str) -> None:
    own = drafter.config
    check_writable(drafter, form, block=True)
    if form not in ("speculators", "original") and (what := other_activation(own.layer)):
        raise cannot_be_written(form, what, "export it to speculators or original")
    if form in ("speculators", "original") and (what := turns_a_share(own.layer)):
        raise cannot_be_written(form, what, "export it to vllm or sglang")
    if own.selector_rank and not own.selector_top_k:
        what = "its selector chooses among all tokens (selector_top_k=0), and theirs among the best"
        raise cannot_be_written(form, what, "train it with drafter.selector_top_k=16")


def _check_causal(own: Any, form: str) -> None:
    """Refuse a form in which some layers would see more, or less, of a block than they should.

    speculators has no causal layers that see the whole text, and vLLM reads its config as one
    setting for all layers, as llama.cpp's is; in TensorRT-LLM a layer's type decides.
    """
    types = (own.layer or {}).get("layer_types") or ["full_attention"]
    whole, windowed = "full_attention" in types, own.window and own.is_causal(own.window)
    alone = (own.causal, "a place of its block sees those before it alone (causal)")
    both = (
        own.window and not windowed,
        "in its layers with a window a place sees those after it (causal_windows=false)",
    )
    mixed = (
        windowed and not own.causal,
        "in its layers with a window alone a place does not see those after it",
    )
    if form == "tensorrt-llm":
        wrong = [alone, both]
    else:
        wrong = [alone, mixed] if whole and form == "speculators" else [mixed] if whole else []
    for special, what in wrong:
        if special:
            raise cannot_be_written(form, what, "export it to vllm or sglang")


def _scale(drafter: Any, form: str, read: bool) -> dict[str, float]:
    """The entry for the scale of the target's embeddings; refused where a form does not read it."""
    raw = drafter.config.embedding == "own" or has_norm(drafter.target.get_input_embeddings())
    scale = None if raw else scaled_embeddings(drafter)
    if scale is not None and not read:
        what = f"it reads its target's embeddings times {scale:g}, and {form} as they are"
        raise cannot_be_written(form, what, "export it to sglang")
    return {} if scale is None else {"input_embedding_scale": scale}


def _check_embedding(own: Any, form: str) -> None:
    if own.embedding == "own" and form != "vllm":
        raise cannot_be_written(form, "its embeddings are not its target's", "export it to vllm")


def _written(drafter: Any) -> dict[str, Tensor]:
    return {name.removeprefix("model."): t for name, t in drafter.state_dict().items()}


def _books_renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    books = {f"{name}.weight": name for name in _BOOKS}
    return {books.get(name, name): tensor for name, tensor in tensors.items()}


DFLASH: dict[str, Callable[[Any], Checkpoint]] = {
    **{
        form: partial(_write, form=form)
        for form in ("vllm", "sglang", "tensorrt-llm", "llama.cpp", "original")
    },
    "speculators": _write_speculators,
}
"""What writes a drafter in each format."""
