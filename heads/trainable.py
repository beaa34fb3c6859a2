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

from collections.abc import Callable

from torch import Tensor
from transformers import PreTrainedModel

from .drafter import Drafter


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

    def draft_hidden_states(
        self, features: Tensor, tokens: Tensor, where: Tensor, depths: int
    ) -> Tensor:
        """The drafter's states at depths 1 … `depths` with the true text fed to it.

        Args:
            features: [B, T, F], the target's features at the tokens.
            tokens: [B, T] int64, the text; rows are padded on the right.
            where: [B, T] bool, M positions in all, in the order of `features[where]`. A state that
                needs a token past the row's end may be anything.

        Returns:
            [depths, M, D'], see the table above; the family chooses D'.
        """
        raise NotImplementedError

    def draft_logits(self, depth: int) -> Callable[[Tensor], Tensor]:
        """The output layer of a depth: states [M, D'] -> logits [M, Vd].

        A loss asks once and applies the answer to one chunk of states after another, so what is
        derived from the weights is derived here.
        """
        raise NotImplementedError

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
