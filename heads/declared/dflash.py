"""What DFlash's config declares."""

from dataclasses import dataclass
from itertools import product
from typing import ClassVar, Literal

from ..core import OptionError
from .fields import Shapes
from .layer import Layer, LayerFields


@dataclass(kw_only=True, repr=False)
class DFlashFields(LayerFields):
    """DFlash's shape.

    Attributes:
        layers: how many decoder layers there are.
        depths: K, how many tokens are drafted at once. A published block of 16 is the newest token
            and 15 drafts or, with `sample_from_anchor`, 16 drafts.
        feature_layers: the target's layers whose input it reads; empty for as many as it has layers
            of its own, evenly spread.
        mask_token_id: the token whose embedding stands where a token is not known yet; null for the
            last of the vocabulary, which most models never write.
        causal: whether a place of the block sees only the places before it (JetSpec), or all.
        window: how many positions, its own included, every layer but the last sees; 0 where all
            layers see the whole text.
        causal_windows: whether in layers with a window a place sees only the places before it, also
            where `causal` is false; published ones are so.
        sample_from_anchor: whether the newest token's own place predicts the first draft (DSpark).
        markov_rank: rank of the term that the token before a draft adds to its logits (DSpark); 0
            for none.
        markov_head_type: what that term also depends on: nothing (vanilla), the draft's own state
            (gated), or that and all drafts before (rnn).
        domino_rank: rank of a term that depends on the draft's own state and, by a GRU, on all
            drafts before (Domino); 0 for none. Its authors call it emb_dim, and take 256.
        gru_hidden_dim: the size of that GRU.
        pure_draft_prefix_len: to how many drafts, the first of a block, that term adds nothing.
        selector_rank: rank of a term that also depends on the draft's own state (DFlash2); 0 for
            none.
        selector_top_k: with `selector_rank`, among how many tokens, the best without the term, a
            draft is chosen; 0 for all.
        conv_kernel_size: how many places a layer's convolutions mix (DFlash2); 0 for none.
        conv_group_size: how many channels share a convolution's weights.
        output_multiplier, final_logit_softcapping: what is done to the output layer's logits, a
            factor and then a soft cap; None for no cap.
        anchors: from how many positions of a row, chosen anew in every step, a training step
            drafts; 0 for all.
    """

    layers: int = 5
    depths: int = 15
    feature_layers: list[int] | tuple[int, ...] = ()
    output: Literal["shared", "trimmed"] = "shared"
    mask_token_id: int | None = None
    causal: bool = False
    window: int = 0
    causal_windows: bool = True
    sample_from_anchor: bool = False
    markov_rank: int = 0
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    domino_rank: int = 0
    gru_hidden_dim: int = 1024
    pure_draft_prefix_len: int = 1
    selector_rank: int = 0
    selector_top_k: int = 16
    conv_kernel_size: int = 0
    conv_group_size: int = 16
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    anchors: int = 512

    OPTIONS: ClassVar[tuple[str, ...]] = (
        *("depths", "layers", "feature_layers", "output", "draft_vocab_size"),
        *("mask_token_id", "causal", "window", "causal_windows"),
        *("sample_from_anchor", "markov_rank", "markov_head_type", "anchors"),
        *("domino_rank", "gru_hidden_dim", "pure_draft_prefix_len", "partial_rotary_factor"),
        *("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size"),
    )
    RANGES: ClassVar = {
        "at least 1": ("depths", "layers", "conv_group_size", "gru_hidden_dim"),
        "at least 0": (
            *("markov_rank", "anchors", "window", "domino_rank", "pure_draft_prefix_len"),
            *("selector_rank", "selector_top_k", "conv_kernel_size"),
        ),
        "more than 0": ("output_multiplier",),
        "more than 0, at most 1": ("partial_rotary_factor",),
    }
    NEEDS: ClassVar = {
        "causal_windows": "window",
        "markov_head_type": "markov_rank",
        "gru_hidden_dim": "domino_rank",
        "pure_draft_prefix_len": "domino_rank",
        "selector_top_k": "selector_rank",
        "conv_group_size": "conv_kernel_size",
    }

    @property
    def max_depth(self) -> int:
        return self.depths

    def validate_terms(self) -> None:
        """Part of the config's own validation."""
        terms = ("markov_rank", "selector_rank", "domino_rank")
        if len(there := [name for name in terms if getattr(self, name)]) > 1:
            found = " and ".join(f"drafter.{name} is {getattr(self, name)}" for name in there)
            raise OptionError(f"{found}; expected one of these terms.")
        if self.conv_kernel_size and self.hidden_size % self.conv_group_size:
            raise OptionError(
                f"drafter.conv_group_size is {self.conv_group_size}, which does not divide the "
                f"hidden size {self.hidden_size}; expected a divisor of it."
            )

    def is_causal(self, window: int | None) -> bool:
        """Whether a place does not see those after it, in layers with such a window or none."""
        return self.causal or (window is not None and self.causal_windows)

    @property
    def windows_both_ways(self) -> bool:
        """Whether there are layers with a window in which a place sees those after it."""
        return bool(self.window) and not self.is_causal(self.window)

    def shapes(self) -> Shapes:
        layer, size = Layer.of(self.layer), self.hidden_size
        wide, rank = (len(self.feature_layers) or self.layers) * size, self.markov_rank
        found = super().shapes() | self.embedding_shapes(size) | layer.shapes("model.layers.")
        found |= {"fc.weight": [size, wide], "hidden_norm.weight": [size], "norm.weight": [size]}
        if self.output == "trimmed":
            found["lm_head.weight"] = [self.output_size, size]
        for number, tokens in ((1, self.vocab_size), (2, self.output_size)):
            if rank:
                found[f"markov_head.markov_w{number}.weight"] = [tokens, rank]
        if rank and self.markov_head_type != "vanilla":
            gated = self.markov_head_type == "gated"
            name = f"markov_head.{'gate' if gated else 'joint'}_proj"
            out, read = (rank, size + rank) if gated else (3 * rank, 2 * rank + size)
            found |= {f"{name}.weight": [out, read], f"{name}.bias": [out]}
        if rank := self.domino_rank:
            wide = self.gru_hidden_dim
            found |= {
                "domino.gru_input.weight": [3 * wide, size],
                "domino.gru_state.weight": [3 * wide, wide],
                "domino.inner.weight": [rank, size + wide],
                "domino.outer.weight": [self.output_size, rank],
            }
        if rank := self.selector_rank:
            found |= {
                "candidate_selector.predecessor_codebook.weight": [self.vocab_size, rank],
                "candidate_selector.successor_codebook.weight": [self.output_size, rank],
                "candidate_selector.hidden_projection.weight": [rank, size],
            }
        if kernel := self.conv_kernel_size:
            groups = size // self.conv_group_size
            for number, part in product(range(layer.num_hidden_layers), ("attention", "mlp")):
                name = f"model.layers.{number}.{part}_conv"
                found[f"{name}.base_kernel"] = [2, kernel, size]
                found[f"{name}.kernel_projection.weight"] = [2 * kernel * groups, size]
        return found
