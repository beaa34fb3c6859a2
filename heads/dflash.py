"""DFlash: several decoder layers that draft a whole block of tokens in one pass.

The block is the newest token, the anchor, followed by K places of which only the position is known.
Every layer's queries come from the block. Its keys and values come from the target's features of
the text, mixed once for all layers, and from the block, whose places see each other:

    context       f_0 … f_t            keys and values, kept from round to round
    block         x_t+1  mask  mask    queries, keys and values, which are dropped after the round
    predicts      –      x_t+2 x_t+3   through the target's own output layer

As published (arXiv 2602.06036) the anchor's own place predicts nothing, and no draft depends on
another, so a tree is grown over their marginals (`best-first`, as in DDTree, arXiv 2604.12989).
JetSpec (arXiv 2606.18394) has a block in which no place sees those after it: `causal`. In DSpark
(arXiv 2607.05147) the anchor's place predicts the first draft (`sample_from_anchor`), and the token
before a draft adds a low-rank term to its logits (`markov_rank`), by which drafts depend on each
other: then a tree is grown level by level, at the cost of that term alone. The term may also depend
on the draft's own state, or on all drafts before (`markov_head_type`). Domino (arXiv 2605.29707)
has a GRU over the drafts before (`domino_rank`). DFlash2 (by DFlash's authors) has a term that also
depends on the draft's own state (`selector_rank`) and chooses among the tokens that are best
without it, and convolutions in its layers (`conv_kernel_size`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from .checkpoint import Found
from .core import AttentionWindows, OptionError, OutputLayer, best_of, weight_of
from .declared.dflash import DFlashFields
from .drafter import DrafterConfig, Step, entries_at, last_true
from .parts.block_layers import BlockConvolution, ConvolvedLayer
from .parts.cached_layers import DraftCache
from .parts.context_layers import ContextLayers, run_blocks
from .parts.draft_attention import Mask, block_mask, chosen_positions
from .parts.own_layers import layer_like, norm_scale, own_layers, unit_scale_init
from .parts.pair_terms import DominoTerm, MarkovTerm, PairTerm, SelectorTerm, in_a_row
from .parts.published.dflash import check_embedding_scale, dflash
from .parts.published.dflash_files import DFLASH
from .parts.vocabulary import TokenConditioned
from .trainable import DraftLogits


@strict
class DFlashConfig(DFlashFields, DrafterConfig):
    """See `DFlashFields`."""

    model_type = "headstart_dflash"

    @classmethod
    def for_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        config = super().for_target(target, **options)
        sizes = {"qk_norm": True, "num_hidden_layers": config.layers}
        config.layer = config.own_layer(layer_like(target), **sizes)
        if config.window:
            if config.layers == 1:
                raise OptionError(
                    f"drafter.window is {config.window} with one layer, and the last layer sees "
                    "the whole text; set drafter.layers to at least 2."
                )
            types = ["sliding_attention"] * (config.layers - 1) + ["full_attention"]
            config.layer |= {"sliding_window": config.window, "layer_types": types}
        config.feature_layers = config.feature_layers or spread_layers(target, config.layers)
        if config.mask_token_id is None:
            config.mask_token_id = config.vocab_size - 1
        return config


def spread_layers(target: PreTrainedModel, count: int) -> list[int]:
    """The layers whose input is read by default: `count` of the L layers, evenly from 2 to L - 2.

    Published configs name a layer by its output (`target_layer_ids`): 1 … L - 3, and L // 2 where
    it is a single one. Of a target of few layers these are fewer.
    """
    layers = target.config.get_text_config(decoder=True).num_hidden_layers
    if count == 1:
        return [layers // 2 + 1]
    first, last = min(2, layers), max(layers - 2, 1)
    found = {first + round(n * (last - first) / (count - 1)) for n in range(count)}
    return sorted(found)


@dataclass
class DFlashState:
    """The text's cache; and of a round the drafts' states, the depth of the last level, and what
    the term of the tokens before keeps at every node, if it has states."""

    scratch: ClassVar = ("states", "kept")

    cached: DraftCache
    states: Tensor = field(init=False)  # [B, K, D]
    level: int = 0
    kept: Tensor | None = None  # [B, 1 + nodes, S], the root's first


_CLEAR = 4.0


def _align(weight: Tensor, read: Tensor) -> None:
    """Let a projection [H, d, D] give one input [D] equal angles in all rotary pairs of all heads.

    Its size is `_CLEAR` times that of what other inputs become. Zeros stay zeros.
    """
    wanted = torch.zeros_like(weight[0, :, 0])
    wanted[: len(wanted) // 2] = _CLEAR * 2**0.5
    size = read.square().sum().clamp(min=1e-6)
    weight += (wanted - weight @ read).unsqueeze(-1) * read / size


class DFlash(TokenConditioned):
    """Drafts of a block; `independent` unless there is a term of the token before them."""

    config_class = DFlashConfig
    config: DFlashConfig
    from_checkpoint = staticmethod(dflash)
    exports = DFLASH
    _reads_table = True  # as published
    _checkpointed = False  # see `checkpoint_activations`

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        size, wide = config.hidden_size, len(config.feature_layers) or config.layers
        self.model, shapes = own_layers(config.layer or {})
        eps = self.model.config.rms_norm_eps
        self.fc = nn.Linear(wide * size, size, bias=False)
        self.hidden_norm, self.norm = (Qwen3RMSNorm(size, eps) for _ in range(2))
        if config.output == "trimmed":
            self.lm_head = nn.Linear(size, config.output_size, bias=False)
        if kernel := config.conv_kernel_size:
            how = kernel, config.conv_group_size, self._places
            self.model.layers = nn.ModuleList(
                ConvolvedLayer(self.model.config, number, *how) for number in range(len(shapes))
            )
        ends = config.vocab_size, config.output_size, size
        self.markov_head = self.candidate_selector = self.domino = None
        if config.markov_rank:
            self.markov_head = MarkovTerm(*ends, config.markov_rank, config.markov_head_type)
        if config.selector_rank:
            self.candidate_selector = SelectorTerm(*ends, config.selector_rank)
        if config.domino_rank:
            self.domino = DominoTerm(*ends[1:], config.domino_rank, config.gru_hidden_dim)
        self.independent = self._term is None
        self._layers = ContextLayers(self.model, shapes)
        self._windows = AttentionWindows.of(self.model)
        self.post_init()

    @classmethod
    @torch.no_grad()
    def completed(cls, found: Found, target: PreTrainedModel) -> Found:
        known, tensors = super().completed(found, target)
        if (scale := known.get("input_embedding_scale")) is not None:
            check_embedding_scale(scale, target.get_input_embeddings())
        return {n: value for n, value in known.items() if n != "input_embedding_scale"}, tensors

    @torch.no_grad()
    def init_from_target(self, token_counts: Tensor | None = None) -> None:
        """Start with random layers that keep the size of their input, and the target's ends.

        In them the masks attend to the newest token, which begins the block, as they would learn in
        hundreds of steps: their queries, which are all the same before they are rotated, get equal
        angles, and so does the part of the keys that embeddings have in common, their mean. After
        the rotation the nearest keys agree most.
        """
        unit_scale_init(self.model)
        unit_scale_init(self.fc)
        shared = self.hidden_norm(self._mean_embedding(token_counts))  # [D]
        token = torch.tensor([self.config.mask_token_id], device=shared.device)
        mask = self.embed(token)[0].to(shared)  # [D]
        for layer in self.model.layers:
            own: Any = layer
            heads = (-1, own.self_attn.head_dim)
            _align(own.self_attn.q_proj.weight.unflatten(0, heads), own.input_layernorm(mask))
            _align(own.self_attn.k_proj.weight.unflatten(0, heads), shared)
        if (scale := norm_scale(self.target)) is not None:
            self.norm.weight.copy_(scale)
        if self.config.output == "trimmed":
            self.lm_head.weight.copy_(self.rows_to_start_from(token_counts))
        if self._term is not None:
            self._term.start()
        for part in self.model.modules():
            if isinstance(part, BlockConvolution):  # at first each place is itself alone
                nn.init.zeros_(part.kernel_projection.weight)
                nn.init.zeros_(part.base_kernel)
                part.base_kernel[:, 0] = 1

    def _mean_embedding(self, token_counts: Tensor | None) -> Tensor:
        """Of the corpus' tokens, or of the vocabulary where they were not counted.  # [D]"""
        counts = torch.ones(self.config.vocab_size) if token_counts is None else token_counts
        embedding = weight_of(self.target.get_input_embeddings())[: len(counts)]
        shares = counts.double() / counts.sum()
        return (shares.to(embedding) @ embedding).to(self.fc.weight)

    @property
    def needs_length_bound(self) -> bool:
        return self._layers.needs_length_bound

    def start(self, batch: int, capacity: int) -> DFlashState:
        return DFlashState(self._layers.start(batch))

    def reserve(self, state: DFlashState, longest: int, room: int) -> None:
        # The newest token of the context stands one before the root, which begins the block.
        self._layers.reserve(state.cached, longest - 1, room + self._places)

    def prefill(self, state: DFlashState, features: Tensor, tokens: Tensor, count: Tensor) -> None:
        self._layers.prefill_text(state.cached, count - 1, self._context(features[:, :-1]))

    def begin(self, state: DFlashState, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        self._layers.add_text(state.cached, count, self._context(features))
        anchor = last_true(tokens.unsqueeze(-1), count)  # [B, 1]
        found = self._layers.block(state.cached, self._block(anchor), self.config.is_causal)
        state.states, state.level, state.kept = self._drafts(found), 0, None
        if self.independent:
            return self.propose(state.states)  # [B, K, V]
        return self._level(state, anchor, None)

    def extend(self, state: DFlashState, tokens: Tensor, parent: Tensor) -> Step:
        state.level += 1
        before = state.kept
        return self._level(
            state, tokens, None if before is None else entries_at(before, parent + 1)
        )

    def _level(self, state: DFlashState, tokens: Tensor, before: Tensor | None) -> Step:
        """The proposals for the children of nodes of one level.

        Args:
            tokens: of these nodes, [B, W].
            before: what the term keeps at their parents, [B, W, S]; None at the root, and for a
                term without states.
        """
        states = state.states[:, state.level, None]  # [B, 1, D], the same for all of them
        alone = self._output(states)  # [B, 1, Vd]
        numbers, kept = self._term(self._read(tokens), states, before)
        if kept is not None:
            state.kept = kept if state.kept is None else torch.cat([state.kept, kept], 1)
        if state.level < self._without_term:
            return Step(alone.expand(-1, tokens.shape[1], -1), self.draft_vocabulary)
        logits = alone + self._term.last(numbers)  # [B, W, Vd]
        if self._chooses:
            logits = logits + self._candidates(alone)
        return Step(logits, self.draft_vocabulary)

    @property
    def _chooses(self) -> bool:
        """Whether drafts are chosen among the tokens that are best without the term."""
        known = self.config.output_size
        return self.candidate_selector is not None and 0 < self.config.selector_top_k < known

    def _candidates(self, alone: Tensor) -> Tensor:
        """0 for the tokens that are best by logits without the term, -inf for others: [..., Vd]."""
        _, best = best_of(alone, self.config.selector_top_k)
        return torch.full_like(alone, -torch.inf).scatter_(-1, best, 0.0)

    @property
    def _term(self) -> PairTerm:
        """What the token before a draft adds; None for nothing."""
        terms = (self.markov_head, self.candidate_selector, self.domino)
        return next((term for term in terms if term is not None), None)

    @property
    def _without_term(self) -> int:
        """To how many drafts of a block the term adds nothing."""
        return self.config.pure_draft_prefix_len if self.domino is not None else 0

    def _read(self, tokens: Tensor) -> Tensor:
        """Tokens [...], or their embeddings [..., D] where the term reads these."""
        return self.embed(tokens) if self._term.reads_embeddings else tokens

    @property
    def _output(self) -> Callable[[Tensor], Tensor]:
        """What makes logits of the drafts' states."""
        shared = self.config.output == "shared"
        if self._plain_output:
            return self.target_logits if shared else self.lm_head
        layer = OutputLayer(self.target).raw if shared else self.lm_head
        factor, cap = self.config.output_multiplier, self.config.final_logit_softcapping

        def finished(states: Tensor) -> Tensor:
            logits = layer(states) * factor
            return logits if not cap else torch.tanh(logits / cap) * cap

        return finished

    @property
    def _plain_output(self) -> bool:
        return self.config.output_multiplier == 1 and not self.config.final_logit_softcapping

    @property
    def _places(self) -> int:
        """W, the places of a block."""
        return self.config.depths + (not self.config.sample_from_anchor)

    def _context(self, features: Tensor) -> Tensor:
        """The target's features [..., F] as all layers read them: [..., D]."""
        return self.hidden_norm(self.fc(features.to(self.dtype)).to(self.dtype))

    def _block(self, anchors: Tensor) -> Tensor:
        """The embeddings of blocks that begin with these tokens [..., 1]: [..., W, D]."""
        token = self.config.mask_token_id
        assert token is not None, "DFlashConfig.for_target says which"
        masks = torch.full_like(anchors, token)
        return self.embed(torch.cat([anchors, *[masks] * (self._places - 1)], -1))

    def _drafts(self, hidden: Tensor) -> Tensor:
        """What the layers made of blocks [..., W, D], as the output layer reads it: [..., K, D]."""
        return self.norm(hidden[..., self._places - self.config.depths :, :])

    @property
    def drafts_blocks(self) -> bool:
        return True

    @property
    def starts_a_row(self) -> int | None:
        return self.config.anchors or None

    def passes(self, row: float) -> float:
        return 1 + self._places * min(1.0, (self.starts_a_row or row) / row)

    def draft_hidden_states(
        self,
        features: Tensor,
        tokens: Tensor,
        where: Tensor,
        depths: int,
        positions: Tensor | None = None,
    ) -> Tensor:
        """All blocks of all rows in one pass, whose keys are the text's and then every block's.

        The block of position t begins with x_t+1. It attends to the text up to t and to itself.
        """
        length, places = tokens.shape[1], self._places
        at, positions, begin = chosen_positions(where, positions)  # [B, A], [B, T], [B, T]
        anchor = tokens.gather(1, (at + 1).clamp(max=length - 1)).unsqueeze(-1)  # [B, A, 1]
        block = self._block(anchor).flatten(1, 2)  # [B, A * W, D]
        steps = torch.arange(1, places + 1, device=at.device)
        of_block = (positions.gather(1, at).unsqueeze(-1) + steps).flatten(1)  # [B, A * W]
        begin = begin.gather(1, at)

        def mask(window: int | None) -> Mask:
            causal = self.config.is_causal(window)
            return block_mask(at, begin, length, places, causal, window)

        masks = self._windows.masks(mask)
        text = self._context(features), positions
        hidden = run_blocks(self.model, *text, block, of_block, masks, self._checkpointed)
        states = self._drafts(hidden.unflatten(1, (-1, places)))  # [B, A, K, D]
        states = states[where.gather(1, at)].transpose(0, 1)[:depths]  # [K, M, D]
        if self.independent:
            return states
        row, place = where.nonzero(as_tuple=True)  # [M] each
        ahead = place + torch.arange(1, len(states) + 1, device=row.device).unsqueeze(1)
        before = tokens[row, ahead.clamp(max=length - 1)]  # [K, M], the token before each draft
        numbers = in_a_row(self._term, self._read(before), states)  # [K, M, r]
        if alone := self._without_term:
            numbers = torch.cat([torch.zeros_like(numbers[:alone]), numbers[alone:]])
        return torch.cat([states, numbers], -1)  # [K, M, D + r]

    def draft_logits(self, depth: int) -> Callable[[Tensor], Tensor]:
        if self.independent:
            return self._output
        size, output, last = self.config.hidden_size, self._output, self._term.last
        return lambda states: output(states[..., :size]) + last(states[..., size:])

    def draft_output(self, depth: int) -> DraftLogits:
        trimmed = self.config.output == "trimmed"
        if not self.independent or not self._plain_output:
            learned = [self.lm_head] if trimmed else []
            learned += [] if self.independent else [self._term.last]
            return DraftLogits(self.draft_logits(depth), tuple(learned))
        return DraftLogits(weight=self.lm_head.weight) if trimmed else super().draft_output(depth)

    def draft_choice(self, depth: int) -> tuple[DraftLogits, DraftLogits] | None:
        if not self._chooses:
            return None
        size, output, last = self.config.hidden_size, self._output, self._term.last
        learned = (self.lm_head,) if self.config.output == "trimmed" else ()

        def chosen(states: Tensor) -> Tensor:
            alone = output(states[..., :size])
            return alone + last(states[..., size:]) + self._candidates(alone)

        alone = DraftLogits(lambda states: output(states[..., :size]), learned)
        return alone, DraftLogits(chosen, (*learned, last))

    def checkpoint_activations(self) -> bool:
        self._checkpointed = True
        return True
