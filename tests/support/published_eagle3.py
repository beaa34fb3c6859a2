"""Variants of EAGLE-3 as they are published, with random values, and what their equations give.

The reference runs one text after another, without a cache, from names, shapes and configs alone.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.equations import EPS, THETA, Tensors, attended, gated, rms
from tests.support.published_eagle import KEPT, random
from tests.support.tiny import VOCAB

TARGET = 32  # the target's hidden size


@dataclass(frozen=True)
class Variant:
    """What is special about a head; its sizes are those of its tensors."""

    size: int = TARGET
    heads: int = 4
    kv: int = 2
    wide: int = 24
    layers: int = 1
    qk_norm: bool = False
    share: float = 1.0  # of each head, that positions turn
    window: int | None = None
    types: tuple[str, ...] = ()
    parallel: bool = False
    flags: tuple[str, ...] = ()
    first: str = "layers.0."
    said: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """As the speculators library writes it, or flat as the authors do."""
        inner: dict[str, Any] = {
            "model_type": "qwen3" if self.qk_norm else "llama", "vocab_size": VOCAB,
            "hidden_size": self.size, "intermediate_size": self.wide,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv,
            "num_hidden_layers": self.layers, "rms_norm_eps": EPS, "rope_theta": THETA,
        }  # fmt: skip
        if self.share != 1:
            inner["partial_rotary_factor"] = self.share
        if self.window:
            inner |= {"sliding_window": self.window, "layer_types": list(self.types)}
            inner |= {"use_sliding_window": True} if self.qk_norm else {}
        ids = {"eagle_aux_hidden_state_layer_ids": [1, 1, 0], "draft_vocab_size": len(KEPT)}
        said = ids | dict.fromkeys(self.flags, True) | self.said
        if self.first == "midlayer.":
            return inner | said
        kind = "peagle" if self.parallel else "eagle3"
        if self.parallel:
            said |= {"mask_token_id": 7}
        proposals = {"proposal_methods": [{"speculative_tokens": 4}]}
        return {
            "transformer_layer_config": inner, "speculators_model_type": kind,
            "speculators_config": proposals, **said,
        }  # fmt: skip

    def tensors(self) -> Tensors:
        size, head, kept = self.size, self.size // self.heads, len(KEPT)
        mask = torch.zeros(VOCAB, dtype=torch.bool)
        mask[KEPT] = True
        found = {
            "fc.weight": random(size, 3 * TARGET), "embed_tokens.weight": random(VOCAB, size) * 2,
            "lm_head.weight": random(kept, size), "norm.weight": 1 + random(size),
            "d2t": KEPT - torch.arange(kept), "t2d": mask,
        }  # fmt: skip
        for number in range(self.layers):
            name = self.first if number == 0 else f"layers.{number}."
            reads = size if number else 2 * size
            found |= {
                f"{name}self_attn.q_proj.weight": random(size, reads) * 2,
                f"{name}self_attn.k_proj.weight": random(self.kv * head, reads) * 2,
                f"{name}self_attn.v_proj.weight": random(self.kv * head, reads) * 2,
                f"{name}self_attn.o_proj.weight": random(size, size),
                f"{name}mlp.gate_proj.weight": random(self.wide, size),
                f"{name}mlp.up_proj.weight": random(self.wide, size),
                f"{name}mlp.down_proj.weight": random(size, self.wide),
                f"{name}input_layernorm.weight": 1 + random(size),
                f"{name}post_attention_layernorm.weight": 1 + random(size),
            }
            if number == 0:
                found[f"{name}hidden_norm.weight"] = 1 + random(size)
            if self.qk_norm:
                found |= {f"{name}self_attn.{n}_norm.weight": 1 + random(head) for n in "qk"}
        if "norm_before_fc" in self.flags:
            found["input_norm.weight"] = 1 + random(3 * TARGET)
        if "fc_norm" in self.flags:
            found |= {f"fc_norm.{i}.weight": 1 + random(TARGET) for i in range(3)}
        if self.parallel:
            found["mask_hidden"] = random(1, 1, 3 * TARGET) * 2
        return found

    def logits(self, tensors: Tensors, features: Tensor, tokens: list[int]) -> Tensor:
        """[Vd] after true features [T, F] and as many tokens or more, each after the one before."""
        hidden, end = self._mixed(tensors, features), len(features)
        out = hidden
        if self.parallel:
            ahead = len(tokens) - end
            mask = self._mixed(tensors, tensors["mask_hidden"].flatten()).expand(ahead, -1)
            words = torch.tensor(tokens[:end] + [7] * ahead)
            out = self._run(tensors, words, torch.cat([hidden, mask]))
        else:
            for stop in range(end, len(tokens) + 1):
                out = self._run(tensors, torch.tensor(tokens[:stop]), hidden)
                hidden = torch.cat([hidden, out[-1:]])
        last = out[-1]
        if "norm_output" not in self.flags:
            last = rms(last, tensors["norm.weight"])
        return F.linear(last, tensors["lm_head.weight"])

    def _mixed(self, tensors: Tensors, features: Tensor) -> Tensor:
        if "norm_before_fc" in self.flags:
            features = rms(features, tensors["input_norm.weight"])
        if "fc_norm" in self.flags:
            each = enumerate(features.chunk(3, -1))
            features = torch.cat([rms(f, tensors[f"fc_norm.{i}.weight"]) for i, f in each], -1)
        return F.linear(features, tensors["fc.weight"])

    def _run(self, tensors: Tensors, words: Tensor, hidden: Tensor) -> Tensor:
        for number in range(self.layers):
            prefix = self.first if number == 0 else f"layers.{number}."
            own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            if number == 0:
                inner = rms(hidden, own["hidden_norm.weight"])
                word = rms(tensors["embed_tokens.weight"][words], own["input_layernorm.weight"])
                reads = torch.cat([word, inner], -1)
                added = inner if "norm_before_residual" in self.flags else hidden
            else:
                reads, added = rms(hidden, own["input_layernorm.weight"]), hidden
            hidden = added + self._attended(own, reads, number)
            inner = rms(hidden, own["post_attention_layernorm.weight"])
            hidden = hidden + gated(own, inner)
        return rms(hidden, tensors["norm.weight"]) if "norm_output" in self.flags else hidden

    def _attended(self, own: Tensors, reads: Tensor, number: int) -> Tensor:
        at = torch.arange(len(reads))
        seen = at.unsqueeze(1) >= at
        if self.window and self.types[number] == "sliding_attention":
            seen &= at.unsqueeze(1) - at < self.window
        return attended(own, reads, seen, self.size // self.heads, self.share)


WINDOW = ("sliding_attention",)
VARIANTS = {
    # The config's heads are another model's: the tensors' count.
    "narrow": Variant(
        size=16, heads=2, kv=1, first="midlayer.",
        said={"target_hidden_size": TARGET, "num_key_value_heads": 8, "head_dim": 8},
    ),
    "EAGLE-3.1": Variant(flags=("norm_before_fc", "norm_output", "norm_before_residual")),
    "fc_norm": Variant(flags=("fc_norm", "norm_output"), first="midlayer."),
    "window": Variant(window=3, types=WINDOW),
    "two layers": Variant(layers=2, window=4, types=("full_attention", *WINDOW)),
    "a share of each head": Variant(share=0.5, first="midlayer."),
    "a share, with norms": Variant(share=0.25, qk_norm=True, layers=2),
    "q and k norms": Variant(qk_norm=True, flags=("norm_before_residual",)),
    "of all": Variant(
        layers=2, qk_norm=True, window=4, types=("full_attention", *WINDOW),
        flags=("fc_norm", "norm_output", "norm_before_residual"),
    ),
    "P-EAGLE": Variant(parallel=True, flags=("norm_before_residual",)),
    "P-EAGLE of two layers": Variant(
        parallel=True, layers=2, qk_norm=True, window=5, types=WINDOW * 2, flags=("fc_norm",)
    ),
}  # fmt: skip
