"""Block drafters as they are published, with random values, and what their equations give.

The reference runs one block behind one text, without a cache, from names, shapes and configs alone.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.support.equations import EPS, THETA, attended, gated, rms
from tests.support.tiny import VOCAB, tiny

SIZE, HEADS, KV, HEAD, WIDE = 32, 4, 2, 8, 24
MASK = 61  # the mask token
GRU = 12  # the size of Domino's
GROUP = 8  # channels of a group of a convolution
TARGET_LAYERS = [0, 1]  # by their output


@dataclass(frozen=True)
class Form:
    """What is special about a drafter."""

    layers: int = 2
    block: int = 5
    causal: bool = False
    dspark: bool = False
    from_anchor: bool = False  # whether the newest token's place drafts, which a DSpark's does
    rank: int = 0
    kind: str = "vanilla"  # of the term of that rank
    domino: int = 0  # the rank of Domino's term
    plain: int = 1  # how many drafts it leaves alone
    window: int = 0
    seeing_all: int = 1  # the number of the layer without the window
    both_ways: bool = False  # what the window's layers say of causality
    kernel: int = 0  # of DFlash2's convolutions
    selector: int = 0  # its rank
    top_k: int = 5
    share: float = 1.0  # of each head, that positions turn
    multiplier: float = 1.0
    cap: float = 0.0

    @property
    def config(self) -> dict[str, Any]:
        return {
            "architectures": [
                "Qwen3DSparkModel" if self.dspark
                else "DFlash2DraftModel" if self.selector else "DFlashDraftModel"
            ],
            "model_type": "qwen3", "hidden_size": SIZE, "intermediate_size": WIDE,
            "num_hidden_layers": self.layers, "num_attention_heads": HEADS,
            "num_key_value_heads": KV, "head_dim": HEAD, "rms_norm_eps": EPS, "rope_theta": THETA,
            "max_position_embeddings": 256, "vocab_size": VOCAB, "block_size": self.block,
            "layer_types": [
                "full_attention" if not self.window or number == self.seeing_all
                else "sliding_attention" for number in range(self.layers)
            ],
            "sliding_window": self.window or None, "use_sliding_window": self.window > 0,
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": TARGET_LAYERS}
            | ({"causal": True} if self.causal else {})
            | ({"conv_kernel_size": self.kernel, "conv_group_size": GROUP} if self.kernel else {})
            | ({"selector_rank": self.selector, "selector_top_k": self.top_k}
               if self.selector else {})
            | ({"projector_type": "domino", "emb_dim": self.domino, "gru_hidden_dim": GRU,
                "pure_draft_prefix_len": self.plain, "shift_label": self.from_anchor}
               if self.domino else {})
            | ({"output_multiplier": self.multiplier} if self.multiplier != 1 else {})
            | ({"final_logit_softcapping": self.cap} if self.cap else {}),
            **({"is_causal": False} if self.both_ways else {}),
            **({"markov_head_type": self.kind} if self.kind != "vanilla" else {}),
            **({"partial_rotary_factor": self.share} if self.share != 1 else {}),
        }  # fmt: skip

    def in_speculators(self, kind: str, **said: Any) -> dict[str, Any]:
        """The config that speculators writes for it, with the layers' own nested in it."""
        theirs = self.config
        inner = theirs.pop("dflash_config")
        ids = [number + 1 for number in inner.pop("target_layer_ids")]
        outer = {name: theirs.pop(name) for name in ("architectures", "block_size")}
        theirs.pop("is_causal", None)
        return {
            "speculators_model_type": kind, "transformer_layer_config": theirs,
            "aux_hidden_state_layer_ids": ids, "sample_from_anchor": self.dspark,
            **outer, **inner, **said,
        }  # fmt: skip

    def sees(self, number: int, text: int) -> Tensor:
        """What the places of a block after a text see in a layer, [W, T + W] bool."""
        query = torch.arange(text, text + self.block).unsqueeze(1)
        ahead = torch.arange(text + self.block) - query
        windowed = self.window > 0 and number != self.seeing_all
        causal = self.causal or (windowed and not self.both_ways)
        return (ahead < (1 if causal else self.window if windowed else self.block)) & (
            ahead > -(self.window if windowed else text + self.block)
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(11)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.3

        found = {
            "fc.weight": random(SIZE, len(TARGET_LAYERS) * SIZE),
            "hidden_norm.weight": 1 + random(SIZE), "norm.weight": 1 + random(SIZE),
        }  # fmt: skip
        for number in range(self.layers):
            products = {
                "self_attn.q_proj": (HEADS * HEAD, SIZE), "self_attn.k_proj": (KV * HEAD, SIZE),
                "self_attn.v_proj": (KV * HEAD, SIZE), "self_attn.o_proj": (SIZE, HEADS * HEAD),
                "mlp.gate_proj": (WIDE, SIZE), "mlp.up_proj": (WIDE, SIZE),
                "mlp.down_proj": (SIZE, WIDE),
            }  # fmt: skip
            norms = {"input_layernorm": SIZE, "post_attention_layernorm": SIZE}
            norms |= {"self_attn.q_norm": HEAD, "self_attn.k_norm": HEAD}
            layer = {name: random(*shape) for name, shape in products.items()}
            layer |= {name: 1 + random(size) for name, size in norms.items()}
            found |= {f"layers.{number}.{name}.weight": value for name, value in layer.items()}
            for part in ("attention_conv", "mlp_conv") if self.kernel else ():
                name, wide = f"layers.{number}.{part}", 2 * self.kernel * SIZE // GROUP
                found[f"{name}.base_kernel"] = random(2, self.kernel, SIZE)
                found[f"{name}.kernel_projection.weight"] = random(wide, SIZE)
        if self.rank:
            for which in (1, 2):
                found[f"markov_head.markov_w{which}.weight"] = random(VOCAB, self.rank)
        if self.kind == "gated":
            found["markov_head.gate_proj.weight"] = random(self.rank, SIZE + self.rank)
            found["markov_head.gate_proj.bias"] = random(self.rank)
        if self.kind == "rnn":
            found["markov_head.joint_proj.weight"] = random(3 * self.rank, 2 * self.rank + SIZE)
            found["markov_head.joint_proj.bias"] = random(3 * self.rank)
        if self.domino:
            found |= {
                "prefix_gru.weight_ih_l0": random(3 * GRU, SIZE),
                "prefix_gru.weight_hh_l0": random(3 * GRU, GRU),
                "embed_proj.0.weight": random(self.domino, SIZE + GRU),
                "embed_proj.2.weight": random(VOCAB, self.domino),
            }  # fmt: skip
        if self.selector:
            for book in ("predecessor", "successor"):
                found[f"candidate_selector.{book}_codebook"] = random(VOCAB, self.selector)
            found["candidate_selector.hidden_projection.weight"] = random(self.selector, SIZE)
        if self.dspark:
            found |= {"confidence_head.proj.weight": random(1, SIZE + self.rank)}
            found |= {"confidence_head.proj.bias": random(1)}
        return found


def convolved(of: dict[str, Tensor], part: str, normed: Tensor) -> list[Any]:
    """The convolutions before and after a part of a layer; without any they change nothing."""
    base = of.get(f"{part}_conv.base_kernel")
    if base is None:
        return [lambda states: states] * 2
    dynamic = (normed @ of[f"{part}_conv.kernel_projection.weight"].T).view(
        len(normed), 2, base.shape[1], SIZE // GROUP
    )

    def mix(which: int, states: Tensor) -> Tensor:
        found = []
        for place in range(len(states)):
            total = torch.zeros(SIZE, dtype=states.dtype)
            for back in range(min(base.shape[1], place + 1)):
                kernel = base[which, back] + dynamic[place, which, back].repeat_interleave(GROUP)
                total = total + kernel * states[place - back]
            found.append(total)
        return torch.stack(found)

    return [partial(mix, which) for which in (0, 1)]


def by_hand(form: Form, features: Tensor, tokens: list[int]) -> Tensor:
    """The logits [K, V] of the drafts after a text.

    Args:
        features: [T, F], of the text but for its last token, the anchor.
        tokens: T + 1 of the text, then those that were drafted, K - 1 at least with `rank`.
    """
    weights, text, target = form.tensors, len(features), tiny("llama")
    context = rms(features @ weights["fc.weight"].T, weights["hidden_norm.weight"])  # [T, D]
    ids = torch.tensor([tokens[text]] + [MASK] * (form.block - 1))
    hidden = target.model.embed_tokens(ids)  # [W, D]
    for number in range(form.layers):
        prefix = f"layers.{number}."
        of = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
        normed = rms(hidden, of["input_layernorm.weight"])
        before, after = convolved(of, "attention", normed)
        normed = before(normed)
        mixed = attended(of, normed, form.sees(number, text), HEAD, form.share, behind=context)
        hidden = hidden + after(mixed)
        normed = rms(hidden, of["post_attention_layernorm.weight"])
        before, after = convolved(of, "mlp", normed)
        normed = before(normed)
        hidden = hidden + after(gated(of, normed))
    drafts = rms(hidden, weights["norm.weight"])
    drafts = drafts if form.dspark or form.from_anchor else drafts[1:]
    logits = target.lm_head(drafts) * form.multiplier  # [K, V]
    if form.cap:
        logits = torch.tanh(logits / form.cap) * form.cap
    if form.selector:
        first, second, inner = (
            weights[f"candidate_selector.{name}"]
            for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
        )
        least = logits.topk(form.top_k, -1).values[:, -1:]
        before = torch.tensor(tokens[text : text + len(logits)])
        logits = (logits + (first[before] * (drafts @ inner.T)) @ second.T).masked_fill(
            logits < least, -torch.inf
        )
    before = torch.tensor(tokens[text : text + len(logits)])
    if form.rank:
        logits = logits + paired(form, weights, before, drafts)
    if form.domino:
        gru = torch.nn.GRU(SIZE, GRU, bias=False, batch_first=True).double()
        gru.load_state_dict(
            {n.removeprefix("prefix_gru."): w for n, w in weights.items() if "prefix_gru" in n}
        )
        states = gru(target.model.embed_tokens(before)[None])[0][0]  # [K, S]
        inner = torch.cat([drafts, states], 1) @ weights["embed_proj.0.weight"].T
        added = torch.nn.functional.silu(inner) @ weights["embed_proj.2.weight"].T
        added[: form.plain] = 0
        logits = logits + added
    return logits


def paired(form: Form, weights: dict[str, Tensor], before: Tensor, drafts: Tensor) -> Tensor:
    """What DSpark's term adds to the logits of drafts [K, D] after tokens [K]: [K, V]."""
    part = "markov_head."
    of = {n.removeprefix(part): w for n, w in weights.items() if n.startswith(part)}
    rows = of["markov_w1.weight"][before]
    if form.kind == "gated":
        read = torch.cat([drafts, rows], 1)
        rows = torch.sigmoid(read @ of["gate_proj.weight"].T + of["gate_proj.bias"]) * rows
    if form.kind == "rnn":
        state, found = torch.zeros(form.rank, dtype=rows.dtype), []
        for row, draft in zip(rows, drafts, strict=True):
            read = torch.cat([state, row, draft])
            gate, new, out = (of["joint_proj.weight"] @ read + of["joint_proj.bias"]).chunk(3)
            found.append(out.tanh())
            state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * new.tanh()
        rows = torch.stack(found)
    return rows @ of["markov_w2.weight"].T
