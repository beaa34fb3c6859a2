"""The items of `smoke` about targets whose recurrent layers keep a state between rounds."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import transformers as tf
from torch import Tensor
from transformers import PreTrainedModel

from headstart.heads.draft_model import DraftModel
from headstart.infer.graphs import RoundGraphs
from headstart.infer.speculator import Speculator

from .paths import watched_paths
from .smoke_items import NEW, Items, Place, make_prompts

_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MIXED = ["linear_attention", "full_attention", "linear_attention"]
_KINDS = {
    "gated delta rule": lambda: tf.Qwen3_5ForCausalLM(
        tf.Qwen3_5TextConfig(
            **_SIZES,
            head_dim=16,
            layer_types=_MIXED,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        )
    ),
    "state space": lambda: tf.FalconH1ForCausalLM(
        tf.FalconH1Config(
            **_SIZES,
            mamba_d_ssm=64,
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_d_state=16,
            mamba_chunk_size=16,
        )
    ),
    "short convolution": lambda: tf.Lfm2ForCausalLM(
        tf.Lfm2Config(**_SIZES, layer_types=["conv", "full_attention", "conv"])
    ),
}


def recurrent(place: Place) -> Items:
    """Requests of several sizes on one speculator, drafted by a model that recurs, too."""
    for kind in _KINDS:
        for tree in ("chain:3", "cartesian:2,2,1")[not place.full :]:
            yield f"{kind}, {tree}", partial(_compared, place, kind, tree)


def _compared(place: Place, kind: str, tree: str) -> dict[str, Any]:
    """Captured rounds against rounds as written, which are compared with `generate`."""
    torch.manual_seed(0)
    model = cast(Any, _KINDS[kind]()).to(place.device).eval()
    with watched_paths() as paths:
        captured, tau = _texts(model, tree, True)
    paths.check()
    written, _ = _texts(model, tree, False)
    expected = [
        model.generate(ids, attention_mask=torch.ones_like(ids), **_options())
        for ids in _prompts(place)
    ]
    for name, texts in (("captured", captured), ("as written", written)):
        if not all(map(torch.equal, texts, expected)):
            raise AssertionError(f"rounds {name} write another text than generate")
    if tau < 2:
        raise AssertionError(f"the target accepts {tau:.2f} tokens a round of its own drafts")
    return {"tau": tau, **paths.to_dict()}


def _prompts(place: Place) -> list[Tensor]:
    return [make_prompts(place.device, batch, turn) for turn, batch in enumerate((1, 3, 2, 3, 1))]


def _options() -> dict[str, Any]:
    return {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


def _texts(model: PreTrainedModel, tree: str, captured: bool) -> tuple[list[Tensor], float]:
    speculator = Speculator(model, DraftModel.of(model).eval(), tree=tree, graphs=True)
    if not captured:
        speculator.graphs = RoundGraphs()
    texts = [
        speculator.generate(ids, attention_mask=torch.ones_like(ids), **_options())
        for ids in _prompts(Place(speculator.device, "toy"))
    ]
    return texts, speculator.stats.tau
