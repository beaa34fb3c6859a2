"""From final hidden states to logits, as the model itself goes, and the layer alone."""

import copy
from typing import Any

import pytest
import torch
import transformers as tf

from headstart.heads import FINAL, OptionError
from headstart.heads.core import OutputLayer, capture, output_layer
from tests.support.tiny import COMMON, VOCAB, one_line, tiny

ENDS: dict[str, Any] = {
    "llama": lambda: tiny("llama"),
    "a factor": lambda: tf.CohereForCausalLM(tf.CohereConfig(**COMMON, logit_scale=0.5)),
    "a divisor": lambda: tf.GraniteForCausalLM(tf.GraniteConfig(**COMMON, logits_scaling=3.0)),
    "a soft cap": lambda: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(**COMMON, final_logit_softcapping=0.5, query_pre_attn_scalar=8)
    ),
}


@pytest.mark.parametrize("name", ENDS)
@torch.no_grad()
def test_logits_are_the_model_s_own(name: str) -> None:
    model = ENDS[name]().eval()
    ids = torch.randint(1, VOCAB, (2, 6))
    expected = model(input_ids=ids, use_cache=False).logits
    hidden = capture(model, [FINAL], ids)
    assert torch.equal(OutputLayer(model)(hidden), expected)
    some = torch.tensor([1, 5, 9])
    assert torch.equal(OutputLayer(model, some)(hidden), expected[..., some])
    alone = OutputLayer(model).raw(hidden)
    assert torch.equal(alone, output_layer(model)(hidden))
    assert (name == "llama") == torch.equal(alone, expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_quantised_layer_reads_the_model_s_dtype(dtype: torch.dtype) -> None:
    model, read = copy.deepcopy(tiny("llama")).float(), []

    class Quantised(torch.nn.Module):
        weight = torch.nn.Parameter(torch.zeros(VOCAB, 32).to(dtype), requires_grad=False)

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            read.append(states.dtype)
            return states[..., :1].expand(*states.shape[:-1], VOCAB)

    model.lm_head = Quantised()
    OutputLayer(model).raw(torch.randn(3, 32, dtype=torch.float64))
    assert read == [torch.float32]


def test_a_cap_is_found_where_logits_are_small() -> None:
    config = tf.Gemma2Config(**COMMON, final_logit_softcapping=30.0, query_pre_attn_scalar=8)
    model = tf.Gemma2ForCausalLM(config).eval()
    finish = OutputLayer(model).finish  # of random weights, whose logits are far below the cap
    assert finish(torch.tensor([[1e4]])).item() == 30.0


def test_the_trial_leaves_no_trace() -> None:
    """Mode, hooks and random numbers are as before, in a model with dropout too."""
    model = tf.GPT2LMHeadModel(
        tf.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, bos_token_id=None)
    ).train()
    before = torch.random.get_rng_state()
    _ = OutputLayer(model).finish
    assert model.training and torch.equal(torch.random.get_rng_state(), before)
    assert not any(module._forward_hooks for module in model.modules())


def test_another_way_is_refused() -> None:
    model: Any = tf.GraniteForCausalLM(tf.GraniteConfig(**COMMON, logits_scaling=3.0)).eval()
    forward = model.forward

    def shifted(**options: Any) -> Any:
        found = forward(**options)
        found.logits = found.logits + 7
        return found

    model.forward = shifted
    with pytest.raises(OptionError, match="expected a factor, a soft cap, both or none") as caught:
        _ = OutputLayer(model).finish
    one_line(caught.value)


def test_no_layers_are_captured_without_a_forward() -> None:
    assert capture(tiny("llama"), [], torch.ones(2, 5).long()).shape == (2, 5, 0)
