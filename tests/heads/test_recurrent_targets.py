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

STUDENTS = {
    "qwen3-next": [2],
    "qwen3.5": [2],
    "qwen3.5 experts": [2],
    "kimi-linear": [2],
    "lfm2": [1],
    "lfm2 experts": [1],
    "bamba": [1],
    "granite hybrid": [1],
    "nemotron-h": [1],
}
"""Targets, and their layers that only attend."""


@pytest.mark.parametrize("name", STUDENTS)
def test_a_student_is_made_of_layers_that_attend(name: str, tmp_path: Path) -> None:
    target = recurrent(name, torch.float32)
    config = DraftModelConfig.for_target(target, layers=1)
    assert config.chosen(target) == STUDENTS[name]
    drafter = DraftModel(config).bind(target)
    drafter.init_from_target()
    assert recurrent_layers(drafter.model.config) == set()
    own, (theirs,) = decoder_layers(drafter.model)[0], STUDENTS[name]
    expected = decoder_layers(target)[theirs].state_dict()
    for key, weight in own.state_dict().items():
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


@pytest.mark.parametrize("name", STUDENTS)
def test_mtp_has_a_layer_that_attends(name: str, tmp_path: Path) -> None:
    target = recurrent(name)
    drafter: Any = Mtp(MtpConfig.for_target(target)).double().bind(target)
    drafter.init_from_target(torch.arange(VOCAB))
    assert recurrent_layers(drafter.model.config) == set()
    drafter.save_pretrained(tmp_path)
    again = Mtp.from_pretrained(tmp_path, dtype=torch.float64)
    assert drafter.state_dict().keys() == again.state_dict().keys()


@pytest.mark.parametrize("name", sorted(RECURRENT.keys() - STUDENTS.keys()))
def test_others_are_refused_on_one_line(name: str) -> None:
    target = recurrent(name)
    tries = [lambda: DraftModelConfig.for_target(target, layers=1)]
    tries += [lambda: DraftModelConfig.for_target(target, layers=[0]), lambda: mtp_of(target)]
    for tried in tries:
        with pytest.raises(OptionError, match=r"recurrent|layers that only attend") as error:
            tried()
        assert "eagle3" in one_line(error.value)


def mtp_of(target: Any) -> Any:
    return MtpConfig.for_target(target)


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
