"""MTP: modules of released models against transformers' own, the start of new ones, its layers."""

import json
import logging
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from headstart.heads import ArtifactError, OptionError, family, load_drafter, save_drafter
from headstart.heads.artifacts.conversion import convert
from headstart.heads.artifacts.manifest import Manifest, fingerprint, read_manifest
from headstart.heads.artifacts.source import DrafterSource, SourceKind
from headstart.heads.core.unsafe_settings import unsafe_settings
from headstart.heads.mtp import Mtp, MtpConfig
from headstart.heads.parts.own_layers import norm_scale
from headstart.infer import Speculator
from tests.support.families import LENGTHS
from tests.support.families import drafter as of_family
from tests.support.shipped_mtp import CONFIGS, ours, transformers_own, with_module
from tests.support.tiny import COMMON, letters, one_line, prompts, tiny
from tests.support.tiny import CONFIGS as TARGETS

GREEDY: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}


def new(target: Any, **options: Any) -> Any:
    torch.manual_seed(5)
    kind: Any = family("mtp")
    made = kind(MtpConfig.for_target(target, **options)).to(target.dtype).bind(target)
    made.init_from_target(torch.arange(target.config.vocab_size))
    return made.eval()


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_released_module_drafts_what_it_does_in_transformers(kind: str, tmp_path: Path) -> None:
    target = with_module(kind, tmp_path)
    drafter: Any = load_drafter("mtp", target)
    assert isinstance(drafter, Mtp) and drafter.dtype == torch.float64
    ids, _ = prompts([12])
    # Its class finds those of released checkpoints alone.
    number = target.config.num_hidden_layers
    target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{number}\."]
    if not hasattr(target.config, "num_mtp_layers"):
        target.config.num_mtp_layers = 1
        target.config.mtp_mlp_layer_types = target.config.mlp_layer_types[-1:]
    expected, found = transformers_own(target, ids), ours(target, drafter, ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * expected.abs().max())
    written = target.generate(ids, **GREEDY)
    assert torch.equal(written, target.generate(ids, use_mtp=True, **GREEDY))
    speculator = Speculator(target, drafter, tree="best-first:8,3,3")
    assert torch.equal(speculator.generate(ids, **GREEDY), written)


def test_the_last_norm_is_read_as_hy3_names_it(tmp_path: Path) -> None:
    target, file = with_module("hy-v3", tmp_path), tmp_path / "model.safetensors"
    usual: Any = load_drafter("mtp", target)
    named = {
        n.replace("shared_head.norm", "final_layernorm"): t for n, t in load_file(file).items()
    }
    assert "model.layers.2.final_layernorm.weight" in named
    save_file(named, file, {"format": "pt"})
    found: Any = load_drafter("mtp", target)
    for name, tensor in usual.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor)


def test_rotary_frequencies_are_not_rounded(tmp_path: Path) -> None:
    """A relative error of 2^-9 turns keys a thousand tokens away by more than a radian."""
    target = with_module("glm4", tmp_path).bfloat16()
    drafter: Any = load_drafter("mtp", target)
    assert {weight.dtype for weight in drafter.parameters()} == {torch.bfloat16}
    found, exact = (each.model.rotary_emb.inv_freq for each in (drafter, target))
    assert found.dtype == torch.float32
    assert not torch.equal(found, exact), "the target was cast whole, and shows the difference"
    torch.testing.assert_close(found.bfloat16(), exact, rtol=0, atol=0)


@pytest.mark.parametrize("kind", CONFIGS)
def test_training_starts_from_the_released_module(kind: str, tmp_path: Path) -> None:
    target = with_module(kind, tmp_path / "target")
    drafter, shipped = new(target, depths=2), load_drafter("mtp", target)
    for name, tensor in shipped.state_dict().items():
        assert torch.equal(drafter.state_dict()[name], tensor)
    # Its artifact names no setting that could load code or files, and loads.
    assert not list(unsafe_settings(drafter.config.to_dict()))
    save_drafter(drafter, tmp_path / "heads", Manifest("mtp", "it", fingerprint(target)))
    again = load_drafter(tmp_path / "heads", target)
    ids, mask = prompts(LENGTHS)
    one, other = (
        Speculator(target, each, tree="chain:3").generate(ids, attention_mask=mask, **GREEDY)
        for each in (drafter, again)
    )
    assert torch.equal(one, other)


def test_a_released_module_becomes_an_artifact(tmp_path: Path) -> None:
    """For which `headstart plan` can then plan."""
    target = with_module("glm4", tmp_path / "target")
    folder = convert("mtp", target, letters(), tmp_path / "heads")
    assert read_manifest(folder).origin == str(tmp_path / "target")
    card = (folder / "README.md").read_text()
    assert "# An mtp drafter for" in card and "judged by its shapes" not in card
    again, shipped = (load_drafter(name, target) for name in (folder, "mtp"))
    for name, tensor in shipped.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_of_several_layers_the_first_drafts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = with_module("glm4", tmp_path, layers=2)
    with caplog.at_level(logging.WARNING):
        drafter: Any = load_drafter("mtp", target)
    assert "2 layers for multi-token prediction" in caplog.text
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(drafter.eh_proj.weight, saved["model.layers.2.eh_proj.weight"])


@pytest.mark.parametrize("saved", [False, True])
def test_a_target_without_one_says_so(saved: bool, tmp_path: Path) -> None:
    assert DrafterSource("mtp").kind is SourceKind.IN_TARGET
    target = tiny("llama")
    if saved:  # its config promises one
        tf.AutoModelForCausalLM.from_config(CONFIGS["glm4"]()).save_pretrained(tmp_path)
        target = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(OptionError, match=r"holds no module .*drafter.family=mtp") as caught:
        load_drafter("mtp", target)
    one_line(caught.value)


@torch.no_grad()
@pytest.mark.parametrize("name", [n for n in TARGETS if n != "gpt2"])
def test_a_new_module_starts_as_the_feature_itself(name: str) -> None:
    """But for the token, of which it adds a little."""
    target = tiny(name)
    drafter = new(target, depths=3)
    drafter.eh_proj.weight[:, : target.config.hidden_size] = 0
    ids, _ = prompts([12])
    features = target.get_decoder()(ids)[0]
    states = drafter.draft_hidden_states(features, ids, torch.ones_like(ids).bool(), 1)[0]
    torch.testing.assert_close(states, features.flatten(0, 1), rtol=1e-5, atol=1e-5)
    assert norm_scale(target) is not None


@pytest.mark.parametrize("name", TARGETS)
def test_its_layer_is_one_of_the_targets(name: str) -> None:
    target = tiny(name)
    drafter = new(target)
    layer, kinds = drafter.model.config, getattr(target.config, "layer_types", None)
    assert type(drafter.model) is type(target.get_decoder()) and layer.num_hidden_layers == 1
    if kinds and "full_attention" in kinds:
        assert layer.layer_types == ["full_attention"]
    ids, mask = prompts(LENGTHS)
    speculator = Speculator(target, drafter, tree="chain:3")
    found = speculator.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(found, target.generate(ids, attention_mask=mask, **GREEDY))


def test_sinks_and_soft_caps_are_trained_with_dense_masks() -> None:
    """FlexAttention, as it is called, knows neither."""
    experts: dict[str, Any] = {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2}
    sinks = tf.GptOssForCausalLM(tf.GptOssConfig(**experts)).float()
    capped = tf.Gemma2ForCausalLM(tf.Gemma2Config(**COMMON, attn_logit_softcapping=5.0))
    assert new(sinks)._mask_options == new(capped)._mask_options == {"flex": False}
    assert new(tiny("llama"))._mask_options == {}


def test_code_of_a_target_is_not_run() -> None:
    config, kind = MtpConfig.for_target(tiny("llama")), cast(Any, Mtp)
    config.layer = {**(config.layer or {}), "model_type": "of_its_own"}
    with pytest.raises(OptionError, match=r"'of_its_own'.* part of transformers") as caught:
        kind(config)
    one_line(caught.value)


@pytest.mark.parametrize(
    ("layer", "match"),
    [
        (None, "no transformer_layer_config"),
        ({"model_type": "qwen3", "auto_map": {"AutoModel": "x.Y"}}, "no transformer_layer_config"),
        ({"model_type": "of_its_own"}, "describes no layer that transformers knows .*of_its_own"),
        ({"model_type": "qwen3", "layer_types": 5}, "describes no layer that transformers knows"),
        ({"model_type": "qwen3", "hidden_size": "32"}, "describes no layer that transformers"),
    ],
)
def test_a_speculators_config_that_cannot_be_used(layer: Any, match: str, tmp_path: Path) -> None:
    config = {"speculators_model_type": "mtp", "transformer_layer_config": layer}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"mtp_layers.0.input_proj.weight": torch.zeros(2, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(ArtifactError, match=match) as caught:
        load_drafter(tmp_path, tiny("qwen3"))
    one_line(caught.value)


def test_another_order_of_its_inputs() -> None:
    """As a target's config may say: the hidden state comes first."""
    drafter = of_family("mtp", "tiny")
    config = MtpConfig.for_target(tiny("llama"), depths=2)
    config.layer = {**(config.layer or {}), "mtp_hidden_states_first": True}
    other: Any = family("mtp")(config).double().bind(tiny("llama")).eval()
    other.load_state_dict(drafter.state_dict())
    token, hidden = drafter.eh_proj.weight.chunk(2, 1)
    other.eh_proj.weight.data = torch.cat([hidden, token], 1)
    ids, _ = prompts([9])
    features = torch.randn(1, 9, 32, dtype=torch.double)
    where = torch.ones_like(ids).bool()
    one, two = (d.draft_hidden_states(features, ids, where, 2) for d in (drafter, other))
    torch.testing.assert_close(one, two)
