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
from typing import Any, ClassVar, Literal, Self

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from .checkpoint import Found
from .core import FINAL, OptionError, capture, device_of, output_layer
from .drafter import Step, last_true
from .parts.cached_layers import CachedLayers, DraftCache
from .parts.own_layers import layer_like, own_layers
from .parts.published_heads import hydra
from .parts.vocabulary import TokenConditioned, VocabularyConfig


@strict
class HydraConfig(VocabularyConfig):
    """Hydra's shape.

    Attributes:
        heads: K, how many tokens beyond the next one are predicted.
        layers: L blocks per head.
        prefix: whether a layer with a cache of its own reads the features first (Hydra++).
        output: see `VocabularyConfig`; each head has its own, unless `shared`.
        dropout: of what every block and output layer reads, while training.
        layer: the prefix's layer, see `layer_like`; taken from the target.
        embedding_scale: what embeddings are multiplied by; found when training starts, 1 in
            published heads.
    """

    model_type = "headstart_hydra"
    heads: int = 4
    layers: int = 1
    prefix: bool = False
    output: Literal["shared", "own", "trimmed"] = "shared"
    dropout: float = 0.0
    layer: dict[str, Any] | None = None
    embedding_scale: float = 1.0

    OPTIONS: ClassVar[tuple[str, ...]] = (
        *("heads", "layers", "prefix", "output", "draft_vocab_size", "dropout"),
    )

    @classmethod
    def for_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        config = super().for_target(target, **options)
        if config.prefix:
            config.layer = layer_like(target)
        return config

    def validate_hydra(self) -> None:
        """Part of the config's own validation: what single fields cannot say."""
        if self.heads < 1 or self.layers < 1 or not 0 <= self.dropout < 1:
            raise OptionError(
                f"drafter.heads is {self.heads}, drafter.layers {self.layers} and drafter.dropout "
                f"{self.dropout}; expected at least 1, at least 1, and a share below 1."
            )


class HydraState:
    """What a round has drafted, and the prefix's cache.

    Attributes:
        paths: [B, W, (k + 1) D], z of the level grown last, at depth k - 1; of the root at first.
        first: the number of its first node among all grown in the round; -1 for the root.
        cached: the prefix's cache, None without prefix.
    """

    paths: Tensor
    first: int

    def __init__(self, cached: DraftCache | None):
        self.cached = cached


class _Narrowing(nn.Linear):
    """The residual path of a block wider at its input than its output; starts as identity on h."""


class _Block(nn.Module):
    """x + SiLU(Wx + b), or Rx + r + SiLU(Wx + b) where x is wider than the output."""

    def __init__(self, width: int, size: int):
        super().__init__()
        self.linear = nn.Linear(width, size)
        self.res_connection = _Narrowing(width, size) if width != size else nn.Identity()

    def forward(self, states: Tensor) -> Tensor:
        return self.res_connection(states) + F.silu(self.linear(states))


class Hydra(TokenConditioned):
    """K heads, each of which reads the tokens that the heads before it drafted."""

    config_class = HydraConfig
    config: HydraConfig

    def __init__(self, config: HydraConfig):
        super().__init__(config)
        size, layers = config.hidden_size, config.layers
        self.prefix = self._cached = None
        self.needs_length_bound = config.prefix
        if config.prefix:
            assert config.layer is not None, "HydraConfig.for_target says which"
            self.prefix, shapes = own_layers(config.layer)
            self.prefix.norm = LlamaRMSNorm(size, config.layer["rms_norm_eps"])
            self._cached = CachedLayers(self.prefix, shapes)
        widths = [[(k + 1) * size] + [size] * (layers - 1) for k in range(1, config.heads + 1)]
        self.mlp = nn.ModuleList(
            nn.ModuleList(_Block(width, size) for width in head) for head in widths
        )
        self.output = None
        if config.output != "shared":
            known = config.draft_vocab_size or config.vocab_size
            self.output = nn.ModuleList(nn.Linear(size, known) for _ in range(config.heads))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Blocks start as the identity on h, output layers as zeros."""
        super()._init_weights(module)
        if isinstance(module, nn.Linear):
            (nn.init.eye_ if isinstance(module, _Narrowing) else nn.init.zeros_)(module.weight)
            nn.init.zeros_(module.bias)

    @property
    def max_depth(self) -> int:
        return self.config.heads

    def shared_modules(self, target: PreTrainedModel) -> list[nn.Module]:
        own = [] if self.output is not None else [output_layer(target)]
        return [*super().shared_modules(target), *own]

    @torch.no_grad()
    def init_from_target(self, token_counts: Tensor | None = None) -> None:
        """Start every head as the target's own output layer, see `Medusa`.

        Args:
            token_counts: [V], how often each token occurs in the corpus; `trimmed` keeps the most
                frequent ones.
        """
        if self.output is not None:
            rows = self.rows_to_start_from(token_counts)  # [Vd, D]
            outputs: Any = self.output
            for layer in outputs:
                layer.weight.copy_(rows)
        if self.prefix is not None:
            own: Any = self.prefix.layers[0]
            own.self_attn.o_proj.weight.zero_()
            own.mlp.down_proj.weight.zero_()
            self.prefix.norm.weight.fill_(self._size_of_features())
        self.config.embedding_scale = 1 / self.size_of_embeddings().item()

    def _size_of_features(self) -> float:
        """Their root mean square over some text: a norm with this weight leaves them unchanged."""
        some = torch.arange(min(64, self.config.vocab_size), device=device_of(self.target))
        features = capture(self.target, [FINAL], some.unsqueeze(0))
        return features.float().square().mean().sqrt().item()

    @classmethod
    def from_checkpoint(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> Found | None:
        return hydra(config, tensors)

    @property
    def train_depths(self) -> int:
        return self.config.heads

    def draft_hidden_states(
        self, features: Tensor, tokens: Tensor, where: Tensor, depths: int
    ) -> Tensor:
        row, at = where.nonzero(as_tuple=True)  # [M] each
        features = features.to(self.dtype)
        if self.prefix is not None:
            features = self.prefix(inputs_embeds=features, use_cache=False)[0]
        path, found = features[row, at], []
        for depth in range(1, depths + 1):
            # Past the row's end any token will do.
            seen = self._embedded(tokens[row, (at + depth).clamp(max=tokens.shape[1] - 1)])
            path = torch.cat([path, seen], -1)  # [M, (depth + 1) D]
            found.append(self._hidden(path))
        return torch.stack(found)  # [K, M, D]

    def draft_logits(self, depth: int) -> Callable[[Tensor], Tensor]:
        if self.output is not None:
            return self.output[depth - 1]
        return self.target_logits

    def start(self, batch: int, capacity: int) -> HydraState:
        return HydraState(None if self._cached is None else self._cached.start(batch))

    def reserve(self, state: HydraState, longest: int, room: int) -> None:
        if self._cached is not None and state.cached is not None:
            self._cached.reserve(state.cached, longest, room)

    def prefill(self, state: HydraState, features: Tensor, tokens: Tensor, count: Tensor) -> None:
        if self._cached is not None and state.cached is not None:
            # Each row's last feature comes again, with the first token.
            before = features[:, :-1].to(self.dtype)
            self._cached.prefill(state.cached, before.shape[1], count - 1, inputs_embeds=before)

    def begin(self, state: HydraState, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        features = features.to(self.dtype)
        if self._cached is not None and state.cached is not None:
            features = self._cached.begin(
                state.cached, features.shape[1], count, inputs_embeds=features
            )[0]
        root = last_true(tokens.unsqueeze(-1), count)  # [B, 1]
        path = torch.cat([last_true(features, count), self._embedded(root[:, 0])], -1)
        state.paths, state.first = path.unsqueeze(1), -1  # [B, 1, 2 D]
        return self._propose(state)

    def extend(self, state: HydraState, tokens: Tensor, parent: Tensor) -> Step:
        above = state.paths  # [B, W', k D]
        place = (parent - state.first).unsqueeze(-1).expand(-1, -1, above.shape[-1])
        state.first += above.shape[1]
        state.paths = torch.cat([above.gather(1, place), self._embedded(tokens)], -1)
        return self._propose(state)

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) * self.config.embedding_scale

    def _propose(self, state: HydraState) -> Step:
        hidden = self._hidden(state.paths)  # [B, W, D]
        return Step(self.draft_logits(self._depth(state.paths))(hidden), self.draft_vocabulary)

    def _hidden(self, path: Tensor) -> Tensor:
        """z [..., (k + 1) D] -> the states of depth k [..., D]."""
        states, dropout = path, self.config.dropout if self.training else 0.0
        blocks: Any = self.mlp[self._depth(path) - 1]
        for block in blocks:
            states = block(F.dropout(states, dropout) if dropout else states)
        return F.dropout(states, dropout) if dropout else states

    def _depth(self, path: Tensor) -> int:
        return path.shape[-1] // self.config.hidden_size - 1
