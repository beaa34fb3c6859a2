"""What a recipe takes where the target has recurrent layers, compared with the real model."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headstart.heads.core import SlabCache, probe_layers
from headstart.heads.parts.adapter import Adapter
from headstart.heads.parts.own_layers import attending_layers, recurrent_layers
from headstart.train.estimate import estimate, meta_drafter, training_flops
from headstart.train.recipe import Recipe, parse_recipe
from tests.support.recipes import TINY
from tests.support.recurrent import RECURRENT, recurrent
from tests.support.tiny import tiny


def recipe(**drafter: Any) -> Recipe:
    return parse_recipe(TINY | {"target": {"model": "org/model"}, "drafter": drafter})


def shapes_alone(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    config = recurrent(name).config
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@pytest.mark.parametrize("name", RECURRENT)
def test_a_cache_is_counted_with_states_and_without_layers_that_do_not_attend(name: str) -> None:
    given = recipe(family="medusa2", heads=2, rank=4, alpha=8)
    target = shapes_alone(name)
    found = estimate(given, target)
    real = recurrent(name, torch.bfloat16)
    cache = SlabCache(probe_layers(real), 0, 0)
    rows, tokens = given.distill.batch_size, given.distill.row_tokens
    taken = (found.memory["writing"] - found.memory["target"]) * 1e9
    assert taken == pytest.approx(cache.bytes_of(rows, tokens))
    assert found.parameters["target"] == sum(weight.numel() for weight in real.parameters())
    adapter = Adapter(4, 8, 0.05, [])
    adapter.attach(real)
    try:
        count = sum(factor.numel() for factor in adapter.parameters())
        assert found.parameters["adapter"] == count
    finally:
        adapter.detach()


def test_products_of_attention_are_those_of_layers_that_attend() -> None:
    """And a figure of a training run asks for no forward of the real target."""
    given = recipe(family="medusa", heads=2)
    target = recurrent("qwen3.5")
    drafter = meta_drafter(given, shapes_alone("qwen3.5"))
    hook = target.register_forward_pre_hook(lambda *_: pytest.fail("it ran"))
    found = training_flops(given, target, drafter)
    hook.remove()
    kinds = target.config.layer_types
    target.config.layer_types = ["full_attention"] * 4
    try:
        all_attend = training_flops(given, target, drafter)
    finally:
        target.config.layer_types = kinds
    row = 0.4 * given.distill.prefix_tokens + 0.75 * given.distill.new_tokens
    assert all_attend - found == pytest.approx(3 * 2 * row * target.config.hidden_size)


def test_layers_are_told_apart_by_the_config() -> None:
    found = {
        name: (sorted(recurrent_layers(model.config)), attending_layers(model.config, alone=False))
        for name, model in ((name, recurrent(name)) for name in ("qwen3.5", "falcon-h1", "zamba2"))
    }
    assert found == {
        "qwen3.5": ([0, 1, 3], [2]),
        "falcon-h1": ([0, 1], [0, 1]),  # each does both
        "zamba2": ([0, 1, 2, 3], [1, 3]),
    }
    nemotron = recurrent("nemotron-h").config
    assert attending_layers(nemotron) == [1]  # the last one is an MLP alone
    assert recurrent_layers(tiny("gemma3").config) == set()
    assert attending_layers(tiny("gemma3").config) == [0, 1, 2]
