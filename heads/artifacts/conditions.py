"""Under which conditions a drafter runs: what its target is and computes, and how it is set up.

They are noted when a drafter was trained (`Manifest.trained`) and found again when it decodes, so
that the two can be compared.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..core import FINAL, device_of, trained_context
from ..drafter import Drafter
from .plan import dtype_name

_PROBED = 192  # tokens, or as many as the context has


def target_conditions(target: PreTrainedModel) -> dict[str, Any]:
    """What a target's config says of how it computes, as JSON: None for what it does not have.

    `dtype`, `quantization` (the method's name), `rope` (its parameters), `window` (of sliding
    attention) and `context` (positions that it was made for).
    """
    config: Any = target.config
    text: Any = config.get_text_config(decoder=True)
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None and not isinstance(quantized, dict):
        quantized = quantized.to_dict()
    window = getattr(text, "sliding_window", None)
    rope = dict(getattr(text, "rope_parameters", None) or {})
    if (partial := getattr(text, "partial_rotary_factor", None)) is not None:
        rope.setdefault("partial_rotary_factor", partial)
    return {
        "dtype": dtype_name(target),
        "quantization": str(quantized.get("quant_method", "yes")) if quantized else None,
        "rope": _plain(rope),
        "window": window if getattr(text, "use_sliding_window", True) else None,
        "context": trained_context(target),
    }


@torch.no_grad()
def probe_losses(target: PreTrainedModel) -> list[float]:
    """What the target computes, as numbers that are the same wherever it is the same model.

    The loss of each of 192 tokens, drawn by a fixed seed and so nobody's text, given those before
    it, in nats. A fine-tune, quantised weights, another rotary base or window change them.
    """
    text: Any = target.config.get_text_config(decoder=True)
    length = min(_PROBED, trained_context(target) or _PROBED)
    drawn = torch.randint(text.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    ids = drawn.to(device_of(target.get_input_embeddings()))
    logits = target(input_ids=ids, use_cache=False).logits[0, :-1].float()  # [T - 1, V]
    losses = F.cross_entropy(logits, ids[0, 1:].to(logits.device), reduction="none")
    return [round(loss, 4) for loss in losses.tolist()]


def drafter_conditions(drafter: Drafter) -> dict[str, Any]:
    """How a drafter is set up: `dtype`, `config`, the layers that it reads, and its vocabulary.

    The layers are named in both conventions, see `parts.published.layer_ids`; `FINAL`, the state
    after the last norm, is -1 in either.
    """
    config = _plain(drafter.config.to_diff_dict())
    layers = [int(layer) for layer in drafter.config.feature_layers]
    for name in ("transformers_version", "dtype", "torch_dtype", "architectures"):
        config.pop(name, None)
    config["feature_layers"] = layers
    return {
        "dtype": dtype_name(drafter),
        "config": config,
        "layers": {
            "by_input": layers,
            "by_output": [layer - 1 if layer != FINAL else FINAL for layer in layers],
        },
        "vocabulary_sha256": vocabulary_hash(drafter.draft_vocabulary),
    }


def vocabulary_hash(ids: Tensor | None) -> str:
    """sha256 of a draft vocabulary's target ids [Vd]; empty for all tokens."""
    if ids is None:
        return ""
    return hashlib.sha256(ids.cpu().to(torch.int64).numpy().tobytes()).hexdigest()


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
