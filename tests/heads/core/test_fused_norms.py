"""Sums with the norm that comes after them are what a model computes apart."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from headstart.heads.core import FusedLayers
from headstart.heads.core.fused_norms import is_as_llamas
from tests.support.operators import Names
from tests.support.tiny import tiny


def logits_of(model: Any, fused: FusedLayers | None = None) -> tuple[torch.Tensor, Counter[str]]:
    ids, names = torch.arange(10).view(2, -1), Names()
    with torch.no_grad(), names:
        if fused is None:
            return model(ids).logits, names.seen
        with fused:
            return model(ids).logits, names.seen


def model_of(name: str) -> Any:
    return copy.deepcopy(tiny(name)).double()


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_all_sums_but_none_of_the_norms_of_heads(name: str) -> None:
    model = model_of(name)
    expected, _ = logits_of(model)
    layers, heads = model.config.num_hidden_layers, 2 if name == "qwen3" else 0
    for _ in range(2):  # the second time they are found as the first one left them
        fused = FusedLayers(model)
        found, seen = logits_of(model, fused)
        assert torch.equal(found, expected) and fused.found["layers"] == layers
        assert (seen["add_norm"], seen["rms_norm"]) == (2 * layers, 1 + heads * layers)
    assert torch.equal(logits_of(model)[0], expected)


CHANGES: dict[str, Any] = {
    "another tensor": lambda states: states.clone(),
    "in place": lambda states: states.mul_(2),
    "nothing": lambda states: None,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("part", ["", "mlp", "self_attn", "post_attention_layernorm"])
def test_what_a_hook_changes_is_what_is_computed_with(part: str, change: str) -> None:
    model = model_of("llama")
    fused = FusedLayers(model)

    def hook(module: Any, given: Any, found: Any) -> Any:
        if isinstance(found, tuple):
            changed = CHANGES[change](found[0])
            return None if changed is None else (changed, *found[1:])
        return CHANGES[change](found)

    for layer in model.model.layers:
        layer.get_submodule(part).register_forward_hook(hook)
    found, seen = logits_of(model, fused)
    assert torch.equal(found, logits_of(model)[0]) and seen["add_norm"]


def test_a_norm_that_is_called_with_something_else_computes() -> None:
    model = model_of("llama")
    fused, norm = FusedLayers(model), model.model.norm
    layer, states = model.model.layers[-1], torch.randn(1, 2, model.config.hidden_size).double()
    angles = model.model.rotary_emb(states, torch.arange(2)[None])
    with torch.no_grad(), fused:
        total = layer(states, attention_mask=None, position_embeddings=angles)
        assert torch.equal(norm(states), type(norm).forward(norm, states))
        assert torch.equal(norm(total), type(norm).forward(norm, total))


class Scaled(LlamaDecoderLayer):
    def forward(self, hidden_states: Any, **options: Any) -> Any:  # type: ignore[override]
        return 0.5 * super().forward(hidden_states, **options)


class Forgetful(LlamaDecoderLayer):
    def forward(self, hidden_states: Any, **options: Any) -> Any:  # type: ignore[override]
        options["position_ids"] = None
        return super().forward(hidden_states, **options)


class Strict(LlamaDecoderLayer):
    def forward(self, hidden_states: Any, position_embeddings: Any = None) -> Any:  # type: ignore[override]
        return super().forward(hidden_states, position_embeddings=position_embeddings)


class InATuple(LlamaDecoderLayer):
    def forward(self, hidden_states: Any, **options: Any) -> Any:  # type: ignore[override]
        return (super().forward(hidden_states, **options),)


@pytest.mark.parametrize("kind", [Scaled, Forgetful, Strict, InATuple])
def test_layers_that_do_something_else_are_left_as_they_are(kind: Any) -> None:
    model = type(tiny("llama"))(tiny("llama").config).eval().double()  # not fused before
    assert is_as_llamas(model.model.layers[0])
    model.model.layers[1].__class__ = kind
    assert not is_as_llamas(model.model.layers[1])
    assert FusedLayers(model).found["layers"] == 1
    if kind is Scaled:
        expected, _ = logits_of(model)
        assert torch.equal(logits_of(model, FusedLayers(model))[0], expected)


@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
def test_other_layers_are_left_as_they_are(name: str) -> None:
    assert "layers" not in FusedLayers(model_of(name)).found
