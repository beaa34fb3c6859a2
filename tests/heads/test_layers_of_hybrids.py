"""Drafters with layers of their own, in the sizes of targets with recurrent layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from headstart.heads import family, load_drafter, save_drafter
from headstart.heads.artifacts.manifest import Manifest, fingerprint
from headstart.heads.core import capture
from headstart.heads.eagle import EagleConfig
from headstart.heads.parts.own_layers import layers_of
from headstart.infer import Speculator
from tests.support.families import LENGTHS
from tests.support.recurrent import DELTA, LAYERS, RECURRENT
from tests.support.recurrent import family as targets
from tests.support.tiny import prompts

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
    "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0],
}  # fmt: skip
TARGETS = {
    "qwen3.5": targets(  # as that of 27B: heads that do not divide the hidden size
        tf.Qwen3_5ForCausalLM,
        tf.Qwen3_5TextConfig,
        **{**LAYERS, **DELTA, "num_attention_heads": 6, "rope_parameters": YARN},
    ),
    **{name: RECURRENT[name] for name in ("qwen3-next", "kimi-linear", "lfm2", "nemotron-h")},
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "hydra": {"prefix": True}, "eagle": {}, "eagle3": {}, "dflash": {"layers": 2, "depths": 3},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=pytest.mark.proof if (number + turn) % 2 else ())
        for number, kind in enumerate(TARGETS)
        for turn, name in enumerate(DRAFTERS)
    ],
)
def test_it_is_made_learns_is_saved_and_drafts(kind: str, name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    target, drafters = TARGETS[kind]().eval(), family(name)
    config: Any = drafters.config_class
    made: Any = drafters(config.for_target(target, **DRAFTERS[name])).double().bind(target)
    made.init_from_target(torch.arange(target.config.vocab_size))
    ids, mask = prompts(LENGTHS)
    with torch.no_grad():
        features = capture(target, made.config.feature_layers, ids)
    where = torch.zeros_like(ids).bool().index_fill(1, torch.arange(3), True)
    made.draft_hidden_states(features, ids, where, 2).square().mean().backward()
    assert all(each.grad.isfinite().all() for each in made.parameters() if each.grad is not None)
    save_drafter(made, tmp_path, Manifest(name, "it", fingerprint(target)))
    again = load_drafter(tmp_path, target)
    written = target.generate(ids, attention_mask=mask, **GREEDY)
    found = Speculator(target, again, tree="best-first:8,3,3").generate(
        ids, attention_mask=mask, **GREEDY
    )
    assert torch.equal(found, written)


@pytest.mark.parametrize(
    ("sizes", "heads"),
    [((5120, 24, 4), (20, 4)), ((4096, 32, 8), (32, 8)), ((32, 6, 3), (4, 1))],
)
def test_a_layer_of_llama_has_heads_that_divide_its_size(
    sizes: tuple[int, int, int], heads: tuple[int, int]
) -> None:
    """Else its config could not be read where others run it."""
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads")
    config = tf.Qwen3_5TextConfig(**dict(zip(names, sizes, strict=True)))
    target: Any = type("Target", (), {"config": config})
    layer: Any = EagleConfig.for_target(target).layer
    assert (layer["num_attention_heads"], layer["num_key_value_heads"]) == heads
    assert layer["head_dim"] == config.head_dim
    tf.LlamaConfig(**layer)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (tf.LlamaConfig, "rms_norm_eps"),
        (tf.Lfm2Config, "norm_eps"),
        (tf.NemotronHConfig, "layer_norm_epsilon"),
        (tf.GPTNeoXConfig, "layer_norm_eps"),
        (tf.Starcoder2Config, "norm_epsilon"),
        (tf.OlmoConfig, None),  # norms without a setting
    ],
)
def test_norms_add_to_the_variance_what_the_targets_do(config: Any, name: str | None) -> None:
    given = config() if name is None else config(**{name: 3e-4})
    made: Any = EagleConfig.for_target(type("Target", (), {"config": given}))  # type: ignore[arg-type]
    with torch.device("meta"):
        drafter: Any = family("eagle")(made)
    found = drafter.model.layers[0].post_attention_layernorm.variance_epsilon
    assert found == made.layer["rms_norm_eps"] == (1e-6 if name is None else 3e-4)


def test_numbers_of_layers_in_a_config_follow_the_chosen_ones() -> None:
    config = tf.Qwen3NextConfig(num_hidden_layers=4, mlp_only_layers=[1, 3])
    found: Any = layers_of(config, [0, 3])
    assert found.mlp_only_layers == [1]
    assert found.layer_types == ["linear_attention", "full_attention"]
