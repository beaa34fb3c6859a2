"""Drafters made of layers of targets with recurrent layers, and their output layers' factors."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from headstart.heads import OptionError
from headstart.heads.core import OutputLayer, decoder_layers
from headstart.heads.draft_model import DraftModel, DraftModelConfig
from headstart.heads.mtp import Mtp, MtpConfig
from headstart.heads.parts.own_layers import recurrent_layers
from tests.support.recurrent import RECURRENT, recurrent
from tests.support.tiny import VOCAB, one_line

ATTEND = {
    "qwen3-next": 2,
    "qwen3.5": 2,
    "qwen3.5 experts": 2,
    "kimi-linear": 2,
    "lfm2": 1,
    "lfm2 experts": 1,
    "bamba": 1,
    "granite hybrid": 1,
    "nemotron-h": 1,
}
"""Targets, and a layer of each that only attends."""


@pytest.mark.parametrize("name", RECURRENT)
def test_a_student_is_made_of_layers_of_both_kinds(name: str, tmp_path: Path) -> None:
    target = recurrent(name, torch.float32)
    chosen = [0, ATTEND.get(name, 1 if name == "zamba2" else 2 if name == "olmo-hybrid" else 1)]
    config = DraftModelConfig.for_target(target, layers=chosen)
    drafter = DraftModel(config).bind(target)
    drafter.init_from_target()
    assert 0 in recurrent_layers(drafter.model.config)
    for own, theirs in enumerate(chosen):
        expected = decoder_layers(target)[theirs].state_dict()
        for key, weight in decoder_layers(drafter.model)[own].state_dict().items():
            assert torch.equal(weight, expected[key])
    tokens = torch.randint(1, VOCAB, (1, 9))
    before = drafter.model(tokens).logits
    drafter.save_checkpoint(tmp_path)  # training goes on from it
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.zero_()
    drafter.load_checkpoint(tmp_path)
    assert (drafter.model(tokens).logits - before).abs().max() < 1e-5
    drafter.save_pretrained(tmp_path / "artifact")
    again = DraftModel.from_pretrained(tmp_path / "artifact", dtype=torch.float32)
    assert (again.model.eval()(tokens).logits - before).abs().max() < 1e-5


@pytest.mark.parametrize("name", ATTEND)
def test_mtp_has_a_layer_that_attends(name: str, tmp_path: Path) -> None:
    target = recurrent(name)
    drafter: Any = Mtp(MtpConfig.for_target(target)).double().bind(target)
    drafter.init_from_target(torch.arange(VOCAB))
    assert recurrent_layers(drafter.model.config) == set()
    drafter.save_pretrained(tmp_path)
    again = Mtp.from_pretrained(tmp_path, dtype=torch.float64)
    assert drafter.state_dict().keys() == again.state_dict().keys()


@pytest.mark.parametrize("name", ATTEND)
def test_a_student_that_attends_nowhere_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match=r"none of the layers \[0\] of .* attends") as error:
        DraftModelConfig.for_target(recurrent(name), layers=1)
    assert str(ATTEND[name]) in one_line(error.value)


@pytest.mark.parametrize("name", sorted(RECURRENT.keys() - ATTEND.keys()))
def test_mtp_is_refused_where_no_layer_only_attends(name: str) -> None:
    with pytest.raises(OptionError) as error:
        MtpConfig.for_target(recurrent(name))
    assert "eagle3" in one_line(error.value)


def test_a_factor_on_falcon_s_logits_is_found() -> None:
    config = tf.FalconH1Config(
        **recurrent("falcon-h1").config.to_dict() | {"lm_head_multiplier": 0.3}
    )
    torch.manual_seed(0)
    model = tf.FalconH1ForCausalLM(config).double().eval()
    tokens = torch.randint(1, VOCAB, (2, 7))
    with torch.no_grad():
        hidden = model.model(tokens).last_hidden_state
        assert (OutputLayer(model)(hidden) - model(tokens).logits).abs().max() < 1e-9
