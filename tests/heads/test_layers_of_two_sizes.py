"""Drafters of targets whose layers differ: Gemma 4's have heads of two sizes, and some no keys of
their own; Gemma 3n's hand on several hidden states."""

from functools import cache
from typing import Any

import pytest
import torch
import transformers as tf

from headstart.heads import OptionError, UnsupportedTarget
from headstart.heads.core import masks
from headstart.heads.core.layer_sizes import inner_size, layer_configs
from headstart.heads.parts.own_layers import keep_layers, layer_like
from headstart.infer import Speculator
from headstart.train.sizes import cache_bytes
from headstart.train.smoke import shrunk, tiny_tokenizer
from tests.support.drafters import made
from tests.support.gemma4 import target
from tests.support.tiny import VOCAB, config_of, one_line, prompts

GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}


def gemma4() -> Any:
    """Five layers: heads of 8 in the first and third, of 16 in the others; the last two read the
    keys of the second; and embeddings for each layer."""
    return target(
        num_hidden_layers=5,
        layer_types=["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        sliding_window=9,
        hidden_size_per_layer_input=8,
        initializer_range=0.2,
    )


@cache
def gemma3n() -> Any:
    torch.manual_seed(1)
    config = config_of(
        tf.Gemma3nTextConfig,
        num_hidden_layers=3,
        intermediate_size=[48, 40, 48],
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        sliding_window=9,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0, 0.5, 0.0],
    )
    return tf.Gemma3nForCausalLM(config).double().eval()


STUDENTS = ("draft_model", "pard")


@pytest.mark.parametrize("name", ["eagle", "eagle3", "dflash", "mtp", "draft_model", "pard"])
def test_greedy_text_is_generates(name: str) -> None:
    options: dict[str, Any] = {"layers": [0, 1, 2, 3]} if name in STUDENTS else {}
    drafter = made(name, gemma4(), **options).double()
    ids, mask = prompts([11, 4])
    expected = gemma4().generate(ids, attention_mask=mask, **GREEDY)
    speculator = Speculator(gemma4(), drafter)
    assert torch.equal(speculator.generate(ids, attention_mask=mask, **GREEDY), expected)


def test_a_layer_of_llamas_has_the_first_ones_sizes() -> None:
    layer = layer_like(gemma4())
    assert (layer["head_dim"], layer["num_key_value_heads"], layer["intermediate_size"]) == (
        8,
        2,
        48,
    )
    assert [each.head_dim for each in layer_configs(gemma4().config)] == [8, 16, 8, 16, 16]
    assert inner_size(gemma3n().config) == 48


def test_a_student_of_all_layers_is_the_target() -> None:
    """Its heads, its own keys and those it shares, and its part of the embeddings for layers."""
    drafter = made("draft_model", gemma4(), layers=[0, 1, 2, 3, 4]).double()
    drafter.init_from_target(torch.arange(VOCAB))
    ids, _ = prompts([11])
    assert torch.equal(drafter.model(ids).logits, gemma4()(ids).logits)


def test_some_layers_keep_what_is_theirs() -> None:
    drafter = made("draft_model", gemma4(), layers=[0, 1, 3]).double()
    drafter.init_from_target(torch.arange(VOCAB))
    config, model = drafter.model.config, drafter.model.model
    assert [each.head_dim for each in layer_configs(config)] == [8, 16, 16]
    assert config.num_kv_shared_layers == 1
    table = gemma4().model.embed_tokens_per_layer.weight.unflatten(1, (5, 8))
    kept = table[:, [0, 1, 3]].flatten(1)
    assert torch.equal(model.embed_tokens_per_layer.weight, kept)
    assert torch.equal(
        model.per_layer_model_projection.weight.unflatten(0, (3, 8)),
        gemma4().model.per_layer_model_projection.weight.unflatten(0, (5, 8))[[0, 1, 3]],
    )


def test_a_layer_without_the_one_whose_keys_it_reads() -> None:
    said = (
        r"the last 1 of the layers \[0, 3\] .* an earlier full_attention layer, and there is none"
    )
    with pytest.raises(OptionError, match=said) as e:
        made("draft_model", gemma4(), layers=[0, 3])
    one_line(e.value)


def test_gemma3n_has_no_features_between_its_layers() -> None:
    ids, _ = prompts([9])
    expected = gemma3n().generate(ids, **GREEDY)
    for name in ("eagle", "medusa"):
        speculator = Speculator(gemma3n(), made(name, gemma3n()).double())
        assert torch.equal(speculator.generate(ids, **GREEDY), expected)
    with pytest.raises(
        UnsupportedTarget, match=r"that enter layer \d .* reads only the final"
    ) as e:
        Speculator(gemma3n(), made("eagle3", gemma3n()).double()).generate(ids, **GREEDY)
    one_line(e.value)


def test_windows_of_several_widths_are_refused() -> None:
    config: Any = config_of(tf.LlamaConfig, num_hidden_layers=3, sliding_window=None)
    config.per_layer_config = {1: {"sliding_window": 5}, 2: {"sliding_window": 7}}
    model: Any = type("Model", (), {"config": config})
    config._attn_implementation = "sdpa"
    with pytest.raises(UnsupportedTarget, match="sliding windows of several widths"):
        masks.AttentionWindows.of(model)


def test_estimates_and_trials_know_each_layer() -> None:
    text = gemma4().config
    assert cache_bytes([], text, 2, 10.0) == 2 * 10 * 2 * (2 * 2) * (8 + 16 + 8 + 16 + 16)
    whole = tf.Gemma4TextConfig(num_hidden_layers=12)
    small: Any = shrunk(whole, tiny_tokenizer("gemma4_text"))
    assert {each.head_dim for each in layer_configs(small)} == {16}
    tf.Gemma4ForCausalLM(small)
    keep_layers(whole, [4, 5])
    assert [each.head_dim for each in layer_configs(whole)] == [256, 512]


@pytest.mark.parametrize("name", ["eagle3", "dflash", "mtp"])
def test_a_last_norm_that_stores_nothing(name: str) -> None:
    """OLMo's: it multiplies by 1."""
    torch.manual_seed(1)
    target: Any = tf.OlmoForCausalLM(config_of(tf.OlmoConfig, head_dim=...)).double().eval()
    ids, _ = prompts([9])
    drafter = made(name, target).double()
    expected = target.generate(ids, **GREEDY)
    assert torch.equal(Speculator(target, drafter).generate(ids, **GREEDY), expected)
