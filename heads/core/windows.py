"""What a model's config says of its attention: its layers' windows, and how far positions go."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from .errors import UnsupportedTarget, undrivable

_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
_OWN_WINDOWS = {
    "moshi": "its masks leave out the window that its config declares",
    "gpt_neo": "it cuts its local attention by the length of the cache",
}
"""Models whose windows no explicit mask decides; a trial with a short text does not show it."""


@dataclass(frozen=True)
class AttentionWindows:
    """Which masks a model wants: one window for all layers, or one for each layer type.

    A window of w lets a query at position p see positions p - w + 1 … p; None sees everything.
    With `tree` its masks are packed trees, for tree attention; with `cacheless` it is also given no
    cache, which attention writes itself.
    """

    single: int | None
    by_type: dict[str, int | None] | None
    tree: bool = False
    cacheless: bool = False

    @classmethod
    def of(cls, model: PreTrainedModel) -> AttentionWindows:
        """Read the windows from a model's config.

        Raises:
            UnsupportedTarget: a token tree cannot drive such a model.
        """
        config = model.config.get_text_config(decoder=True)
        name = config.model_type
        if model.config.is_encoder_decoder:
            raise undrivable(model.config.model_type, "is an encoder-decoder, not a decoder alone")
        implementation = config._attn_implementation
        if implementation not in ("sdpa", "eager"):
            raise UnsupportedTarget(
                f"{name} runs attention as {implementation!r}; a token tree needs an explicit "
                "mask: call model.set_attn_implementation('sdpa')."
            )
        if reason := _OWN_WINDOWS.get(name):
            raise undrivable(name, f"does not heed an explicit attention mask: {reason}")
        window = getattr(config, "sliding_window", None)
        types = getattr(config, "layer_types", None)
        if not types:
            return cls(window, None)
        if unknown := sorted(set(types) - _KNOWN_LAYER_TYPES):
            known = " and ".join(sorted(_KNOWN_LAYER_TYPES))
            raise undrivable(name, f"has layers of type {unknown[0]!r}, expected only {known}")
        windows = {kind: window if kind == "sliding_attention" else None for kind in types}
        if len(windows) == 1:
            return cls(next(iter(windows.values())), None)
        return cls(None, windows)


@dataclass(frozen=True)
class PositionLimit:
    """How many positions a model has, and why no more."""

    positions: int
    reason: str

    @classmethod
    def of(cls, model: PreTrainedModel) -> PositionLimit | None:
        """The limit of a model, None where there is none.

        Dynamic and longrope scaling change the frequencies of all tokens once the batch's longest
        text passes the trained length, so keys that are cached would be wrong: it is the limit.
        """
        config = model.config.get_text_config(decoder=True)
        longest: Any = getattr(config, "max_position_embeddings", None)
        parameters = getattr(config, "rope_parameters", None) or {}
        nested = [value for value in parameters.values() if isinstance(value, dict)]
        for entry in nested or [parameters]:
            kind = entry.get("rope_type", "default")
            if kind in ("dynamic", "longrope"):
                trained = entry.get("original_max_position_embeddings") if kind[0] == "l" else None
                reason = f"beyond them {kind} rotary scaling turns what is cached already"
                return cls(trained or longest, reason)
        if longest is not None and _has_position_table(model, longest):
            return cls(longest, "its table of positions ends there")
        return None


def _has_position_table(model: PreTrainedModel, positions: int) -> bool:
    """Whether positions are looked up; some tables hold a few entries before position 0."""
    tables = itertools.chain(model.named_parameters(), model.named_buffers())
    return any(
        tensor.dim() >= 2 and 0 <= tensor.shape[-2] - positions <= 2
        for name, tensor in tables
        if "pos" in name or "wpe" in name
    )
