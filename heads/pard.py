"""PARD: a draft model that drafts several tokens in one forward (arXiv 2504.18583).

An ordinary small language model, taught to read a mask token where a token is not known yet. After
the newest token x_t+1 come K - 1 masks at the positions that follow, and every place predicts the
token after it, so a round of K drafts costs one forward, and a tree is grown over marginals:

    reads       … x_t    x_t+1  mask   mask
    predicts             x_t+2  x_t+3  x_t+4

All masks are the same token, so there may be more of them while decoding than in training. Without
masks the model is the draft model that it was, which other engines can run as one.

With features of the target (PARD-2, arXiv 2605.08632) a projection of those that a token was
emitted from is added to its embedding; masks take the newest token's.
"""

from typing import Any, ClassVar, Self

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from .core import FINAL, AttentionWindows, OptionError, decoder_of
from .declared.pard import AT_ONCE, PARALLEL
from .draft_model import DraftModel, DraftModelConfig
from .drafter import Step, entries_at, from_last_true, last_true
from .parts.cached_layers import DraftCache
from .parts.draft_attention import attention_for, knows_flex
from .parts.mask_blocks import MaskBlocks, depth_shares
from .parts.own_layers import recurrent_layers
from .parts.student import KEPT, load_student

PROJECTION = "target_proj.weight"
"""The tensor in the file of weights that projects the target's features."""

PROJECTION_BIAS = "target_proj.bias"
"""What the authors' code can have beside it (`pard2_proj_bias`), and this class has not."""

DRAFTING = {
    *(PARALLEL, AT_ONCE, "spd_type", "pard2", "pard2_proj_bias", "pard2_scale"),
    *("pard2_target_layers", "pard2_target_dim"),
}
"""All that such a `config.json` says of drafting."""

_DEPTHS, _SCALE = 12, 0.02
"""Where a published config does not say; its masks were taught for fewer depths, see above."""


@strict
class PardConfig(DraftModelConfig):
    """A draft model's, and how it drafts in parallel.

    Attributes:
        depths: K, how many tokens are drafted at once.
        mask_token_id: the token that stands where a token is not known yet; null for the last of
            the vocabulary, which most models never write.
        kept: the share of one depth's positions that a training step takes for the next depth; the
            first has all (conditional drop-token).
        least_kept: the least share of all positions that it takes for a depth.
        feature_layers: the target's layers whose input is read besides the tokens, -1 for the final
            hidden state; empty for none.
        feature_scale: the factor of the features' projection.
        feature_dropout: the share of a training step's rows without features, so that the model
            also drafts where there are none.
    """

    model_type = "headstart_pard"
    depths: int = 8
    mask_token_id: int | None = None
    kept: float = 0.7
    least_kept: float = 0.2
    feature_scale: float = 0.02
    feature_dropout: float = 0.1

    OPTIONS = (
        *DraftModelConfig.OPTIONS,
        *("depths", "mask_token_id", "kept", "least_kept"),
        *("feature_layers", "feature_scale", "feature_dropout"),
    )
    RANGES: ClassVar = {
        "at least 1": ("depths",),
        "more than 0": ("feature_scale",),
        "0 … 1": ("kept", "least_kept"),
        "0 … 1, 1 excluded": ("feature_dropout",),
    }
    NEEDS: ClassVar = {"feature_scale": "feature_layers", "feature_dropout": "feature_layers"}

    @property
    def max_depth(self) -> int:
        return self.depths

    @classmethod
    def for_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        config = super().for_target(target, **options)
        student = AutoConfig.for_model(**(config.student or {}))
        if recurrent := recurrent_layers(student):
            raise OptionError(
                f"a pard drafter's masks stand beside the text, and layer {min(recurrent)} of its "
                f"{student.model_type} keeps a state of it; take a model whose layers all attend, "
                "or drafter.family=draft_model."
            )
        known = student.get_text_config(decoder=True).vocab_size
        if config.mask_token_id is None:
            config.mask_token_id = min(known, config.vocab_size) - 1
        if config.feature_layers and config.lora is not None:
            raise OptionError(
                "drafter.lora and drafter.feature_layers are both set, and an adapter holds no "
                "projection of features; leave one of them out."
            )
        return config

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """Also of a language model's own `config.json`, from what it says of drafting."""
        if PARALLEL in config_dict:
            config_dict = config_dict | _read(config_dict)
        return super().from_dict(config_dict, **options)


class Pard(DraftModel):
    """A language model whose drafts all come from one forward."""

    config_class = PardConfig
    config: PardConfig  # type: ignore[override]
    independent = True

    def __init__(self, config: PardConfig, model: PreTrainedModel | None = None):
        super().__init__(config, model)
        if config.feature_layers:
            wide = len(config.feature_layers) * config.hidden_size
            own = self.model.get_input_embeddings().embedding_dim
            self.model.target_proj = nn.Linear(wide, own, bias=False)
        self._mask_options: dict[str, Any] = {} if knows_flex(self.model) else {"flex": False}
        for name, value in _written(config).items():
            setattr(self.model.config, name, value)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, name: Any, *args: Any, projection: Tensor | None = None, **options: Any
    ) -> Any:
        """Load a folder as transformers loads the language model, with the same options.

        Args:
            projection: [Dd, F], of the target's features, where the file of weights has none.
                Without any the model drafts from tokens alone.
        """
        written = PreTrainedConfig.get_config_dict(name)[0]
        own = [KEPT, *([PROJECTION] if written.get("pard2_target_layers") else [])]
        model, report, beside = load_student(name, args, options, own)
        projection = beside.get(PROJECTION, projection)
        fields = _read(written)
        if projection is None:
            fields.pop("feature_layers", None)
        else:
            fields["hidden_size"] = projection.shape[1] // len(fields["feature_layers"])
        drafter = cls.of(model, **fields)
        if projection is not None:
            model.target_proj.to(model.dtype).load_state_dict({"weight": projection})
        if KEPT in beside:
            drafter.keep_tokens(beside[KEPT])
        return (drafter, *report) if report else drafter

    def bind(self, target: PreTrainedModel) -> Self:
        # Published configs count some layers from the end of the hidden states.
        text, layers = target.config.get_text_config(decoder=True), self.config.feature_layers
        last = text.num_hidden_layers + 1
        self.config.feature_layers = [n if n >= FINAL else last + n for n in layers]
        if layers and self.model.target_proj.in_features != len(layers) * text.hidden_size:
            raise OptionError(
                f"the drafter reads {self.model.target_proj.in_features} features of {len(layers)} "
                f"layers, and this target's are {text.hidden_size} a layer; load the target that "
                "it was trained for."
            )
        return super().bind(target)

    @torch.no_grad()
    def init_from_target(self, token_counts: Tensor | None = None) -> None:
        """Start as the draft model does; the features add nothing yet."""
        projection = self.model._modules.pop("target_proj", None)
        super().init_from_target(token_counts)
        if projection is not None:
            self.model.target_proj = projection
            nn.init.zeros_(projection.weight)

    def reserve(self, state: DraftCache, longest: int, room: int) -> None:
        super().reserve(state, longest, room + self.config.depths - 1)

    def prefill(self, state: DraftCache, features: Tensor, tokens: Tensor, count: Tensor) -> None:
        # Each token is read with the feature that it was emitted from, the first with zeros.
        inputs = self._model_inputs(tokens, _shifted(features))
        self._layers.prefill(state, count, **inputs)

    def begin(self, state: DraftCache, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        ahead, known = self.config.depths - 1, tokens.shape[1]
        masks = tokens.new_full((len(tokens), ahead), self._mask_token)
        newest = last_true(features, count).unsqueeze(1)  # [B, 1, F]
        features = torch.cat([features, newest.expand(-1, ahead, -1)], 1)
        inputs = self._model_inputs(torch.cat([tokens, masks], 1), features)
        logits = self._layers.begin(state, count, ahead, **inputs).logits  # [B, A + K - 1, Vd]
        return self._step(from_last_true(logits, count, known))  # [B, K, Vd]

    @property
    def _mask_token(self) -> int:
        assert self.config.mask_token_id is not None, "PardConfig.for_target says which"
        return self.config.mask_token_id

    def _model_inputs(self, tokens: Tensor, features: Tensor) -> dict[str, Tensor]:
        """What the model reads for tokens [B, T] and the features [B, T, F] they were emitted
        from."""
        tokens = self._known(tokens)
        if not self.config.feature_layers:
            return {"input_ids": tokens}
        embedded = self.model.get_input_embeddings()(tokens)
        added = self.model.target_proj(features.to(embedded.dtype))
        return {"inputs_embeds": embedded + self.config.feature_scale * added}

    @property
    def depth_shares(self) -> list[float]:
        own = self.config
        return depth_shares(own.depths, own.kept, own.least_kept)

    def passes(self, row: float) -> float:
        return sum(self.depth_shares)

    def draft_hidden_states(
        self,
        features: Tensor,
        tokens: Tensor,
        where: Tensor,
        depths: int,
        positions: Tensor | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """The text and all masks in one pass, see `MaskBlocks`; depth 1 is the text's own."""
        blocks = MaskBlocks.of(where, depths, positions, wanted, newest=1)
        at_begin = (blocks.positions[:, : tokens.shape[1]] == 0).unsqueeze(-1)
        read = _shifted(features).masked_fill(at_begin, 0)
        read = self._dropped(torch.cat([read, entries_at(features, blocks.start)], 1))  # [B, S, F]
        masks = torch.full_like(blocks.start, self._mask_token)
        inputs = self._model_inputs(torch.cat([tokens, masks], 1), read)
        decoder, mask = decoder_of(self.model), self._attention_mask(blocks)
        with attention_for(decoder, mask):
            hidden = decoder(
                **inputs, attention_mask=mask, position_ids=blocks.positions, use_cache=False
            )[0]  # [B, S, D]
        return blocks.states(hidden)

    def _dropped(self, features: Tensor) -> Tensor:
        """Features [B, S, F], in training zeros for a random share of the rows."""
        share = self.config.feature_dropout
        if not self.training or not self.config.feature_layers:
            return features
        kept = torch.rand(len(features), 1, 1, device=features.device) >= share
        return features * kept

    def _attention_mask(self, blocks: MaskBlocks) -> Any:
        decoder = decoder_of(self.model)
        found: Any = blocks.attention(AttentionWindows.of(decoder), **self._mask_options)
        if decoder.config._attn_implementation != "eager":
            return found
        least = torch.finfo(self.model.dtype).min  # eager attention adds masks to scores

        def added(mask: Tensor) -> Tensor:
            return torch.zeros_like(mask, dtype=self.model.dtype).masked_fill(~mask, least)

        by_type = isinstance(found, dict)
        return {kind: added(mask) for kind, mask in found.items()} if by_type else added(found)


def _written(config: PardConfig) -> dict[str, Any]:
    """What the language model's `config.json` says of drafting, by the names of PARD's authors."""
    found = {PARALLEL: config.mask_token_id, "spd_type": "pard", AT_ONCE: config.depths}
    if config.feature_layers:
        found |= {
            "spd_type": "pard2", "pard2": True, "pard2_proj_bias": False,
            "pard2_scale": config.feature_scale,
            "pard2_target_layers": list(config.feature_layers),
            "pard2_target_dim": len(config.feature_layers) * config.hidden_size,
        }  # fmt: skip
    return found


def _read(written: dict[str, Any]) -> dict[str, Any]:
    """The same as fields of a `PardConfig`."""
    found = {"mask_token_id": written[PARALLEL], "depths": written.get(AT_ONCE, _DEPTHS)}
    if layers := written.get("pard2_target_layers"):
        found |= {"feature_layers": layers, "feature_scale": written.get("pard2_scale", _SCALE)}
    return found


def _shifted(features: Tensor) -> Tensor:
    """The features that tokens were emitted from: those before them, zeros first.  # [B, T, F]"""
    return torch.cat([torch.zeros_like(features[:, :1]), features[:, :-1]], 1)
