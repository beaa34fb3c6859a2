"""Hydra heads (Ankner et al. 2024, arXiv 2402.05109): Medusa's heads that see what was drafted.

    z = [h_t ; c E(x_t+1) … c E(x_t+k)]   E is the target's own embedding; z is (k + 1) D wide
    s = Rz + r + SiLU(Wz + w)             depth k's first block, which leaves D
    s = s + SiLU(As + a)                  its other blocks
    logits of x_t+k+1 = output layer(s)

h_t is the target's feature f_t or, with `prefix`, what one Llama layer and a norm of the drafter's
own make of f_0 … f_t: with that, more blocks and the target's distribution as the label, the paper
calls the drafter Hydra++. Every depth has weights of its own, so a grown level is one product.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, cast

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from .core import FINAL, capture, device_of
from .declared.hydra import HydraFields
from .drafter import DrafterConfig, Step, entries_at, last_true
from .parts.cached_layers import CachedLayers, DraftCache
from .parts.own_layers import like_published, own_layers, silence
from .parts.published.hydra import HYDRA, hydra
from .parts.recompute import compute_again
from .parts.vocabulary import TokenConditioned
from .trainable import DraftLogits


@strict
class HydraConfig(HydraFields, DrafterConfig):
    """See `HydraFields`."""

    model_type = "headstart_hydra"

    @classmethod
    def for_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        config = super().for_target(target, **options)
        if config.prefix:
            config.layer = like_published(target)
        return config


@dataclass
class HydraState:
    """The prefix's cache, and the level grown last, at depth k - 1; the root's at first."""

    scratch: ClassVar = ("paths",)

    cached: DraftCache | None
    paths: Tensor = field(init=False)  # [B, W, (k + 1) D], z
    first: int = -1  # the number of its first node among all grown in the round; -1 for the root


class _Block(nn.Module):
    """x + SiLU(Wx + b), or Rx + r + SiLU(Wx + b) where x is wider than the output.

    It starts as the identity on h, the first of x.
    """

    def __init__(self, width: int, size: int):
        super().__init__()
        self.linear = nn.Linear(width, size)
        self.res_connection = nn.Linear(width, size) if width != size else nn.Identity()

    def forward(self, states: Tensor) -> Tensor:
        return self.res_connection(states) + F.silu(self.linear(states))


class Hydra(TokenConditioned):
    """K heads, each of which reads the tokens that the heads before it drafted."""

    config_class = HydraConfig
    config: HydraConfig
    from_checkpoint = staticmethod(hydra)
    exports = HYDRA

    def __init__(self, config: HydraConfig):
        super().__init__(config)
        size, layers = config.hidden_size, config.layers
        self.prefix: Any = None
        self._cached: Any = None
        if config.prefix:
            assert config.layer is not None, "HydraConfig.for_target says which"
            self.prefix, shapes = own_layers(config.layer)
            self.prefix.norm = LlamaRMSNorm(size, config.layer["rms_norm_eps"])
            self._cached = CachedLayers(self.prefix, shapes)
        widths = [[(k + 1) * size] + [size] * (layers - 1) for k in range(1, config.heads + 1)]
        self.mlp = nn.ModuleList(
            nn.ModuleList(_Block(width, size) for width in head) for head in widths
        )
        self.output: Any = None
        if config.output != "shared":
            outputs = (nn.Linear(size, config.output_size) for _ in range(config.heads))
            self.output = nn.ModuleList(outputs)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Blocks start as the identity on h, output layers as zeros."""
        super()._init_weights(module)
        if isinstance(module, nn.Linear):
            narrowing = (each.res_connection for each in self.modules() if isinstance(each, _Block))
            (nn.init.eye_ if module in narrowing else nn.init.zeros_)(module.weight)
            nn.init.zeros_(module.bias)

    @property
    def needs_length_bound(self) -> bool:
        return self._cached is not None and self._cached.needs_length_bound

    @torch.no_grad()
    def init_from_target(self, token_counts: Tensor | None = None) -> None:
        """Start every head as the target's own output layer, see `Medusa`."""
        if self.output is not None:
            rows = self.rows_to_start_from(token_counts)  # [Vd, D]
            for layer in self.output:
                layer.weight.copy_(rows)
        if self.prefix is not None:
            silence(self.prefix)
            self.prefix.norm.weight.fill_(self._size_of_features())
        self.config.embedding_scale = 1 / self.size_of_embeddings().item()

    def _size_of_features(self) -> float:
        """Their root mean square over some text: a norm with this weight leaves them unchanged."""
        some = torch.arange(min(64, self.config.vocab_size), device=device_of(self.target))
        features = capture(self.target, [FINAL], some.unsqueeze(0))
        return features.float().square().mean().sqrt().item()

    def draft_hidden_states(
        self,
        features: Tensor,
        tokens: Tensor,
        where: Tensor,
        depths: int,
        positions: Tensor | None = None,
    ) -> Tensor:
        features = features.to(self.dtype)
        if self.prefix is not None:
            features = self.prefix(inputs_embeds=features, position_ids=positions, use_cache=False)[
                0
            ]
        path, found = features[where], []
        for depth in range(1, depths + 1):
            # Past the row's end any token will do.
            seen = self._embedded(tokens.roll(-depth, 1)[where])
            path = torch.cat([path, seen], -1)  # [M, (depth + 1) D]
            found.append(self._hidden(path))
        return torch.stack(found)  # [K, M, D]

    def draft_logits(self, depth: int) -> Callable[[Tensor], Tensor]:
        return self.target_logits if self.output is None else self.output[depth - 1]

    def checkpoint_activations(self) -> bool:
        if self.prefix is not None:
            compute_again(self.prefix.layers)
        return self.prefix is not None

    def draft_output(self, depth: int) -> DraftLogits:
        if self.output is None:
            return super().draft_output(depth)
        layer = self.output[depth - 1]
        return DraftLogits(weight=layer.weight, bias=layer.bias)

    def start(self, batch: int, capacity: int) -> HydraState:
        return HydraState(self._cached.start(batch) if self._cached else None)

    def reserve(self, state: HydraState, longest: int, room: int) -> None:
        if state.cached is not None:
            self._cached.reserve(state.cached, longest, room)

    def prefill(self, state: HydraState, features: Tensor, tokens: Tensor, count: Tensor) -> None:
        if state.cached is not None:
            # Each row's last feature comes again, with the first token.
            before = features[:, :-1].to(self.dtype)
            self._cached.prefill(state.cached, count - 1, inputs_embeds=before)

    def begin(self, state: HydraState, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        features = features.to(self.dtype)
        if state.cached is not None:
            features = self._cached.begin(state.cached, count, inputs_embeds=features)[0]
        root = last_true(tokens.unsqueeze(-1), count)  # [B, 1]
        path = torch.cat([last_true(features, count), self._embedded(root[:, 0])], -1)
        state.paths, state.first = path.unsqueeze(1), -1  # [B, 1, 2 D]
        return self._propose(state)

    def extend(self, state: HydraState, tokens: Tensor, parent: Tensor) -> Step:
        above = entries_at(state.paths, parent - state.first)  # [B, W, k D]
        state.first += state.paths.shape[1]
        state.paths = torch.cat([above, self._embedded(tokens)], -1)
        return self._propose(state)

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) * self.config.embedding_scale

    def _propose(self, state: HydraState) -> Step:
        return self.propose(self._hidden(state.paths), self._depth(state.paths))

    def _hidden(self, path: Tensor) -> Tensor:
        """z [..., (k + 1) D] -> the states of depth k [..., D]."""
        states, blocks = path, cast(nn.ModuleList, self.mlp[self._depth(path) - 1])
        for block in blocks:
            states = block(F.dropout(states, self.config.dropout, self.training))
        return F.dropout(states, self.config.dropout, self.training)

    def _depth(self, path: Tensor) -> int:
        return path.shape[-1] // self.config.hidden_size - 1
