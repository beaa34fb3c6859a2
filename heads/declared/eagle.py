"""What the configs of EAGLE-1 and EAGLE-3 declare."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..core import OptionError
from .fields import Shapes, VocabularyFields
from .layer import Layer, LayerFields

_LAYERS, _FIRST = "model.layers.", "model.layers.0."


@dataclass(kw_only=True, repr=False)
class EagleFields(LayerFields):
    """EAGLE-1's shape.

    Attributes:
        depths: K, how many tokens in a row a training loss covers: for EAGLE-1 published is 1. With
            more it learns from its own hidden states, as it drafts (HASS, arXiv 2408.15766).
        bias: whether the layer that mixes a feature and a token has a bias, as published; vLLM only
            runs heads without one.
        output: the output layer: `shared`, the target's; `trimmed`, for the `draft_vocab_size` most
            frequent tokens of the corpus; or `own`, as in some published heads.
    """

    depths: int = 4
    bias: bool = True

    OPTIONS: ClassVar[tuple[str, ...]] = (
        *("depths", "bias", "output", "draft_vocab_size", "partial_rotary_factor"),
    )
    RANGES: ClassVar = {
        "at least 1": ("depths",),
        "more than 0, at most 1": ("partial_rotary_factor",),
    }

    def shapes(self) -> Shapes:
        layer, size = Layer.of(self.layer), self.hidden_size
        found = super().shapes() | self.embedding_shapes(layer.hidden_size)
        found |= layer.shapes(_LAYERS) | {"fc.weight": [size, 2 * size]}
        del found[f"{_FIRST}input_layernorm.weight"]
        if self.bias:
            found["fc.bias"] = [size]
        if self.output != "shared":
            found["lm_head.weight"] = [self.output_size, size]
        return found


@dataclass(kw_only=True, repr=False)
class Eagle3Fields(EagleFields):
    """EAGLE-3's shape.

    Attributes:
        feature_layers: the target's layers whose input it reads; empty for the published three, of
            L layers 2, L ÷ 2 and L - 3.
        depths: K, how many tokens in a row a training loss covers; with `mask_token_id`, how many
            are drafted at once.
        output: the output layer: `own`, or `trimmed` for the `draft_vocab_size` most frequent
            tokens of the corpus.
        norm_before_residual: whether the layer adds to its normalised input, as heads of
            speculators do, or to the input itself.
        norm_before_fc: whether one norm reads the features of all layers together, before `fc`.
        fc_norm: whether a norm reads the features of each layer, before `fc`.
        norm_output: whether the normed state, which the output layer reads, is also the hidden
            state of the next pair.
        layers: how many decoder layers there are; the first one mixes tokens and features.
        mask_token_id: the token that stands for those not known yet in a head that drafts all
            `depths` tokens at once (P-EAGLE); null for one that drafts one after another.
        kept: with `mask_token_id`, the share of one depth's positions that a training step takes
            for the next depth (conditional drop-token).
        least_kept: with `mask_token_id`, the least share of all positions that it takes for a
            depth.
    """

    feature_layers: list[int] | tuple[int, ...] = ()
    depths: int = 7
    output: Literal["own", "trimmed"] = "own"
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    layers: int = 1
    mask_token_id: int | None = None
    kept: float = 0.7
    least_kept: float = 0.2

    OPTIONS: ClassVar[tuple[str, ...]] = (
        *("feature_layers", "depths", "output", "draft_vocab_size"),
        *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
        *("layers", "partial_rotary_factor", "mask_token_id", "kept", "least_kept"),
    )
    RANGES: ClassVar = {
        "at least 1": ("depths", "layers"), "0 … 1": ("kept", "least_kept"),
        "more than 0, at most 1": ("partial_rotary_factor",),
    }  # fmt: skip
    NEEDS: ClassVar = {"kept": "mask_token_id", "least_kept": "mask_token_id"}

    @property
    def max_depth(self) -> int | None:
        return None if self.mask_token_id is None else self.depths

    def validate_norms(self) -> None:
        """Part of the config's own validation."""
        if self.norm_before_fc and self.fc_norm:
            raise OptionError(
                "drafter.norm_before_fc and drafter.fc_norm are both true; expected one of them."
            )

    def shapes(self) -> Shapes:
        layer, count = Layer.of(self.layer), len(self.feature_layers) or 3
        size, wide = layer.hidden_size, self.hidden_size
        found = VocabularyFields.shapes(self) | self.embedding_shapes(size)
        found |= layer.shapes(_LAYERS) | {f"{_FIRST}hidden_norm.weight": [size]}
        for name in "qkv":
            found[f"{_FIRST}self_attn.{name}_proj.weight"][1] = 2 * size
        found |= {
            "fc.weight": [size, count * wide], "norm.weight": [size],
            "lm_head.weight": [self.output_size, size],
        }  # fmt: skip
        if self.norm_before_fc:
            found["input_norm.weight"] = [count * wide]
        if self.fc_norm:
            found |= {f"fc_norm.{number}.weight": [wide] for number in range(count)}
        if self.mask_token_id is not None:
            found["mask_hidden"] = [count * wide]
        return found
