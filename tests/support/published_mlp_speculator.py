"""MLP speculators under the names of their authors and of Arctic, and what they compute."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.tiny import VOCAB

SIZE, WIDE = 32, 24  # the target's hidden size, and that of a stage
GATES = ("forget", "input", "output", "cell")


@dataclass(frozen=True)
class Layout:
    """How a checkpoint names its tensors.

    Attributes:
        method: of Arctic's drafters; empty for the first authors'.
        tied: whether stages share their weights; once: whether the file then holds each once.
    """

    heads: int = 3
    method: str = ""
    tied: bool = False
    once: bool = False
    scale_input: bool = False
    prefix: str = ""

    @property
    def config(self) -> dict[str, Any]:
        shared = {
            "model_type": "mlp_speculator", "n_predict": self.heads, "tie_weights": self.tied,
            "scale_input": self.scale_input, "vocab_size": VOCAB, "torch_dtype": "bfloat16",
            "top_k_tokens_per_head": [1] * self.heads, "n_candidates": self.heads,
        }  # fmt: skip
        if not self.method:
            kind = "MLPSpeculatorPreTrainedModel"
            return shared | {"architectures": [kind], "emb_dim": SIZE, "inner_dim": WIDE}
        return shared | {
            "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"], "method": self.method,
            "emb_dim": str(WIDE), "proj_dim": str(WIDE), "inner_dim": str(WIDE),
            "input_hidden_dim": SIZE, "tie_lstm_embs": self.method == "sum_lstm",
        }  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """Random weights; where stages are tied, one tensor under all of its names."""
        found: dict[str, Tensor] = {}
        first = {"sum_lstm": self._lstm, "sum_rnn": self._rnn}.get(self.method, self._stages)(found)
        for stage in range(1 if self.once else self.heads):
            found[f"head.{stage}.weight"] = first if self.tied else normal(VOCAB, WIDE)
        return {self.prefix + name: tensor for name, tensor in found.items()}

    def _stages(self, found: dict[str, Tensor], inner: str = "") -> Tensor:
        """Embeddings, projections and norms of all stages; returns a first output layer."""
        made: dict[str, Tensor] = {}
        for stage in range(self.heads):
            shapes = {"emb": (VOCAB, WIDE), "proj": (WIDE, WIDE if stage else SIZE)}
            for kind, shape in shapes.items():
                at = min(stage, 1 if kind == "proj" else 0) if self.tied else stage
                tensor = made.setdefault(f"{kind}.{at}", normal(*shape))
                if not self.once or at == stage:
                    found[f"{kind}.{stage}.{inner}weight"] = tensor
            at = 0 if self.tied else stage
            if not self.once or at == stage:
                for part in ("weight", "bias"):
                    ln = made.setdefault(f"ln.{at}.{part}", torch.rand(WIDE).double() + 0.5)
                    found[f"ln.{stage}.{inner}{part}"] = ln
        return normal(VOCAB, WIDE)

    def _rnn(self, found: dict[str, Tensor]) -> Tensor:
        return self._stages(found, "0.")

    def _lstm(self, found: dict[str, Tensor]) -> Tensor:
        emb = normal(VOCAB, WIDE)
        for gate in GATES:
            found[f"{gate}_emb.0.weight"] = emb
            for number, size in enumerate((SIZE, WIDE)):
                found[f"{gate}_proj.{number}.weight"] = normal(WIDE, size)
        for norm in ("cell_ln", "state_ln"):
            for part in ("weight", "bias"):
                found[f"{norm}.0.{part}"] = torch.rand(WIDE).double() + 0.5
        return normal(VOCAB, WIDE)


LAYOUTS = {
    "each stage its own": Layout(prefix="speculator."),
    "scaled": Layout(heads=4, scale_input=True),
    "tied": Layout(tied=True, scale_input=True, prefix="speculator."),
    "tied, stored once": Layout(heads=5, tied=True, once=True, prefix="speculator."),
    "one stage": Layout(heads=1),
    "Arctic": Layout(method="sum_rnn"),
    "Arctic, tied": Layout(method="sum_rnn", tied=True, once=True, scale_input=True),
    "Arctic's LSTM": Layout(method="sum_lstm", tied=True, scale_input=True),
    "Arctic's LSTM, unscaled": Layout(method="sum_lstm", tied=True, once=True),
}


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64) / shape[-1] ** 0.5


def logits(layout: Layout, tensors: dict[str, Tensor], feature: Tensor, tokens: list[int]) -> Any:
    """[V] after a feature [D] and the tokens since, as the public code computes them."""
    found = {name.removeprefix(layout.prefix): tensor for name, tensor in tensors.items()}
    inner = "0." if layout.method == "sum_rnn" else ""
    state_weight = 0.5 ** (0.5 / layout.heads)
    emb_weight = math.sqrt((1 - state_weight**2) * (WIDE / 2))

    def normed(x: Tensor, name: str | None = None) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean() + 1e-6)
        return x if name is None else x * found[f"{name}weight"] + found[f"{name}bias"]

    state = normed(feature) / 2**0.5 if layout.scale_input else feature
    cell = torch.zeros(WIDE, dtype=torch.float64)
    for number, token in enumerate(tokens):
        stage = 0 if layout.tied else number
        at = min(number, 1) if layout.tied else number
        scale = emb_weight / state_weight
        if layout.method != "sum_lstm":
            z = found[f"proj.{at}.{inner}weight"] @ state
            z = z + scale * found[f"emb.{stage}.{inner}weight"][token]
            state = F.gelu(normed(z, f"ln.{stage}.{inner}"))
            continue
        z = {g: found[f"{g}_proj.{at}.weight"] @ state + scale * found[f"{g}_emb.0.weight"][token]
             for g in GATES}  # fmt: skip
        candidate = F.gelu(normed(z["cell"], "cell_ln.0.")) * torch.sigmoid(z["input"])
        cell = cell * torch.sigmoid(z["forget"]) + candidate
        state = F.gelu(normed(cell, "state_ln.0.")) * torch.sigmoid(z["output"])
    return found[f"head.{0 if layout.tied else len(tokens) - 1}.weight"] @ state
