"""EAGLE drafters in the formats of other projects; see `eagle` for what these are."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...core import FINAL, output_rows, weight_of
from .checkpoint import (
    Checkpoint,
    cannot_be_written,
    llama_config,
    other_activation,
    refuse_trimmed,
    scaled_embeddings,
    speculators_config,
    turns_a_share,
)
from .eagle import AUTHORS_1, AUTHORS_3, HOT, SPECULATORS_1, SPECULATORS_3, with_prefix
from .layer_ids import READS_FINAL_STATE, check_writable, ids_by_input, ids_by_output
from .vocabulary import write_vocabulary

_FORMS = ("vllm", "sglang", "speculators", "original")
_TENSORRT, _LLAMA_CPP = "tensorrt-llm", "llama.cpp"  # of EAGLE-3 alone
_FINAL_STATE = ("vllm", "sglang")
"""The forms whose engines hand over what the target's last norm returns, in place of states between
layers."""


def _check(form: str, special: list[tuple[Any, str, tuple[str, ...]]]) -> None:
    """Refuse a form that cannot run one of what is special about a drafter.

    Args:
        special: whether it is so, what it is, and the forms that can run it.
    """
    for there, what, able in special:
        if there and form not in able:
            others = [each for each in _FORMS if all(each in a for is_so, _, a in special if is_so)]
            remedy = f"export it to {' or '.join(others)}" if others else "decode with it here"
            raise cannot_be_written(form, what, remedy)


def _special(drafter: Any, new: tuple[str, ...]) -> list[tuple[Any, str, tuple[str, ...]]]:
    """What the first published heads have not, and which forms can run it; see `_check`.

    Args:
        new: the forms that can run norms of queries and keys, and windows.
    """
    own, layer = drafter.config, drafter.config.layer
    both, count, wide = ("vllm", "speculators"), layer.get("num_hidden_layers", 1), own.hidden_size
    narrow, normed = layer["hidden_size"] != wide, layer.get("qk_norm")
    biased = layer.get("mlp_bias") or layer.get("attention_bias")
    return [
        (normed, "its queries and keys are normed (q_norm)", new),
        (normed and biased, "its layers have both norms of queries and keys, and biases", ()),
        (layer.get("sliding_window"), "layers of it see a window alone (sliding_window)", new),
        (count > 1, f"it has {count} layers, expected one", both),
        (layer.get("mlp_bias"), "its MLP has biases", both),
        (other_activation(layer), other_activation(layer), ("speculators", "original")),
        (layer.get("rope_scaling"), "its rotary positions are scaled (rope_scaling)",
         ("vllm", "sglang", "speculators", _TENSORRT, _LLAMA_CPP)),
        (turns_a_share(layer), turns_a_share(layer), ("vllm", "sglang", _TENSORRT)),
        (narrow, f"it is {layer['hidden_size']} wide and its target {wide}",
         ("vllm", "sglang", "original", _TENSORRT, _LLAMA_CPP)),
        (own.embedding == "own" and not narrow, "its embeddings are not its target's",
         ("vllm", "speculators", "original", _LLAMA_CPP)),
    ]  # fmt: skip


def _write_eagle1(drafter: Any, form: str) -> Checkpoint:
    """An EAGLE-1 drafter in a format; the target's embedding and output layer are not written."""
    tensors, layer = dict(drafter.state_dict()), drafter.config.layer
    one = (*_FORMS[:2], "original") if form != "speculators" else ()
    several, scale = layer.get("num_hidden_layers", 1) > 1, scaled_embeddings(drafter)
    heads = layer["num_attention_heads"]
    _check(form, [
        (heads * layer["head_dim"] != layer["hidden_size"], f"its {heads} heads of "
         f"{layer['head_dim']} are not together {layer['hidden_size']} wide", _FORMS[:3]),
        (drafter.config.output == "own", "its output layer is not its target's", ("speculators",)),
        (several, "it has several layers", one), *_special(drafter, ("speculators",)),
        (scale and drafter.config.embedding != "own", "it reads its target's embeddings times "
         f"{scale or 1:g}, which others read as they are", ()),
    ])  # fmt: skip
    hot = _hot_tokens(drafter, tensors, form) if drafter.config.output == "trimmed" else ()
    if form == "vllm" and drafter.config.bias:
        if tensors.pop("fc.bias").any():
            raise cannot_be_written(
                "vLLM", "its fc layer has a bias, which vLLM's EAGLE-1 has not",
                "train it with drafter.bias=false, or export it to sglang",
            )  # fmt: skip
    elif form == "sglang":  # its fc always has one
        tensors.setdefault("fc.bias", torch.zeros_like(tensors["fc.weight"][:, 0]))
    config = llama_config(drafter, layer)
    if form == "original" and layer.get("attention_bias"):
        config["qkv_bias"] = True
        _leave_out_output_biases(tensors)
    if form == "speculators":
        names = {
            "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
            "transformer_layer_architecture": "LlamaDecoderLayer",
            "layernorms": False, "fusion_bias": "fc.bias" in tensors,
        }  # fmt: skip
        config = speculators_config(drafter, "eagle", config) | names
        return Checkpoint(config, _written(tensors, SPECULATORS_1))
    config |= {
        "architectures": ["LlamaForCausalLMEagle" if form == "sglang" else "LlamaForCausalLM"],
        # SGLang, whose fc always has one, takes it for that of attention.
        "bias": "fc.bias" in tensors and form != "sglang",
    }
    return Checkpoint(config, _written(tensors, AUTHORS_1), token_map=hot)


def _leave_out_output_biases(tensors: dict[str, Tensor]) -> None:
    """Leave out what the authors' code does not add; an ArtifactError unless it is zero."""
    for name in [name for name in tensors if name.endswith("o_proj.bias")]:
        if tensors.pop(name).any():
            raise cannot_be_written(
                "the authors' code", "the output projection of its attention has a bias",
                "export it to speculators",
            )  # fmt: skip


def _hot_tokens(drafter: Any, tensors: dict[str, Tensor], form: str) -> tuple[int, ...]:
    """The target ids that a trimmed drafter proposes, in place of its rows of the output layer.

    SGLang takes these rows from the target's output layer, by FR-Spec (Zhao et al. 2025, arXiv
    2502.14856).

    Raises:
        ArtifactError: another form; or the drafter's rows are not the target's.
    """
    own = drafter.config
    if form != "sglang":
        refuse_trimmed(drafter, form, "export the drafter it was trimmed from, or to sglang")
    ids, rows = tensors.pop("vocabulary"), tensors.pop("lm_head.weight")
    whole = output_rows(drafter.target)
    theirs = whole[ids.to(whole.device)].to(rows)
    if not torch.allclose(theirs, rows, rtol=0, atol=2**-24):  # float16 drops what is smaller
        raise cannot_be_written(
            form, f"its output layer for {own.output_size:,} tokens was trained, or rounded, and "
            "the engine takes the target's",
            "trim one with drafter.output=shared, in its target's dtype (headstart trim)",
        )  # fmt: skip
    tensors[HOT] = ids
    return tuple(ids.tolist())


def _write_eagle3(drafter: Any, form: str) -> Checkpoint:
    """An EAGLE-3 drafter in a format, with the target's embedding for speculators alone."""
    own, tensors = drafter.config, dict(drafter.state_dict())
    layer, layers, new = own.layer, list(own.feature_layers), ("vllm", "speculators")
    normed, count = (*new, "sglang", _TENSORRT), len(layers)
    final = layers == [FINAL] and form in _FINAL_STATE
    if final:
        _leave_out_fc(drafter, tensors, form)
    else:
        check_writable(drafter, form)
    _check(form, [
        (count != 3, f"it reads {count} layers of the target, expected 3", normed),
        (own.norm_before_residual, "it adds to its normalised input (norm_before_residual)",
         (*new, _LLAMA_CPP)),
        (own.norm_before_fc, "it norms the features before it mixes them (norm_before_fc)",
         (*normed, _LLAMA_CPP)),
        (own.fc_norm, "it norms each layer's features before it mixes them (fc_norm)", normed),
        (own.norm_output, "its normed state feeds the next step (norm_output)", normed),
        (drafter.independent, "it drafts all tokens at once (mask_token_id)", new),
        (layer.get("attention_bias"), "its attention has biases", new),
        *_special(drafter, new),
    ])  # fmt: skip
    write_vocabulary(tensors, own.vocab_size)
    config = llama_config(drafter, layer)
    if count != 3 and not final:
        config["num_aux_hidden_states"] = count
    said: dict[str, Any] = {
        "draft_vocab_size": own.output_size, "norm_before_residual": own.norm_before_residual,
    }  # fmt: skip
    if form != "original" or layer["hidden_size"] != own.hidden_size:
        # The authors' code reads its target's embeddings only where this is left out.
        said["target_hidden_size"] = own.hidden_size
    said |= {n: True for n in ("norm_before_fc", "fc_norm", "norm_output") if getattr(own, n)}
    if drafter.independent:
        tensors["mask_hidden"] = tensors["mask_hidden"].view(1, -1)
    if form == "speculators":
        kind = "peagle" if drafter.independent else "eagle3"
        if kind == "peagle" and own.fc_norm:  # where vLLM finds it: it reads only some at the top
            config["fc_norm"] = True
        config = speculators_config(drafter, kind, config) | ids_by_input(layers) | said
        config["architectures"] = ["PEagleSpeculator" if kind == "peagle" else "Eagle3Speculator"]
        config["embed_requires_grad"] = own.embedding == "own"
        if kind == "peagle":
            config["mask_token_id"] = own.mask_token_id
            tensors["mask_hidden"] = tensors["mask_hidden"].unsqueeze(0)
        # Its loader leaves an embedding that is missing as it finds it in memory.
        embedding = weight_of(drafter.target.get_input_embeddings()).to(drafter.dtype)
        tensors.setdefault("embed_tokens.weight", embedding)
        return Checkpoint(config, _written(tensors, SPECULATORS_3))
    ids = ids_by_output if form == "sglang" else ids_by_input
    config |= said | (READS_FINAL_STATE if final else ids(layers))
    if own.norm_before_fc and form == _TENSORRT:  # which looks for it there
        config["eagle_config"] = {"norm_before_fc": True}
    if drafter.independent:
        config |= {"ptd_token_id": own.mask_token_id, "num_depths": own.depths}
    arch = "Eagle3Qwen3ForCausalLM" if layer.get("qk_norm") else "LlamaForCausalLMEagle3"
    config["architectures"] = [arch]
    return Checkpoint(config, _written(tensors, AUTHORS_3))


def _leave_out_fc(drafter: Any, tensors: dict[str, Tensor], form: str) -> None:
    """Leave out what changes nothing of the target's final state, which engines hand over as it is;
    an ArtifactError where something is done to it."""
    own, mixed = drafter.config, tensors.pop("fc.weight")
    same = mixed.shape[0] == mixed.shape[1] and mixed.equal(torch.eye(len(mixed)).to(mixed))
    if not same or own.norm_before_fc or own.fc_norm or drafter.independent:
        raise cannot_be_written(
            form, "it reads what the target's last norm returns, and the engine hands that to the "
            "first layer as it is, without fc and norms before it",
            "decode with it here, or train it with other drafter.feature_layers",
        )  # fmt: skip


def _written(tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    return {with_prefix(name, names): tensor for name, tensor in tensors.items()}


Forms = dict[str, Callable[[Any], Checkpoint]]

EAGLE1: Forms = {form: partial(_write_eagle1, form=form) for form in _FORMS}
EAGLE3: Forms = {
    form: partial(_write_eagle3, form=form) for form in (*_FORMS, _TENSORRT, _LLAMA_CPP)
}
"""What writes a drafter in each format."""
