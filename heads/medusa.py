"""Medusa heads (Cai et al. 2024, arXiv 2401.10774): K independent heads on the final hidden state.

Head k (1 … K) reads the target's feature at token t and predicts token t + k + 1; the target's own
output layer predicts t + 1. A head is L residual blocks x + SiLU(Wx + b) and an output layer. All
heads live in one stacked parameter, so a round costs one batched product per block.
"""

from typing import ClassVar, Literal

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F

from .core import OptionError, output_layer
from .drafter import Drafter, DrafterConfig, Step, last_true


@strict
class MedusaConfig(DrafterConfig):
    """Medusa's shape.

    Attributes:
        heads: K, how many tokens beyond the next one are predicted.
        layers: L residual blocks per head.
        output: which output layer turns a head's state into logits: `shared` borrows the target's
            (nothing to store), `own` gives each head its own copy, `trimmed` gives each head its
            own over the `draft_vocab_size` most frequent tokens of the corpus.
        draft_vocab_size: size of the trimmed vocabulary; 0 unless `output` is `trimmed`.
    """

    model_type = "headstart_medusa"
    heads: int = 4
    layers: int = 1
    output: Literal["shared", "own", "trimmed"] = "shared"
    draft_vocab_size: int = 0

    OPTIONS: ClassVar[tuple[str, ...]] = ("heads", "layers", "output", "draft_vocab_size")

    def validate_medusa(self) -> None:
        """Part of the config's own validation: what single fields cannot say."""
        if self.heads < 1 or self.layers < 1:
            raise OptionError(
                f"drafter.heads is {self.heads} and drafter.layers {self.layers}; expected at "
                "least 1 each."
            )
        size = self.draft_vocab_size
        if (self.output == "trimmed") != (size > 0) or size > max(self.vocab_size, 0):
            raise OptionError(
                f"drafter.draft_vocab_size is {size} with output {self.output!r}; expected "
                f"1 … {self.vocab_size} with 'trimmed' and 0 otherwise."
            )


class Medusa(Drafter):
    """K heads that answer for every depth from one `begin`."""

    config_class = MedusaConfig
    config: MedusaConfig
    vocabulary: Tensor
    independent = True

    def __init__(self, config: MedusaConfig):
        super().__init__(config)
        heads, size = config.heads, config.hidden_size
        width = config.draft_vocab_size or config.vocab_size
        self.weight = nn.Parameter(torch.empty(config.layers, heads, size, size))
        self.bias = nn.Parameter(torch.empty(config.layers, heads, size))
        self.output = None
        if config.output != "shared":
            self.output = nn.Parameter(torch.empty(heads, width, size))
        if config.output == "trimmed":
            self.register_buffer("vocabulary", torch.arange(width))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Blocks start as the identity, so a shared output layer starts as the target's own."""
        if module is self:
            nn.init.zeros_(self.weight)
            nn.init.zeros_(self.bias)
            if self.output is not None:
                nn.init.zeros_(self.output)
            if self.config.output == "trimmed":
                self.vocabulary.copy_(torch.arange(len(self.vocabulary)))

    @property
    def max_depth(self) -> int:
        return self.config.heads

    @torch.no_grad()
    def start_from_target(self, token_counts: Tensor | None = None) -> None:
        """Copy the target's output layer into the heads' own before training.

        Args:
            token_counts: [V], how often each token occurs in the corpus; `trimmed` keeps the most
                frequent ones.
        """
        if self.output is None:
            return
        rows = output_layer(self.target).weight  # [V, D]
        if self.config.output == "trimmed":
            if token_counts is None:
                raise OptionError(
                    "a trimmed vocabulary needs the corpus' token counts, found none; pass "
                    "token_counts."
                )
            keep = token_counts.topk(len(self.vocabulary)).indices.sort().values
            self.vocabulary.copy_(keep)
            rows = rows[keep.to(rows.device)]
        self.output.copy_(rows.expand_as(self.output))

    def states(self, features: Tensor) -> Tensor:
        """Head states for features [..., D]: [K, ..., D]."""
        heads, size = self.config.heads, self.config.hidden_size
        flat = features.reshape(1, -1, size).to(self.weight.dtype).expand(heads, -1, -1)
        for weight, bias in zip(self.weight, self.bias, strict=True):
            flat = flat + F.silu(torch.baddbmm(bias.unsqueeze(1), flat, weight.mT))  # [K, M, D]
        return flat.view(heads, *features.shape[:-1], size)

    def logits(self, states: Tensor, head: int | None = None) -> Tensor:
        """Output layer: [K, M, D] -> [K, M, Vd], or the states of one head [M, D] -> [M, Vd]."""
        if self.output is None:
            layer = output_layer(self.target)
            return layer(states.to(layer.weight.dtype))
        if head is not None:
            return states @ self.output[head].T
        return torch.bmm(states, self.output.mT)

    @property
    def draft_vocabulary(self) -> Tensor | None:
        """[Vd] target ids of the trimmed vocabulary; None when the heads know every token."""
        return self.vocabulary if self.config.output == "trimmed" else None

    def begin(self, state: None, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        states = self.states(last_true(features, count))  # [K, B, D]
        return Step(self.logits(states).transpose(0, 1), self.draft_vocabulary)  # [B, K, Vd]
