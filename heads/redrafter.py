"""ReDrafter (Zhang et al. 2024, arXiv 2403.09919): a recurrent cell beside the target's feature.

    s_0 = 0
    s_k = SiLU(W E(x_t+k) + U s_k-1 + b)        E is the target's own embedding
    logits of x_t+k+1 = head([f_t ; s_k])       f_t stays the same during a round

The head is L residual blocks x + SiLU(Ax + a) and an output layer without bias. Without the cell
(`rnn=false`, as the authors' code has it by default) s_k = E(x_t+k) + s_k-1. One cell and one
head serve all depths, so drafts may be deeper than what was trained. It is trained from every
position of text that the target wrote (`distill`); the paper's distillation instead lets the target
write a new continuation from each position of a corpus.
"""

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F

from .declared.redrafter import ReDrafterFields
from .drafter import DrafterConfig, Step, entries_at, last_true
from .parts.published.redrafter import REDRAFTER, redrafter
from .parts.vocabulary import TokenConditioned
from .trainable import DraftLogits


@strict
class ReDrafterConfig(ReDrafterFields, DrafterConfig):
    """See `ReDrafterFields`."""

    model_type = "headstart_redrafter"


class ReDrafterState:
    """What a round keeps: the feature that it began with, and the cell's state at every node."""

    scratch: ClassVar = ("feature", "cells")

    feature: Tensor  # [B, 1, D]
    cells: Tensor  # [B, 1 + nodes, D], the root's first


class _Block(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, states: Tensor) -> Tensor:
        return states + F.silu(self.linear(states))


class ReDrafter(TokenConditioned):
    """A recurrent cell, fed one drafted token after another; weights have the authors' names."""

    config_class = ReDrafterConfig
    config: ReDrafterConfig
    from_checkpoint = staticmethod(redrafter)
    exports = REDRAFTER

    def __init__(self, config: ReDrafterConfig):
        super().__init__(config)
        size = config.hidden_size
        exit_dim = config.exit_dim or 2 * size
        if config.rnn:
            self.rnn_w = nn.Linear(size, size, bias=False)
            self.rnn_u = nn.Linear(size, size)
        alike = exit_dim == 2 * size
        self.input_proj = nn.Identity() if alike else nn.Linear(2 * size, exit_dim)
        blocks = [_Block(exit_dim) for _ in range(config.layers)]
        output = nn.Linear(exit_dim, config.output_size, bias=False)
        self.lm_head = nn.Sequential(*blocks, output)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Blocks start as the identity, the cell with random weights."""
        super()._init_weights(module)
        if isinstance(module, nn.Linear):
            in_blocks = (each.linear for each in self.modules() if isinstance(each, _Block))
            spread = 0.0 if module in in_blocks else module.in_features**-0.5
            nn.init.normal_(module.weight, std=spread)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    @torch.no_grad()
    def init_from_target(self, token_counts: Tensor | None = None) -> None:
        """Start as the target's own output layer, with zero weights for the cell; see `Medusa`."""
        rows = self.rows_to_start_from(token_counts)  # [Vd, D]
        if isinstance(self.input_proj, nn.Identity):
            output = cast(nn.Linear, self.lm_head[-1])
            output.weight.copy_(torch.cat([rows, torch.zeros_like(rows)], dim=1))
        if self.config.rnn:
            self.rnn_w.weight.div_(self.size_of_embeddings())  # so the cell's input is of size 1

    def draft_hidden_states(
        self,
        features: Tensor,
        tokens: Tensor,
        where: Tensor,
        depths: int,
        positions: Tensor | None = None,
    ) -> Tensor:
        feature = features[where].to(self.dtype)  # [M, D]
        cell, found = torch.zeros_like(feature), []
        for depth in range(1, depths + 1):
            # Past the row's end any token will do.
            cell = self._step(tokens.roll(-depth, 1)[where], cell)
            found.append(torch.cat([feature, cell], -1))
        return torch.stack(found)  # [K, M, 2 D]

    def draft_logits(self, depth: int) -> Callable[[Tensor], Tensor]:
        return self._logits

    def draft_output(self, depth: int) -> DraftLogits:
        blocks = self.lm_head[:-1]
        inner = (self.input_proj, blocks)
        weight = cast(nn.Linear, self.lm_head[-1]).weight
        return DraftLogits(lambda states: blocks(self.input_proj(states)), inner, weight)

    def start(self, batch: int, capacity: int) -> ReDrafterState:
        return ReDrafterState()

    def begin(self, state: Any, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        state.feature = last_true(features, count).to(self.dtype).unsqueeze(1)
        root = last_true(tokens.unsqueeze(-1), count)  # [B, 1]
        state.cells = self._step(root, torch.zeros_like(state.feature))  # [B, 1, D]
        return self._propose(state.feature, state.cells)

    def extend(self, state: Any, tokens: Tensor, parent: Tensor) -> Step:
        cells = self._step(tokens, entries_at(state.cells, parent + 1))  # [B, W, D]
        state.cells = torch.cat([state.cells, cells], 1)
        return self._propose(state.feature.expand_as(cells), cells)

    def _step(self, tokens: Tensor, cell: Tensor) -> Tensor:
        """Tokens [...] and the states s before them [..., D] -> the states after them [..., D]."""
        if not self.config.rnn:
            return self.embed(tokens) + cell
        return F.silu(self.rnn_w(self.embed(tokens)) + self.rnn_u(cell))

    def _propose(self, feature: Tensor, cell: Tensor) -> Step:
        return self.propose(torch.cat([feature, cell], -1))

    def _logits(self, states: Tensor) -> Tensor:
        """[f ; s], [..., 2 D] -> logits [..., Vd]."""
        return self.lm_head(self.input_proj(states))
