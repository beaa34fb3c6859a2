"""The training part of the drafter contract.

A loss asks for two things: `draft_hidden_states`, the states at every depth while the true text is
fed to the drafter, and `draft_logits`, which turns a depth's states into logits. Depth k at
position t is what `begin` (k = 1) or the k-1st `extend` after it answers in a round that begins at
t:

    position t     feature   tokens seen since   predicts   while decoding
    depth 1        f_t       x_t+1               x_t+2      begin(f_t, x_t+1), the root's children
    depth 2        f_t       x_t+1 x_t+2         x_t+3      extend(x_t+2), the children of x_t+2
    depth k        f_t       x_t+1 … x_t+k       x_t+k+1    extend(x_t+k)

Losses, labels and ranks need no more, and do not depend on the family.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME

from .drafter import Drafter


@dataclass(frozen=True)
class DraftLogits:
    """How a depth's states [M, D'] become logits [M, Vd], for a loss that finds gradients itself.

    The logits are what `body` makes of the states or, where there is a weight, that linear layer's
    output for what `body` makes of them.

    Attributes:
        body: the states themselves when None.
        modules: hold all the weights with a gradient that `body` reads.
        weight: [Vd, D] or, where `index` chooses one of them, [K, Vd, D].
        bias: [Vd].
    """

    body: Callable[[Tensor], Tensor] | None = None
    modules: tuple[nn.Module, ...] = ()
    weight: Tensor | None = None
    index: int | None = None
    bias: Tensor | None = None

    def __call__(self, states: Tensor) -> Tensor:
        hidden = states if self.body is None else self.body(states)
        return hidden if self.weight is None else F.linear(hidden, self.matrix, self.bias)

    @property
    def matrix(self) -> Tensor:
        """The weight of this depth.  # [Vd, D]"""
        assert self.weight is not None
        return self.weight if self.index is None else self.weight[self.index]

    def inner(self) -> Iterator[Tensor]:
        """The weights with a gradient that `body` reads."""
        for module in self.modules:
            yield from (p for p in module.parameters() if p.requires_grad)

    def trainable(self) -> list[Tensor]:
        """All weights with a gradient."""
        last = [w for w in (self.weight, self.bias) if w is not None and w.requires_grad]
        return [*self.inner(), *last]


class TrainableDrafter(Drafter):
    """A drafter that learns. Shapes: B batch, T sequence, M chosen positions, K depths."""

    trainable = True

    def init_from_target(self, token_counts: Tensor | None = None) -> None:
        """Give the drafter its first weights, from the bound target; nothing by default.

        Args:
            token_counts: [V], how often each token occurs in the corpus; a trimmed vocabulary keeps
                the most frequent ones.
        """

    @property
    def train_depths(self) -> int:
        """K, the depths that a training loss covers: `max_depth`, the config's `depths`, or 1.

        1 is enough where depth k at position t is depth 1 at position t + k - 1, as in any language
        model.
        """
        return self.max_depth or getattr(self.config, "depths", 1)

    @property
    def drafts_blocks(self) -> bool:
        """Whether it learns whole blocks: only from positions whose next token is supervised, and
        of each up to the first token that is not."""
        return False

    @property
    def starts_a_row(self) -> int | None:
        """From how many positions of a row, chosen at random, a training step drafts; None: all."""
        return None

    @property
    def depth_shares(self) -> list[float] | None:
        """At which share of the positions, chosen at random, a training step asks for each depth.

        A position that is asked for a depth is asked for all before it. None: all positions for
        all depths.
        """
        return None

    def passes(self, row: float) -> float:
        """How often its layers are applied to a token of rows of so many tokens, in training."""
        return 1 if self.max_depth is not None else self.train_depths

    def draft_hidden_states(
        self,
        features: Tensor,
        tokens: Tensor,
        where: Tensor,
        depths: int,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The drafter's states at depths 1 … `depths` with the true text fed to it.

        A family with `depth_shares` takes another argument, `wanted`, [K, M] bool or None: which
        of the states are asked for, where the others may be anything.

        Args:
            features: [B, T, F], the target's features at the tokens.
            tokens: [B, T] int64, the text; rows are padded on the right.
            where: [B, T] bool, M positions in all, in the order of `features[where]`. A state that
                needs a token past the row's end, or its document's, may be anything.
            positions: [B, T] int64, each token's position in its document, from 0, where rows hold
                several; a state then depends on its own document alone. None: a document a row.

        Returns:
            [depths, M, D'], see the table above; the family chooses D'.
        """
        raise NotImplementedError

    def checkpoint_activations(self) -> bool:
        """From now on compute the activations of its layers again in the backward pass.

        Returns:
            Whether it has such layers; False by default.
        """
        return False

    def save_checkpoint(self, folder: Path) -> None:
        """Save what a training goes on from; an artifact has what `save_pretrained` writes."""
        self.save_pretrained(folder)

    def load_checkpoint(self, folder: Path) -> None:
        """Go on from what `save_checkpoint` wrote into a checkpoint of its training."""
        self.load_state_dict(safetensors.torch.load_file(folder / SAFE_WEIGHTS_NAME))

    def draft_logits(self, depth: int) -> Callable[[Tensor], Tensor]:
        """The output layer of a depth: states [M, D'] -> logits [M, Vd].

        A loss asks once and applies the answer to one chunk of states after another, so what is
        derived from the weights is derived here.
        """
        raise NotImplementedError

    def draft_output(self, depth: int) -> DraftLogits:
        """The same for a loss: it says which weights the logits depend on, here any of its own.

        A family whose output layer is large names that layer, which saves copies of its gradient.
        """
        return DraftLogits(self.draft_logits(depth), (self,))

    def draft_choice(self, depth: int) -> tuple[DraftLogits, DraftLogits] | None:
        """Of a drafter that chooses among its best tokens: the logits by which these are the best,
        and those of the choice, -inf for all others. The first have the loss that is asked for, the
        second the cross entropy where the label is among them. None where it chooses among all.
        """
        return None

    def predicted_features(self, states: Tensor) -> Tensor | None:
        """The drafter's prediction of the target's final features, for a loss that compares them.

        Returns:
            For states [K, M, D'] [K, M, D], at depth k and position t the final feature at t + k;
            None for a drafter that predicts none.
        """
        return None

    @property
    def language_model(self) -> PreTrainedModel | None:
        """The model that writes text without the target, where `writes_text`; None otherwise."""
        return None
