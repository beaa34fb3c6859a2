"""What the config of a Gemma 4 assistant declares."""

from dataclasses import dataclass, field
from typing import ClassVar

from ..core import OptionError, brief
from .fields import MOST_PARTS, Fields, Shapes

KINDS = ("full_attention", "sliding_attention")
"""The types of attention that layers may have, by the names of transformers."""


@dataclass(kw_only=True, repr=False)
class Gemma4AssistantFields(Fields):
    """A Gemma 4 assistant's shape.

    Attributes:
        feature_layers: the target's final hidden state, and the input of the layer whose keys and
            values are read, for each of the `kinds` in alphabetical order; () for the target's.
        kinds: the type of attention of each layer, of `KINDS`.
        width: W, the size of its hidden states.
        inner_dim: the width of its MLPs.
        query_heads: H, the heads of its queries.
        head_dims: the size of a head by the type of attention, as in the target.
        window: how many keys before the newest one layers with a window see, beside that one.
        eps: what norms add to the variance; activation: of MLPs, by transformers' name.
        centroids: C, of the groups into which the vocabulary is divided; 0 where every token has a
            logit.
        top_centroids: in how many of the groups tokens have one.
    """

    feature_layers: list[int] | tuple[int, ...] = ()
    kinds: list[str] = field(default_factory=list)
    width: int = 256
    inner_dim: int = 2048
    query_heads: int = 4
    head_dims: dict[str, int] = field(default_factory=dict)
    window: int = 512
    eps: float = 1e-6
    activation: str = "gelu_pytorch_tanh"
    centroids: int = 0
    top_centroids: int = 32

    OPTIONS: ClassVar = (
        *("feature_layers", "kinds", "width", "inner_dim", "query_heads", "head_dims", "window"),
        *("eps", "activation", "centroids", "top_centroids"),
    )
    RANGES: ClassVar = {
        "at least 0": ("window", "centroids"),
        "at least 1": ("width", "inner_dim", "query_heads", "top_centroids"),
    }

    def validate_kinds(self) -> None:
        """Part of the config's own validation."""
        if unknown := sorted(set(self.kinds) - set(KINDS)):
            raise OptionError(
                f"drafter.kinds has {brief(repr(unknown[0]), 80)}; expected any of "
                f"{', '.join(KINDS)}."
            )
        if len(self.kinds) > MOST_PARTS:
            raise OptionError(
                f"drafter.kinds has {len(self.kinds)} layers; expected at most {MOST_PARTS}."
            )
        if self.head_dims and not all(self.head_dims.get(kind, 0) > 0 for kind in self.kinds):
            raise OptionError(
                f"drafter.head_dims is {brief(self.head_dims, 80)}; expected a size of at least 1 "
                "for each of drafter.kinds."
            )

    def validate_centroids(self) -> None:
        """Part of the config's own validation: groups of one size, of which there are enough."""
        if not self.centroids:
            return
        if self.vocab_size % self.centroids or self.top_centroids > self.centroids:
            raise OptionError(
                f"drafter.centroids is {self.centroids} and drafter.top_centroids "
                f"{self.top_centroids}; expected a divisor of the vocabulary's {self.vocab_size} "
                "tokens, and no more than that."
            )

    def shapes(self) -> Shapes:
        size, inner = self.width, self.inner_dim
        found: Shapes = {"model.norm.weight": [size], "lm_head.weight": [self.vocab_size, size]}
        found |= {
            "pre_projection.weight": [size, 2 * self.hidden_size],
            "post_projection.weight": [self.hidden_size, size],
        }
        if self.centroids:
            found["masked_embedding.centroids.weight"] = [self.centroids, size]
            found["masked_embedding.token_ordering"] = [self.vocab_size]
        for number, kind in enumerate(self.kinds):
            head, name = self.head_dims[kind], f"model.layers.{number}"
            queries = self.query_heads * head
            found |= {
                f"{name}.layer_scalar": [1],
                f"{name}.self_attn.q_proj.weight": [queries, size],
                f"{name}.self_attn.q_norm.weight": [head],
                f"{name}.self_attn.o_proj.weight": [size, queries],
                f"{name}.mlp.gate_proj.weight": [inner, size],
                f"{name}.mlp.up_proj.weight": [inner, size],
                f"{name}.mlp.down_proj.weight": [size, inner],
            }
            for place in ("pre_feedforward", "post_feedforward", "post_attention", "input"):
                found[f"{name}.{place}_layernorm.weight"] = [size]
        return found
