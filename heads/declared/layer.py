"""The decoder layers of a drafter's own: Llama's, or Qwen3's for what only these have."""

import math
from dataclasses import dataclass, fields
from typing import Any, Self

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError

from ..core import brief
from .fields import MOST_PARTS, Shapes, VocabularyFields


@strict
@dataclass(kw_only=True)
class Layer:
    """A layer's sizes, by the names of `LlamaConfig`.

    Attributes:
        rope_theta, rope_scaling: of rotary positions; the second None where they are not scaled.
        partial_rotary_factor: which share of each head rotary positions turn, its first ones.
        qk_norm: whether queries and keys are normed in each head.
        sliding_window, layer_types: which layers see so many positions alone.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: int | float
    rope_theta: int | float
    rope_scaling: dict[str, Any] | None = None
    partial_rotary_factor: int | float = 1
    max_position_embeddings: int | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    num_hidden_layers: int = 1

    def validate_sizes(self) -> None:
        """Part of its own validation."""
        sizes = (
            self.hidden_size, self.intermediate_size, self.num_attention_heads,
            self.num_key_value_heads, self.head_dim, self.num_hidden_layers,
        )  # fmt: skip
        if min(sizes) < 1:
            raise ValueError(f"a size is {brief(min(sizes), 20)}, expected at least 1")
        if self.num_hidden_layers > MOST_PARTS:
            many = brief(self.num_hidden_layers, 20)
            raise ValueError(f"it has {many} layers, expected at most {MOST_PARTS}")
        heads = self.num_attention_heads
        if heads % self.num_key_value_heads or (self.mlp_bias and self.hidden_size % heads):
            raise ValueError(
                f"hidden_size {self.hidden_size}, num_attention_heads {heads} and "
                f"num_key_value_heads {self.num_key_value_heads} do not go together"
            )
        for name in ("rope_theta", "rms_norm_eps", "sliding_window"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; expected a number above 0")
        turned = int(self.head_dim * self.partial_rotary_factor)
        if self.partial_rotary_factor != 1 and (turned % 2 or not 0 < turned < self.head_dim):
            raise ValueError(
                f"partial_rotary_factor {self.partial_rotary_factor} of head_dim {self.head_dim} "
                "is no even number of dimensions"
            )

    @classmethod
    def of(cls, layer: dict[str, Any] | None) -> Self:
        """The layer that a config describes; what is not known and None is left out.

        Raises:
            ValueError: there is none, or it sets what no layer has, or to another kind of value.
        """
        known = {field.name for field in fields(cls)}
        given = {n: value for n, value in (layer or {}).items() if n in known or value is not None}
        if unknown := sorted(given.keys() - known):
            raise ValueError(f"layer sets {brief(unknown[0], 80)}, which no Llama layer has")
        try:
            return cls(**given)
        except (TypeError, StrictDataclassError) as error:  # a size is missing, or of another kind
            raise ValueError(f"layer cannot be one of Llama's ({brief(error)})") from error

    @property
    def llama(self) -> bool:
        """Whether it is a layer of Llama; else one of Qwen3, whose heads need not divide D."""
        divided = self.hidden_size % self.num_attention_heads == 0
        own = self.qk_norm or self.partial_rotary_factor != 1
        return divided and self.sliding_window is None and not own

    @property
    def plain(self) -> bool:
        """Whether nothing in it has a meaning that only transformers knows."""
        said = (self.rope_scaling, self.sliding_window, self.layer_types)
        return self.hidden_act == "silu" and said == (None, None, None)

    def shapes(self, prefix: str) -> Shapes:
        """The tensors of all layers; names begin with `prefix` and the layer's number."""
        size, inner = self.hidden_size, self.intermediate_size
        queries, keys = (
            count * self.head_dim for count in (self.num_attention_heads, self.num_key_value_heads)
        )
        products = {
            "self_attn.q_proj": (queries, size), "self_attn.k_proj": (keys, size),
            "self_attn.v_proj": (keys, size), "self_attn.o_proj": (size, queries),
            "mlp.gate_proj": (inner, size), "mlp.up_proj": (inner, size),
            "mlp.down_proj": (size, inner),
        }  # fmt: skip
        biased = {"self_attn": self.attention_bias, "mlp": self.mlp_bias and self.llama}
        one: Shapes = {}
        for name, (rows, columns) in products.items():
            one[f"{name}.weight"] = [rows, columns]
            if biased[name.partition(".")[0]]:
                one[f"{name}.bias"] = [rows]
        for name in ("input_layernorm", "post_attention_layernorm"):
            one[f"{name}.weight"] = [size]
        if self.qk_norm:
            one |= {f"self_attn.{name}_norm.weight": [self.head_dim] for name in "qk"}
        numbers = range(self.num_hidden_layers)
        return {f"{prefix}{n}.{name}": [*shape] for n in numbers for name, shape in one.items()}


@dataclass(kw_only=True, repr=False)
class LayerFields(VocabularyFields):
    """What the config of a drafter with decoder layers of its own declares.

    Attributes:
        layer: the decoder layers' sizes, see `Layer`; by default of the target's own.
        partial_rotary_factor: which share of each head, its first dimensions, rotary positions
            turn: all in most published drafters, fewer in targets such as GLM and Qwen3.5.
    """

    layer: dict[str, Any] | None = None
    partial_rotary_factor: float = 1.0

    @property
    def decided(self) -> bool:
        return Layer.of(self.layer).plain

    def own_layer(self, layer: dict[str, Any], **more: Any) -> dict[str, Any]:
        """A layer of these sizes and more, with the config's share of rotary positions."""
        share = self.partial_rotary_factor
        return layer | more | ({} if share == 1 else {"partial_rotary_factor": share})
