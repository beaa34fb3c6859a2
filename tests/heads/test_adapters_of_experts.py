"""Adapters of targets with experts: what is adapted unasked, what is said, what is refused."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from peft import PeftModel
from torch import Tensor

from headstart.heads import Manifest, OptionError, fingerprint, load_drafter, save_drafter
from headstart.heads.declared.adapter import ADAPTER
from headstart.heads.draft_model import DraftModel, DraftModelConfig
from headstart.heads.medusa2 import Medusa2, Medusa2Config
from headstart.infer import Speculator
from headstart.train.fit.joint import JointTarget
from tests.support.families import LENGTHS
from tests.support.recurrent import RECURRENT, family
from tests.support.tiny import one_line, prompts

SHARED = {"gate_proj", "up_proj", "down_proj"}
"""The layers of the shared expert, whose names peft takes for the other experts in some models."""
RECURS = {"out_proj", "in_proj_qkvz", "in_proj_ba"}, {"out_proj", "in_proj_qkv", "in_proj_z"}
ATTENDS = {"q_proj", "k_proj", "v_proj", "o_proj"}
TARGETS = {
    "qwen3-next": (RECURRENT["qwen3-next"], ATTENDS | RECURS[0], SHARED),
    "qwen3.5 experts": (RECURRENT["qwen3.5 experts"], ATTENDS | RECURS[1] | SHARED, set()),
    "mixtral": (family(tf.MixtralForCausalLM, tf.MixtralConfig), ATTENDS, set()),
}
"""How it is made, what is adapted at least, and which linear layers are not."""


def target(name: str) -> Any:
    torch.manual_seed(1)
    return TARGETS[name][0]().eval()


def medusa2(model: Any, **options: Any) -> Medusa2:
    config = Medusa2Config.for_target(model, heads=2, rank=3, **options)
    return Medusa2(config).to(model.dtype).bind(model).eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=prompts([8])[0]).logits


@pytest.mark.parametrize("name", TARGETS)
def test_all_linear_layers_that_can_be_are_adapted(name: str, tmp_path: Path) -> None:
    """As peft itself reads the adapter, and merged into the weights."""
    _, adapted, left = TARGETS[name]
    model, base = target(name), target(name)
    drafter = medusa2(model)
    adapter: Any = drafter.adapter
    adapter.attach(model)
    found = {layer.rpartition(".")[2] for layer in adapter._layers()}
    assert found >= adapted and not found & left
    torch.manual_seed(2)
    with torch.no_grad():
        for factor in adapter.parameters():
            factor.normal_(0, 0.2)
    expected = logits(model)
    assert not torch.allclose(expected, logits(base))
    save_drafter(drafter, tmp_path / "head", Manifest("medusa2", "it", fingerprint(base)))
    torch.testing.assert_close(
        logits(PeftModel.from_pretrained(target(name), tmp_path / "head" / ADAPTER)), expected
    )
    loaded = load_drafter(tmp_path / "head", base)  # merges the adapter
    torch.testing.assert_close(logits(base), expected)
    ids, mask = prompts(LENGTHS)
    how: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    written = Speculator(base, loaded, tree="chain:2").generate(ids, **how, pad_token_id=0)
    assert torch.equal(written, base.generate(ids, **how, pad_token_id=0))


def test_a_training_says_what_it_leaves_out(caplog: pytest.LogCaptureFixture) -> None:
    model = target("qwen3-next")
    with caplog.at_level(logging.WARNING):
        JointTarget(model, medusa2(model, modules=["q_proj"]), 1.0)
        assert not caplog.text
        model = target("qwen3-next")
        JointTarget(model, medusa2(model), 1.0)
    said = "leaves out the experts of qwen3_next, which are no linear layers, and down_proj, gate_p"
    assert caplog.text.count(said) == 1
    caplog.clear()
    model = target("qwen3.5 experts")
    config = DraftModelConfig.for_target(model, layers=[2, 3], lora={"rank": 2})
    student = DraftModel(config).bind(model)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        student.init_from_target()
    assert caplog.text.count("experts of qwen3_5_moe_text, which are no linear layers") == 1
    caplog.clear()
    dense = RECURRENT["qwen3.5"]()
    JointTarget(dense, medusa2(dense), 1.0)
    assert not caplog.text


@pytest.mark.parametrize("modules", [["q_proj", "down_proj"], ["mlp.gate_proj"], ["gate"]])
def test_names_that_mean_experts_are_refused(modules: list[str]) -> None:
    model = target("qwen3-next")
    drafter = medusa2(model, modules=modules, dropout=0.0)
    told = rf"{modules[-1]}, which peft takes for the experts of qwen3_next.* in_proj_ba, .* none"
    with pytest.raises(OptionError, match=told) as refused:
        drafter.adapter.attach(model)  # type: ignore[union-attr]
    one_line(refused.value)
