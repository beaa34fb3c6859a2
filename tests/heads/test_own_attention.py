"""Rotary positions that turn a share of each head, compared with layers that transformers has."""

from typing import Any

import pytest
import torch
from transformers import PhiConfig, Qwen3_5TextConfig, StableLmConfig
from transformers.models.phi.modeling_phi import PhiAttention, PhiRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5Attention,
    Qwen3_5TextRotaryEmbedding,
)
from transformers.models.stablelm.modeling_stablelm import (
    StableLmAttention,
    StableLmRotaryEmbedding,
)

from headstart.heads import ArtifactError, OptionError, family
from headstart.heads.parts.own_attention import turned
from headstart.heads.parts.own_layers import own_layers
from headstart.heads.parts.published.layers import read_layers
from headstart.infer import Speculator
from tests.support.drafters import deep, made
from tests.support.published_eagle import SAID, published
from tests.support.tiny import one_line, prompts, tiny

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 48,
}  # fmt: skip
SCALED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def layers(**more: Any) -> Any:
    torch.manual_seed(1)
    layer = {**SIZES, "rms_norm_eps": 1e-6, "rope_theta": 5e3, "partial_rotary_factor": 0.5, **more}
    return own_layers(layer)[0].double().eval()


@torch.no_grad()
def attended(attention: Any, rotary: Any, hidden: torch.Tensor, positions: torch.Tensor) -> Any:
    mask = torch.full((7, 7), -torch.inf, dtype=hidden.dtype).triu(1)[None, None]
    return attention(hidden, position_embeddings=rotary(hidden, positions), attention_mask=mask)[0]


@pytest.mark.parametrize(
    ("kind", "config", "rotary", "rope", "more"),
    [
        (StableLmAttention, StableLmConfig, StableLmRotaryEmbedding, {}, {}),
        (StableLmAttention, StableLmConfig, StableLmRotaryEmbedding, SCALED, {}),
        (PhiAttention, PhiConfig, PhiRotaryEmbedding, {}, {"attention_bias": True}),
        (Qwen3_5Attention, Qwen3_5TextConfig, Qwen3_5TextRotaryEmbedding, {}, {"qk_norm": True}),
    ],
)
def test_attention_is_that_of_models_that_turn_a_share(
    kind: Any, config: Any, rotary: Any, rope: dict[str, Any], more: dict[str, Any]
) -> None:
    """Positions of Qwen3.5 have three sections, which text does not tell apart."""
    ours = layers(**more, **({"rope_scaling": rope} if rope else {}))
    said = {"rope_type": "default", **rope, "rope_theta": 5e3, "partial_rotary_factor": 0.5}
    said |= {"mrope_section": [2, 1, 1]} if kind is Qwen3_5Attention else {}
    theirs = config(**SIZES, rope_parameters=said, rms_norm_eps=1e-6, attn_implementation="sdpa")
    attention, own = kind(theirs, 0).double().eval(), ours.layers[0].self_attn
    tensors = {name: torch.randn_like(t) * 0.2 for name, t in own.state_dict().items()}
    own.load_state_dict(tensors)
    names = {"o_proj": "dense"} if kind is PhiAttention else {}
    tensors = {n.replace("o_proj", names.get("o_proj", "o_proj")): t for n, t in tensors.items()}
    if kind is Qwen3_5Attention:  # its norms add 1, and a gate after attention is set to 1 / 2
        query = tensors["q_proj.weight"].unflatten(0, (4, 16))
        gated = torch.cat([query, torch.zeros_like(query)], 1).flatten(0, 1)
        tensors |= {"q_proj.weight": gated, "o_proj.weight": 2 * tensors["o_proj.weight"]}
        tensors |= {name: tensors[name] - 1 for name in ("q_norm.weight", "k_norm.weight")}
    attention.load_state_dict(tensors)
    hidden, positions = torch.randn(2, 7, 64, dtype=torch.float64), torch.arange(90, 97)[None]
    positions = positions.expand(2, -1)
    found = attended(own, ours.rotary_emb, hidden, positions)
    expected = attended(attention, rotary(theirs), hidden, positions)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    whole = attended(own, layers(partial_rotary_factor=0.25).rotary_emb, hidden, positions)
    assert (whole - expected).abs().max() > 1e-3


def test_only_the_first_dimensions_are_turned() -> None:
    states, angle = torch.randn(3, 8), torch.rand(3, 2).repeat(1, 2)
    found = turned(states, angle.cos(), angle.sin())
    assert found[:, 4:].equal(states[:, 4:]) and not found[:, :4].isclose(states[:, :4]).any()
    torch.testing.assert_close(found.norm(dim=1), states.norm(dim=1))


@pytest.mark.parametrize(
    ("said", "share"),
    [
        ({"partial_rotary_factor": 0.5}, 0.5),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, 0.5),
        ({"rope_scaling": {"rope_type": "default", "rope_dim": 4}}, 0.5),
        ({"rope_parameters": {"rope_dim": 8, "partial_rotary_factor": 0.25}}, 1),
        ({"rotary_pct": 0.5}, 0.5),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}, 1),
        ({"rope_parameters": {"mrope_section": [1, 1, 0], "mrope_interleaved": True,
          "partial_rotary_factor": 0.5}}, 0.5),
        ({"partial_rotary_factor": 1.0}, 1),
    ],
)  # fmt: skip
def test_configs_say_the_share_in_several_ways(said: dict[str, Any], share: float) -> None:
    found = read_layers(SAID | said, published(1, "model.layers.0."))
    assert found.get("partial_rotary_factor", 1) == share and found["rope_scaling"] is None


@pytest.mark.parametrize("share", [0.1, 0.2, 1.5, -0.5, 0.0])
def test_a_share_of_no_even_number_of_dimensions_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="is no even number of dimensions"):
        layers(partial_rotary_factor=share)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "dflash"])
def test_drafters_are_trained_with_a_share(name: str) -> None:
    drafter = made(name, partial_rotary_factor=0.5)
    assert drafter.config.layer["partial_rotary_factor"] == 0.5
    angles, _ = drafter.model.rotary_emb(torch.zeros(1, 1), torch.arange(3)[None])
    assert angles.shape[-1] == drafter.config.layer["head_dim"] // 2
    ids, mask = prompts([9, 4])
    target = tiny("llama")
    expected = target.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    found = Speculator(target, drafter.double()).generate(
        ids, attention_mask=mask, max_new_tokens=12
    )
    assert torch.equal(found, expected)
    kind: Any = family(name).config_class
    assert "partial_rotary_factor" not in kind.for_target(target).layer
    with pytest.raises(OptionError, match=r"partial_rotary_factor is 1\.5; expected more than 0"):
        kind.for_target(target, partial_rotary_factor=1.5)


ABLE = {
    "eagle": {"sglang"},  # whose fc has a bias
    "eagle3": {"vllm", "sglang", "tensorrt-llm"},
    "dflash": {"vllm", "sglang", "tensorrt-llm", "llama.cpp"},
}


@pytest.mark.parametrize("name", ABLE)
def test_engines_that_turn_a_share_are_told_of_it(name: str) -> None:
    """At the top of the config, where all of them look."""
    drafter = made(name, deep(), partial_rotary_factor=0.5)
    for form in drafter.exports:
        if form in ABLE[name]:
            written = drafter.exports[form](drafter)
            assert written.config["partial_rotary_factor"] == 0.5
            found = drafter.from_checkpoint(written.config, written.tensors)
            assert found is not None and found[0]["partial_rotary_factor"] == 0.5
            continue
        with pytest.raises(ArtifactError) as caught:
            drafter.exports[form](drafter)
        said = one_line(caught.value)
        assert (form, name) == ("vllm", "eagle") or "turn 0.5 of each head" in said
