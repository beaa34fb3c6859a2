"""Token recycling: each token's best successors, as the target last saw them in this text.

No weights and no training (Luo et al. 2025, "Turning Trash into Treasure", arXiv 2408.08696). Every
forward over a tree gives the target's logits after each node, also after those that are rejected.
The best tokens of each are kept in a table, under the node's token; a node's children are read from
the row of its token. With a table of two successors, where b stood at two nodes:

    verified    a        b        b        c
    best two    b c      c d      c a      a b
    table       a: b c   b: c a   c: a b           the last b counts

    next tree   root c ┬ a ┬ b …        c: a b, then a: b c and b: c a
                       │   └ c …
                       └ b ┬ c …
                           └ a …

The prompt's tokens are written first, from the target's final hidden states.
"""

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedModel

from .core import OutputLayer, best_of, output_layer
from .declared.recycling import RecyclingFields
from .drafter import DrafterConfig, Step, entries_at, last_true
from .parts.weightless import WeightlessDrafter

_LOGITS = 1 << 25  # of a prompt's tokens that are computed at once

# docs/decoding.md compares it with other trees.
_TREE = ([3], [4], [5], [0, 1], [0, 2], [1, 1], [2, 0], [1, 0, 0], [0, 0, 0, 0])


@strict
class RecyclingConfig(RecyclingFields, DrafterConfig):
    """See `RecyclingFields`."""

    model_type = "headstart_recycling"


class RecyclingState:
    """A request's table: V · k · 4 bytes a row, 4.9 MB for 8 successors of 152,000 tokens."""

    table: Tensor  # [B, V, k] int32 target ids, best first; -1 for a token that was never verified


class Recycling(WeightlessDrafter):
    """Proposes candidates, best first: the row of each node's token."""

    config_class = RecyclingConfig
    config: RecyclingConfig
    observes = True

    @property
    def default_tree(self) -> str:
        return str([path for path in _TREE if max(path) < self.config.successors])

    def shared_modules(self, target: PreTrainedModel) -> list[nn.Module]:
        return [output_layer(target)]

    def start(self, batch: int, capacity: int) -> RecyclingState:
        return RecyclingState()

    def prefill(
        self, state: RecyclingState, features: Tensor, tokens: Tensor, count: Tensor
    ) -> None:
        size = len(tokens), self.config.vocab_size, self.config.successors
        state.table = torch.full(size, -1, dtype=torch.int32, device=tokens.device)
        true = torch.arange(tokens.shape[1], device=tokens.device) < count.unsqueeze(1)
        newest = self._newest(tokens, true)
        last = newest == torch.arange(1, 1 + tokens.shape[1], device=tokens.device)
        rows, columns = last.nonzero().unbind(1)  # [M] each token of a row once
        output = OutputLayer(self.target)
        some = max(_LOGITS // self.config.vocab_size, 1)
        for row, column in zip(rows.split(some), columns.split(some), strict=True):
            best = self._best(output.raw(features[row, column]))
            state.table[row, tokens[row, column]] = best

    def observe(self, state: RecyclingState, tokens: Tensor, logits: Tensor, true: Tensor) -> None:
        best = self._best(logits)  # [B, N, k]
        newest = self._newest(tokens, true)
        # All nodes of a token write the same, so that it does not matter which of them is last.
        found = entries_at(best, (newest - 1).clamp(min=0))
        found = torch.where(newest.unsqueeze(-1) > 0, found, entries_at(state.table, tokens))
        state.table.scatter_(1, tokens.unsqueeze(-1).expand_as(found), found)

    def begin(self, state: RecyclingState, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        root = last_true(tokens.unsqueeze(-1), count)  # [B, 1]
        return Step(ids=entries_at(state.table, root).long())

    def extend(self, state: RecyclingState, tokens: Tensor, parent: Tensor) -> Step:
        return Step(ids=entries_at(state.table, tokens).long())

    def _best(self, logits: Tensor) -> Tensor:
        """The ids of the best successors, [..., V] -> [..., k] int32."""
        return best_of(logits, self.config.successors)[1].int()

    def _newest(self, tokens: Tensor, true: Tensor) -> Tensor:
        """Where each entry's token [B, N] last stands among the true ones: 1 … N, or 0 for nowhere.

        The work grows with N and V; comparing all pairs would need N² of memory.
        """
        numbers = torch.arange(1, 1 + tokens.shape[1], device=tokens.device)
        none = tokens.new_zeros(len(tokens), self.config.vocab_size)  # [B, V]
        newest = none.scatter_reduce(1, tokens, numbers * true, "amax")
        return newest.gather(1, tokens)  # [B, N]
