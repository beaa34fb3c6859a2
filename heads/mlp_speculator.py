"""MLP speculators (Wertheimer et al. 2024, arXiv 2404.19124), and Arctic's with an LSTM's cell.

    s_0 = norm(f_t) / √2                     without `scale_input` f_t, the target's feature, itself
    z_k = P_k s_k-1 + a E_k(x_t+k)           E are embeddings of the drafter's own, N wide
    s_k = GELU(norm(z_k))
    logits of x_t+k+1 = output layer_k(s_k)

With b = 0.5^(1 / 2K), a is √((1 - b²) N / 2) / b: half of what the last state holds then comes from
the feature, where embeddings have entries of size √(1/N). A norm divides by the root mean square;
all but that of the feature have a weight and a bias. Where stages are tied, E, norm and output
layer are one each, P_1 reads the feature and P_2 serves all later stages.

The cell of Arctic's drafters (`cell="lstm"`, github.com/snowflakedb/ArcticInference) has a P four
times as high, to each quarter of which a E(x_t+k) is added; c_0 = 0, and σ is the sigmoid:

    c_k = σ(forget) c_k-1 + σ(input) GELU(norm(candidate))
    s_k = σ(output) GELU(norm(c_k))
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F

from .core import weight_of
from .declared.mlp_speculator import MlpSpeculatorFields
from .drafter import DrafterConfig, Step, entries_at, last_true
from .parts.published.mlp_speculator import MLP_SPECULATOR, mlp_speculator
from .parts.vocabulary import TrimmedVocabulary
from .trainable import DraftLogits

_EPS = 1e-6  # of all norms


@strict
class MlpSpeculatorConfig(MlpSpeculatorFields, DrafterConfig):
    """See `MlpSpeculatorFields`."""

    model_type = "headstart_mlp_speculator"


@dataclass
class MlpSpeculatorState:
    """The level that a round grew last, at `depth`; the root's at first."""

    scratch: ClassVar = ("nodes",)

    nodes: Tensor = field(init=False)  # [B, W, S], s or, of an LSTM, s and c
    depth: int = 1
    first: int = -1  # the number of its first node among all grown in the round; -1 for the root


class _Norm(nn.RMSNorm):
    def __init__(self, size: int):
        super().__init__(size, eps=_EPS)
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


class MlpSpeculator(TrimmedVocabulary):
    """K stages, each of which reads the state of the stage before and the token drafted there."""

    config_class = MlpSpeculatorConfig
    config: MlpSpeculatorConfig
    from_checkpoint = staticmethod(mlp_speculator)
    exports = MLP_SPECULATOR

    def __init__(self, config: MlpSpeculatorConfig):
        super().__init__(config)
        size, stages, lstm = config.width, range(config.stages), config.cell == "lstm"
        self.emb = nn.ModuleList(nn.Embedding(config.vocab_size, size) for _ in stages)
        self.proj = nn.ModuleList(
            nn.Linear(inputs, config.gates * size, bias=False) for inputs in config.inputs
        )
        self.ln = nn.ModuleList(_Norm(size) for _ in stages)
        self.state_ln = nn.ModuleList(_Norm(size) for _ in stages) if lstm else None
        self.head = nn.ModuleList(nn.Linear(size, config.output_size, bias=False) for _ in stages)
        kept = 0.5 ** (0.5 / config.heads)
        self._embedding_weight = ((1 - kept**2) * size / 2) ** 0.5 / kept
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """As the authors start them."""
        super()._init_weights(module)
        if isinstance(module, nn.Embedding | nn.Linear):
            nn.init.normal_(module.weight, std=self.config.width**-0.5)
        elif isinstance(module, _Norm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)

    @torch.no_grad()
    def init_from_target(self, token_counts: Tensor | None = None) -> None:
        """Output layers and embeddings start as the target's, where those are as wide.

        The embeddings get the size that the authors' random ones have.
        """
        rows = self.rows_to_start_from(token_counts)  # [Vd, D]
        known = weight_of(self.target.get_input_embeddings())  # [V, D]
        for layer in self.head if rows.shape[1] == self.config.width else ():
            cast(nn.Linear, layer).weight.copy_(rows)
        for layer in self.emb if known.shape[1] == self.config.width else ():
            weight = cast(nn.Embedding, layer).weight
            weight.copy_(known[: len(weight)])
            size = weight.square().mean().sqrt().clamp(min=1e-6)
            weight.mul_(self.config.width**-0.5 / size)

    def passes(self, row: float) -> float:
        return self.config.heads if self.config.tied else 1

    def draft_hidden_states(
        self,
        features: Tensor,
        tokens: Tensor,
        where: Tensor,
        depths: int,
        positions: Tensor | None = None,
    ) -> Tensor:
        states, found = features[where].to(self.dtype), []
        for depth in range(1, depths + 1):
            # Past the row's end any token will do.
            states = self._step(depth, tokens.roll(-depth, 1)[where], states)
            found.append(self._hidden(states))
        return torch.stack(found)  # [K, M, N]

    def draft_logits(self, depth: int) -> Callable[[Tensor], Tensor]:
        return self.head[self._stage(depth)]

    def draft_output(self, depth: int) -> DraftLogits:
        return DraftLogits(weight=cast(nn.Linear, self.head[self._stage(depth)]).weight)

    def start(self, batch: int, capacity: int) -> MlpSpeculatorState:
        return MlpSpeculatorState()

    def begin(self, state: Any, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        feature = last_true(features, count).to(self.dtype).unsqueeze(1)  # [B, 1, D]
        root = last_true(tokens.unsqueeze(-1), count)  # [B, 1]
        state.nodes, state.depth, state.first = self._step(1, root, feature), 1, -1
        return self._propose(state)

    def extend(self, state: Any, tokens: Tensor, parent: Tensor) -> Step:
        above = entries_at(state.nodes, parent - state.first)  # [B, W, S]
        state.first += state.nodes.shape[1]
        state.depth += 1
        state.nodes = self._step(state.depth, tokens, above)
        return self._propose(state)

    def _propose(self, state: MlpSpeculatorState) -> Step:
        return self.propose(self._hidden(state.nodes), state.depth)

    def _hidden(self, states: Tensor) -> Tensor:
        """What the output layer reads of states [..., S]: [..., N]."""
        return states[..., : self.config.width]

    def _stage(self, depth: int) -> int:
        """The place of a depth's weights."""
        return 0 if self.config.tied else depth - 1

    def _step(self, depth: int, tokens: Tensor, before: Tensor) -> Tensor:
        """Tokens [...] and the states before them [..., S] -> the states after them [..., S].

        At depth 1 the features [..., D] are before them.
        """
        config, stage = self.config, self._stage(depth)
        hidden = before if depth == 1 else self._hidden(before)
        if depth == 1 and config.scale_input:
            hidden = F.rms_norm(before, before.shape[-1:], eps=_EPS) * 0.5**0.5
        mixed = self.proj[min(depth, len(self.proj)) - 1](hidden)
        seen = self.emb[stage](tokens) * self._embedding_weight
        if self.state_ln is None:
            return F.gelu(self.ln[stage](mixed + seen))
        gates = mixed.unflatten(-1, (4, -1)) + seen.unsqueeze(-2)  # [..., 4, N]
        forget, take, give, candidate = gates.unbind(-2)
        cell = F.gelu(self.ln[stage](candidate)) * take.sigmoid()
        if depth > 1:
            cell = cell + before[..., config.width :] * forget.sigmoid()
        return torch.cat([F.gelu(self.state_ln[stage](cell)) * give.sigmoid(), cell], -1)
