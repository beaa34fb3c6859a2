"""Medusa heads (Cai et al. 2024, arXiv 2401.10774): K independent heads on the final hidden state.

Head k (1 … K) reads the target's feature at token t and predicts token t + k + 1; the target's own
output layer predicts t + 1. A head is L residual blocks x + SiLU(Wx + b) and an output layer. All
heads live in one stacked parameter, so a round costs one batched product per block.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from .checkpoint import Found
from .core import ArtifactError, OptionError, output_layer
from .drafter import Step, last_true
from .parts.vocabulary import TrimmedVocabulary, VocabularyConfig

_INSIDE = "medusa_head."  # what the names of heads begin with in a whole model's weights
_PLACE = re.compile(r"(\d+)\.\d+\.(linear\.(weight|bias)|weight)")


@strict
class MedusaConfig(VocabularyConfig):
    """Medusa's shape.

    Attributes:
        heads: K, how many tokens beyond the next one are predicted.
        layers: L residual blocks per head.
        output: see `VocabularyConfig`; each head has its own, unless `shared`.
    """

    model_type = "headstart_medusa"
    heads: int = 4
    layers: int = 1
    output: Literal["shared", "own", "trimmed"] = "shared"

    OPTIONS: ClassVar[tuple[str, ...]] = ("heads", "layers", "output", "draft_vocab_size")

    def validate_medusa(self) -> None:
        """Part of the config's own validation: what single fields cannot say."""
        if self.heads < 1 or self.layers < 1:
            raise OptionError(
                f"drafter.heads is {self.heads} and drafter.layers {self.layers}; expected at "
                "least 1 each."
            )


class Medusa(TrimmedVocabulary):
    """K heads that answer for every depth from one `begin`."""

    config_class = MedusaConfig
    config: MedusaConfig
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
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Blocks start as the identity, so a shared output layer starts as the target's own."""
        super()._init_weights(module)
        if module is self:
            nn.init.zeros_(self.weight)
            nn.init.zeros_(self.bias)
            if self.output is not None:
                nn.init.zeros_(self.output)

    @classmethod
    def from_checkpoint(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> Found | None:
        """The authors' heads (github.com/FasterDecoding/Medusa), alone or inside of their target.

        Head k, from 0, has `{k}.{l}.linear.weight` and `.bias` for its blocks l = 0 … L - 1. In the
        first layout its own output layer follows, `{k}.{L}.weight`; in the second all heads use the
        target's. Inside of a model the names begin with `medusa_head.`. K and L are counted: the
        config of a published checkpoint of five heads says two.
        """
        inside = [name for name in tensors if name.startswith(_INSIDE)]
        heads = {n.removeprefix(_INSIDE): tensors[n] for n in inside or tensors}
        places = [_PLACE.fullmatch(name) for name in heads]
        if not heads or not all(places):
            return None
        count = len({place[1] for place in places if place})
        layers = sum(name.startswith("0.") and name.endswith("linear.weight") for name in heads)
        blocks = [[f"{k}.{layer}.linear" for k in range(count)] for layer in range(layers)]
        outputs = [f"{k}.{layers}.weight" for k in range(count)]
        outputs = outputs if outputs[0] in heads else []
        expected = {f"{each}.{part}" for b in blocks for each in b for part in ("weight", "bias")}
        if odd := sorted(heads.keys() ^ expected ^ set(outputs)):
            raise ArtifactError(
                f"of {count} heads of {layers} blocks each {odd[0]} is missing or one too many; "
                "expected heads that are alike."
            )
        found = {
            part: torch.stack(
                [torch.stack([heads[f"{each}.{part}"] for each in b]) for b in blocks]
            )
            for part in ("weight", "bias")
        }  # [L, K, D, D] and [L, K, D]
        known: dict[str, Any] = {"heads": count, "layers": layers}
        known |= {"output": "shared", "hidden_size": found["bias"].shape[-1]}
        if outputs:
            found["output"] = torch.stack([heads[name] for name in outputs])  # [K, V, D]
            known |= {"output": "own", "vocab_size": found["output"].shape[1]}
        return known, found

    @property
    def max_depth(self) -> int:
        return self.config.heads

    @torch.no_grad()
    def init_from_target(self, token_counts: Tensor | None = None) -> None:
        """Copy the target's output layer into the heads' own before training.

        Args:
            token_counts: [V], how often each token occurs in the corpus; `trimmed` keeps the most
                frequent ones.
        """
        if self.output is not None:
            self.output.copy_(self.rows_to_start_from(token_counts).expand_as(self.output))

    def shared_modules(self, target: PreTrainedModel) -> list[nn.Module]:
        return [output_layer(target)] if self.output is None else []

    @property
    def train_depths(self) -> int:
        return self.config.heads

    def draft_hidden_states(
        self, features: Tensor, tokens: Tensor, where: Tensor, depths: int
    ) -> Tensor:
        return self._blocks(features[where], depths)  # the heads read no tokens

    def draft_logits(self, depth: int) -> Callable[[Tensor], Tensor]:
        if self.output is not None:
            # One view for all chunks: each view of the stack costs a gradient of the whole stack.
            return partial(F.linear, weight=self.output[depth - 1])
        return self.target_logits

    def begin(self, state: None, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        states = self._blocks(last_true(features, count), self.config.heads)  # [K, B, D]
        if self.output is None:
            logits = self.draft_logits(1)(states)
        else:
            logits = torch.bmm(states, self.output.mT)
        return Step(logits.transpose(0, 1), self.draft_vocabulary)  # [B, K, Vd]

    def _blocks(self, features: Tensor, heads: int) -> Tensor:
        """The first heads' states of features [M, D]: [heads, M, D]."""
        states = features.to(self.weight.dtype).expand(heads, -1, -1)
        for weight, bias in zip(self.weight[:, :heads], self.bias[:, :heads], strict=True):
            states = states + F.silu(torch.baddbmm(bias.unsqueeze(1), states, weight.mT))
        return states
