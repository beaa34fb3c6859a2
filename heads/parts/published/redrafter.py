"""ReDrafter's drafters of their authors (github.com/apple/ml-recurrent-drafter).

The names of tensors are the same here and there.
"""

import re
from typing import Any

from torch import Tensor

from ...checkpoint import Found
from ...core import ArtifactError
from .checkpoint import Checkpoint, refuse_trimmed

_TYPE = "recurrent_drafting_drafter"


def redrafter(config: dict[str, Any], tensors: dict[str, Tensor]) -> Found | None:
    """The authors' drafters. Shapes are the tensors': `exit_dim` and others may be unset."""
    if config.get("model_type") != _TYPE and "rnn_w.weight" not in tensors:
        return None
    layers = sum(bool(re.fullmatch(r"lm_head\.\d+\.linear\.weight", n)) for n in tensors)
    output, cell = tensors.get(f"lm_head.{layers}.weight"), tensors.get("rnn_w.weight")
    if cell is None and config.get("rnn"):
        raise ArtifactError("it has no rnn_w.weight, and its config sets rnn; download both again.")
    if output is None:
        raise ArtifactError(f"after {layers} blocks, lm_head.{layers}.weight is missing.")
    reads = output if (narrowed := tensors.get("input_proj.weight")) is None else narrowed
    known = {"layers": layers, "hidden_size": reads.shape[1] // 2, "vocab_size": output.shape[0]}
    return known | {"exit_dim": output.shape[1], "rnn": cell is not None}, tensors


def _write(drafter: Any) -> Checkpoint:
    own = drafter.config
    refuse_trimmed(drafter, "the authors' code", "train it with drafter.output=own")
    config = {
        "model_type": _TYPE, "architectures": ["Drafter"], "rnn": own.rnn,
        "num_lookback_tokens": -1,
        "hidden_size": own.hidden_size, "vocab_size": own.vocab_size,
        "exit_dim": own.exit_dim or 2 * own.hidden_size, "num_draft_layers": own.layers,
        "torch_dtype": str(drafter.dtype).removeprefix("torch."),
    }  # fmt: skip
    return Checkpoint(config, dict(drafter.state_dict()))


REDRAFTER = {"original": _write}
"""What writes a drafter in each format."""
