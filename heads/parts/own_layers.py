"""Layers of a drafter's own: Llama's, in the target's sizes, or some of the target's, copied.

A published head may also have norms of queries and keys, layers that see a window of the text
alone, or rotary positions that turn a share of each head: these are Qwen3's layers, with the same
names, and the attention of `own_attention`.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    LlamaConfig,
    LlamaModel,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3Model,
)
from transformers.cache_utils import (
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from ..core import LayerShape, OptionError, decoder_layers, decoder_of, weight_of
from ..core.errors import brief
from ..core.layer_sizes import inner_size, layer_configs
from ..core.masks import KEEPS_NOTHING
from ..declared.layer import Layer
from .own_attention import fit_attention, rotary_of, turns_a_share

_SIZES = {
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "num_hidden_layers", "rms_norm_eps", "hidden_act", "attention_bias",
}  # fmt: skip
"""What both kinds of layers know by the names of `Layer`."""

_WRITES = {
    "o_proj", "out_proj", "dense", "c_proj", "down_proj", "dense_4h_to_h", "fc2", "w2",
    "output_linear",
}  # fmt: skip
"""The last layers of attention and of MLPs, by the names that they have in transformers."""

_NOT_LLAMA = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Of rotary positions: what `Layer` names by itself, and what layers of Llama do not have."""

_LAST_NORMS = {"norm", "final_layernorm", "final_layer_norm", "norm_f", "ln_f", "embedding_norm"}
"""Names in transformers of the norm after all layers."""

_NUMBERS = {"attn_layer_indices", "hybrid_layer_ids", "mlp_only_layers"}
"""Where configs list the numbers of some layers."""

_OF_EACH_LAYER = {"intermediate_size", "activation_sparsity_pattern"}
"""What configs may list for every layer, beside what has "layer" in its name."""

_DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers")
"""How many layers a mixture of experts begins with that have none, by the names in configs."""


_NORM_EPS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon")
"""What configs call that which norms add to the variance."""


def norm_eps(config: PreTrainedConfig) -> float:
    """What the norms of a language model's layers add to the variance; 1e-6 where it says none."""
    found = (getattr(config, name, None) for name in _NORM_EPS)
    return next((eps for eps in found if eps is not None), 1e-6)


def layer_like(target: PreTrainedModel) -> dict[str, Any]:
    """A Llama layer of the target's sizes, as plain data; published heads are such layers.

    Where the target's layers differ in size, it is that of the first one.
    """
    text = layer_configs(target.config.get_text_config(decoder=True))[0]
    heads = text.num_attention_heads
    rope = getattr(text, "rope_parameters", None) or {}
    nested = next((value for value in rope.values() if isinstance(value, dict)), rope)
    return {
        "hidden_size": text.hidden_size,
        "intermediate_size": inner_size(text),
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
        "rms_norm_eps": norm_eps(text),
        "rope_theta": nested.get("rope_theta", 10_000.0),
    }


def llama_like(target: PreTrainedModel) -> dict[str, Any]:
    """The same, with fewer heads where the target's do not divide the hidden size.

    Configs of Llama cannot say so many, and so no other project could run the layer.
    """
    layer = layer_like(target)
    most = range(layer["num_attention_heads"], 0, -1)
    heads = next(count for count in most if layer["hidden_size"] % count == 0)
    keys = math.gcd(heads, layer["num_key_value_heads"])
    return layer | {"num_attention_heads": heads, "num_key_value_heads": keys}


def like_published(target: PreTrainedModel) -> dict[str, Any]:
    """The target's own layer, for checkpoints whose layer has the target's config.

    It says what `layer_like` leaves at Llama's defaults: the activation, scaled rotary positions.
    """
    text = target.config.get_text_config(decoder=True)
    rope = dict(getattr(text, "rope_parameters", None) or {})
    for name in _NOT_LLAMA:
        rope.pop(name, None)
    layer = layer_like(target)
    if rope.get("rope_type", "default") != "default":
        layer |= {"rope_scaling": rope, "max_position_embeddings": text.max_position_embeddings}
    if (activation := getattr(text, "hidden_act", "silu")) != "silu":
        layer["hidden_act"] = activation
    return layer


def own_layers(layer: dict[str, Any]) -> tuple[LlamaModel | Qwen3Model, list[LayerShape]]:
    """Decoder layers, read by `inputs_embeds` alone and without a final norm, and what they cache.

    `layer` is as of `layer_like`; it may say more of what `Layer` knows.

    Raises:
        ValueError: see `Layer.of`.
    """
    made = Layer.of(layer)
    rope = {"rope_type": "default", **(made.rope_scaling or {}), "rope_theta": made.rope_theta}
    rope |= {} if (share := made.partial_rotary_factor) == 1 else {"partial_rotary_factor": share}
    sizes = {name: value for name, value in vars(made).items() if name in _SIZES}
    sizes |= {"vocab_size": 1, "rope_parameters": rope, "bos_token_id": None, "eos_token_id": None}
    if (positions := made.max_position_embeddings) is not None:
        sizes["max_position_embeddings"] = positions
    count, window = made.num_hidden_layers, made.sliding_window
    if made.llama:
        config: Any = LlamaConfig(**sizes, mlp_bias=made.mlp_bias)
    else:
        types = made.layer_types or ["full_attention"] * count
        config = Qwen3Config(
            **sizes, use_sliding_window=window is not None, sliding_window=window, layer_types=types
        )
        config.use_qk_norm = made.qk_norm
    config._attn_implementation = "sdpa"
    kind: Any = LlamaModel if made.llama else Qwen3Model
    model = kind(config)
    for each in model.layers:
        fit_attention(each, config)
    if turns_a_share(config):
        model.rotary_emb = rotary_of(config)  # type: ignore[assignment]
    del model.embed_tokens
    model.norm = nn.Identity()  # type: ignore[assignment]
    cached = made.num_key_value_heads, made.head_dim
    return model, [LayerShape(torch.device("cpu"), torch.float32, cached, cached)] * count


def unit_scale_init(model: nn.Module) -> None:
    """Random weights that keep the size of what passes through, however wide the layers are."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)


def compute_experts_alike(model: PreTrainedModel, target: PreTrainedModel) -> None:
    """Compute the experts of a model as the target's are: not every way knows every dtype."""
    text = target.config.get_text_config(decoder=True)
    if (chosen := getattr(text, "_experts_implementation", None)) is not None:
        model.config.get_text_config(decoder=True)._experts_implementation = chosen


def silence(model: nn.Module) -> None:
    """Zero what the parts of decoder layers write into the hidden state: they add nothing yet."""
    for name, parameter in model.named_parameters():
        if _WRITES.intersection(name.split(".")):
            parameter.data.zero_()


def scale_of(norm: nn.Module) -> Tensor:
    """What a norm multiplies by, [D], also where it stores that - 1, centres, or adds a bias."""
    weight: Any = norm.weight
    signs = torch.ones_like(weight)
    signs[::2] = -1
    return (norm(signs) - norm(-signs)) * signs / 2


def added_to_scale(norm: nn.Module) -> Tensor:
    """What a norm adds to the scale that it stores: 1 in some kinds of norms, else 0."""
    if getattr(norm, "weight", None) is None:
        return torch.zeros(())
    weight: Any = norm.weight
    return (scale_of(norm) - weight).mean().round()


def norm_scale(target: PreTrainedModel) -> Tensor | None:
    """What a target's last norm multiplies by, [D], for a norm of a drafter to start with.

    None where the target has no such norm, or one that stores nothing (OLMo, NanoChat).
    """
    norm = last_norm(decoder_of(target))
    return None if getattr(norm, "weight", None) is None else scale_of(norm)


def last_norm(decoder: nn.Module) -> Any:
    """The norm after a model's layers; None where it has none that is known here."""
    return next((norm for name, norm in decoder.named_children() if name in _LAST_NORMS), None)


def recurrent_layers(config: PreTrainedConfig) -> set[int]:
    """The numbers of a language model's layers that keep a state of the whole text.

    Linear attention, state spaces and short convolutions; a layer that also attends is one.
    """
    return {n for n, layer in enumerate(_cached(config)) if _recurs(layer)}


def attending_layers(config: PreTrainedConfig, alone: bool = True) -> list[int]:
    """The numbers of a language model's layers that attend.

    Args:
        alone: leave out those that are recurrent, too.
    """
    cached = _cached(config)
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or [""] * len(cached)
    attend = [
        n
        for n, kind in enumerate(kinds)
        if kind not in KEEPS_NOTHING and type(cached[n]) is not LinearAttentionLayer
    ]
    return [n for n in attend if not (alone and _recurs(cached[n]))]


def _cached(config: PreTrainedConfig) -> list[Any]:
    """What transformers caches of each layer of a language model, empty.

    Some releases have nothing there for last layers that read others' keys and values: None here.
    """
    text = config.get_text_config(decoder=True)
    cache: Any = DynamicCache(config=text)
    return [*cache.layers, *[None] * (text.num_hidden_layers - len(cache.layers))]


def _recurs(layer: Any) -> bool:
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def keep_layers(config: Any, chosen: Sequence[int]) -> None:
    """Make a language model's config that of a model of some of its layers."""
    count, sizes = config.num_hidden_layers, None
    for name, value in config.to_dict().items():
        listed = "layer" in name or name in _OF_EACH_LAYER
        if name in _NUMBERS and value is not None:
            setattr(config, name, [own for own, layer in enumerate(chosen) if layer in value])
        elif name == "per_layer_config" and value is not None:  # by the layers' numbers
            sizes = {int(layer): each for layer, each in value.items()}
        elif listed and isinstance(value, list) and len(value) == count:
            setattr(config, name, [value[layer] for layer in chosen])
        elif name in _DENSE_FIRST and isinstance(value, int):
            setattr(config, name, sum(layer < value for layer in chosen))
        elif name == "num_kv_shared_layers" and value:  # the last ones have no keys of their own
            setattr(config, name, sum(layer >= count - value for layer in chosen))
    config.num_hidden_layers = len(chosen)
    if sizes is not None:
        config.per_layer_config = {
            own: sizes[layer] for own, layer in enumerate(chosen) if layer in sizes
        }


def layers_of(config: PreTrainedConfig, chosen: Sequence[int]) -> PreTrainedConfig:
    """The config of a model made of some layers of another, which must be its decoder alone.

    Raises:
        OptionError: it is more than a decoder, none of the layers attends, or transformers makes no
            such model of these layers.
    """
    if config.get_text_config(decoder=True) is not config:
        raise OptionError(
            f"{config.model_type} is more than a language model, so no student can be made of its "
            "layers; give drafter.model, a smaller model with the same tokenizer."
        )
    attending = attending_layers(config, alone=False)
    if not set(attending).intersection(chosen):
        raise OptionError(
            f"none of the layers {list(chosen)} of {config.model_type} attends; expected at least "
            f"one of {attending} among them."
        )
    student = copy.deepcopy(config)
    keep_layers(student, chosen)
    if shared := getattr(student, "num_kv_shared_layers", 0):
        types: Any = student.layer_types
        if missing := sorted({*types[-shared:]} - {*types[:-shared]}):
            raise OptionError(
                f"the last {shared} of the layers {list(chosen)} of {config.model_type} read keys "
                f"of an earlier {missing[0]} layer, and there is none; choose one, too."
            )
    try:
        AutoConfig.for_model(**student.to_dict())
    except StrictDataclassError as error:
        raise OptionError(
            f"transformers makes no {config.model_type} of the layers {list(chosen)} alone "
            f"({brief(error.__cause__ or error, 100)}); choose others, or use a drafter of another "
            "family, such as eagle3."
        ) from error
    return student


@torch.no_grad()
def copy_layers(target: PreTrainedModel, student: PreTrainedModel, chosen: Sequence[int]) -> None:
    """Copy the chosen layers of a target to the student's, and all that is outside of layers."""
    layers = decoder_layers(target)
    prefix = next(name for name, module in target.named_modules() if module is layers)
    for name, tensor in student.state_dict().items():
        if name.startswith(f"{prefix}."):
            layer, _, rest = name.removeprefix(f"{prefix}.").partition(".")
            name = f"{prefix}.{chosen[int(layer)]}.{rest}"
        module, _, name = name.rpartition(".")
        weight = weight_of(target.get_submodule(module), name)
        if weight.shape != tensor.shape:
            weight = _parts(weight, tensor.shape, len(layers), chosen)
        tensor.copy_(weight)


def _parts(weight: Tensor, shape: torch.Size, count: int, chosen: Sequence[int]) -> Tensor:
    """Of a weight with a part for each layer, the parts of the chosen ones: Gemma 4 has a table of
    embeddings [V, L * d] for all of its layers, and a projection [L * d, D]."""
    dim = 1 if weight.shape[0] == shape[0] else 0
    return torch.cat([weight.chunk(count, dim)[layer] for layer in chosen], dim)
