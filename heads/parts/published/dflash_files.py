"""Block drafters in the formats of other projects; see `dflash` for what these are."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ..vocabulary import has_norm
from .checkpoint import (
    Checkpoint,
    cannot_be_written,
    llama_config,
    other_activation,
    scaled_embeddings,
    speculators_config,
    turns_a_share,
)
from .dflash import (
    BOOKS,
    DFLASH2_SAYS,
    NAMES_OF_DOMINO,
    OF_DFLASH,
    OF_DFLASH2,
    OF_DOMINO,
    OF_DSPARK,
)
from .layer_ids import check_writable
from .vocabulary import write_vocabulary

_SPECULATORS = {"dflash": OF_DFLASH[-1], "dspark": OF_DSPARK[-1], "dflash2": OF_DFLASH2}


def _write(drafter: Any, form: str) -> Checkpoint:
    """A drafter in the authors' form, which the engines read too."""
    own = drafter.config
    if form == "llama.cpp" and own.markov_rank:
        return _write_speculators(drafter, form)
    _check_embedding(own, form)
    pairs = form == "sglang" and own.markov_rank
    if own.domino_rank:
        _check_domino(own, form)
    for special, what, remedy in (
        (own.output == "trimmed" and (form != "vllm" or own.selector_rank),
         f"it knows {own.output_size} of its target's tokens", "output=shared"),
        (own.markov_rank and not pairs, "it has the term of DSpark (markov_rank)", "markov_rank=0"),
        (pairs and not own.sample_from_anchor,
         "its newest token's place drafts nothing, as in DSpark it does",
         "sample_from_anchor=true"),
        (bool(own.selector_rank) != bool(own.conv_kernel_size),
         "it has one of DFlash2's selector and convolutions, expected both",
         "selector_rank and drafter.conv_kernel_size"),
        (own.sample_from_anchor and not pairs and not own.domino_rank,
         "its newest token's place drafts (sample_from_anchor)", "sample_from_anchor=false"),
    ):  # fmt: skip
        if special:
            there = own.markov_head_type != "vanilla" and form != "sglang"
            other = "sglang" if there else "speculators"
            remedy = f"train it with drafter.{remedy}, or export it to {other}"
            raise cannot_be_written(form, what, remedy)
    if (pairs or own.domino_rank) and (own.output_multiplier != 1 or own.final_logit_softcapping):
        raise cannot_be_written(form, "its logits are scaled", "decode with it here")
    _check_parts(drafter, form)
    if form in ("tensorrt-llm", "llama.cpp"):
        _check_causal(own, form)
    second = bool(own.selector_rank)
    if second and form == "tensorrt-llm":
        what = "it has the selector and the convolutions of DFlash2"
        raise cannot_be_written(form, what, "export it to vllm or sglang")
    architecture = OF_DFLASH2 if second else OF_DSPARK[1] if pairs else OF_DFLASH[0]
    if own.domino_rank and form == "original":
        architecture = OF_DOMINO
    config = llama_config(drafter, own.layer) | {
        "architectures": [architecture],
        "block_size": own.depths + (not own.sample_from_anchor),
        "num_target_layers": drafter.target.config.get_text_config(decoder=True).num_hidden_layers,
        "dflash_config": {
            "mask_token_id": own.mask_token_id,
            "target_layer_ids": [number - 1 for number in own.feature_layers],
        },
    }  # fmt: skip
    causal = own.is_causal(own.window or None) if form == "llama.cpp" else own.causal
    if form == "llama.cpp" or causal == own.is_causal(own.window or None):
        config["is_causal"] = config["dflash_config"]["causal"] = causal  # else a layer's type does
    said = DFLASH2_SAYS if second else DFLASH2_SAYS[-2:]
    config["dflash_config"] |= {name: getattr(own, name) for name in said}
    config["dflash_config"] |= _scale(drafter, form, form != "vllm" or second)
    if pairs:
        config |= _dspark(own) | {"sample_from_anchor": True}
    if own.domino_rank:
        config["dflash_config"] |= {
            "projector_type": "domino", "emb_dim": own.domino_rank,
            "gru_hidden_dim": own.gru_hidden_dim,
            "pure_draft_prefix_len": own.pure_draft_prefix_len,
            "shift_label": own.sample_from_anchor,
        }  # fmt: skip
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
        (own.domino_rank, "it has the term of Domino", "export it to sglang"),
        (form == "llama.cpp" and own.markov_head_type != "vanilla",
         f"its term of the token before is {own.markov_head_type}, expected vanilla",
         "export it to sglang"),
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
        config |= _dspark(own)
    config |= _scale(drafter, form, form == "llama.cpp")
    if second:
        config |= {name: getattr(own, name) for name in DFLASH2_SAYS[:4]}
        tensors = _books_renamed(tensors)
    return Checkpoint(config, tensors)


def _dspark(own: Any) -> dict[str, Any]:
    """The settings of the term of the token before, and that no confidence is estimated."""
    return {
        "markov_rank": own.markov_rank, "markov_head_type": own.markov_head_type,
        "enable_confidence_head": False, "confidence_head_with_markov": False,
    }  # fmt: skip


def _check_domino(own: Any, form: str) -> None:
    """An ArtifactError for a form that has no such term, or fixes where it begins."""
    if form not in ("sglang", "original"):
        raise cannot_be_written(form, "it has the term of Domino", "export it to sglang")
    if form == "sglang" and own.pure_draft_prefix_len != 1:
        what = f"its term begins after {own.pure_draft_prefix_len} drafts, and there after one"
        raise cannot_be_written(form, what, "train it with drafter.pure_draft_prefix_len=1")


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
    theirs = {ours: name for name, ours in NAMES_OF_DOMINO.items()}
    found: dict[str, Tensor] = drafter.state_dict()
    return {theirs.get(name, name.removeprefix("model.")): tensor for name, tensor in found.items()}


def _books_renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    books = {f"{name}.weight": name for name in BOOKS}
    return {books.get(name, name): tensor for name, tensor in tensors.items()}


DFLASH: dict[str, Callable[[Any], Checkpoint]] = {
    **{
        form: partial(_write, form=form)
        for form in ("vllm", "sglang", "tensorrt-llm", "llama.cpp", "original")
    },
    "speculators": _write_speculators,
}
"""What writes a drafter in each format."""
