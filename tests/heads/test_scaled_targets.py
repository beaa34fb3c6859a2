"""Drafters of a target that multiplies its output layer's logits by a factor."""

import copy
from typing import Any

import pytest
import torch
import transformers as tf

from headstart.heads import FAMILIES, TrainableDrafter, family
from headstart.heads.artifacts.trimming import trimmed
from headstart.heads.core import capture, logit_factor, output_rows
from tests.support.tiny import COMMON, VOCAB

FACTOR = 8.0  # a power of two, so that no rounding differs


def twins() -> tuple[Any, Any]:
    """A Llama, and the same function as a Granite, whose logits are divided and weights larger."""
    torch.manual_seed(2)
    llama = tf.LlamaForCausalLM(tf.LlamaConfig(**COMMON)).double().eval()
    width = llama.config.hidden_size // llama.config.num_attention_heads
    config = tf.GraniteConfig(
        **COMMON, logits_scaling=FACTOR, attention_multiplier=width**-0.5,
        rms_norm_eps=llama.config.rms_norm_eps,
    )  # fmt: skip
    granite = tf.GraniteForCausalLM(config).double().eval()
    weights = copy.deepcopy(llama.state_dict())
    weights["lm_head.weight"] *= FACTOR
    granite.load_state_dict(weights)
    ids = torch.randint(1, VOCAB, (2, 9))
    with torch.no_grad():
        assert torch.equal(granite(ids).logits, llama(ids).logits)
    return llama, granite


def made(name: str, target: Any, options: dict[str, Any]) -> Any:
    torch.manual_seed(5)
    cls: Any = family(name)
    config = cls.config_class.for_target(target, **{**FAMILIES[name].small, **options})
    drafter = cls(config).double().bind(target)
    if isinstance(drafter, TrainableDrafter):
        drafter.init_from_target(torch.arange(VOCAB))
    return drafter.eval()


CASES = [
    ("medusa", {"output": "own"}),
    ("medusa", {"output": "shared"}),
    ("medusa", {"output": "trimmed", "draft_vocab_size": 30}),
    ("hydra", {}),
    ("redrafter", {}),
    ("mlp_speculator", {"inner_dim": COMMON["hidden_size"]}),
    ("eagle", {"output": "shared"}),
    ("eagle", {"output": "trimmed", "draft_vocab_size": 30}),
    ("eagle3", {}),
    ("mtp", {}),
    ("dflash", {"output": "shared"}),
    ("dflash", {"output": "trimmed", "draft_vocab_size": 30}),
]


def logits_of(drafter: Any, target: Any) -> list[torch.Tensor]:
    """What training and decoding make of a depth's states, also once most tokens are left out."""
    torch.manual_seed(7)
    tokens = torch.randint(1, VOCAB, (2, 9))
    features = capture(target, drafter.config.feature_layers, tokens)
    where = torch.arange(9).expand(2, -1) < 5
    states = drafter.draft_hidden_states(features, tokens, where, 2)[0]
    some = torch.arange(VOCAB - 20, VOCAB, 2)
    return [
        read(1)(states)
        for each in (drafter, trimmed(drafter, some))
        for read in (each.draft_output, each.draft_logits)
    ]


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(("name", "options"), CASES)
@torch.no_grad()
def test_a_drafter_starts_as_that_of_a_target_without_the_factor(
    name: str, options: dict[str, Any], scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control takes the factor for 1."""
    if not scaled:
        for place in ("parts.vocabulary", "core.features"):
            monkeypatch.setattr(f"headstart.heads.{place}.logit_factor", lambda target: 1.0)
    llama, granite = (logits_of(made(name, each, options), each) for each in twins())
    for one, other in zip(llama, granite, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-9) is scaled


def test_the_factor_is_found_by_a_forward() -> None:
    llama, granite = twins()
    assert logit_factor(llama) == 1 and logit_factor(granite) == 1 / FACTOR
    assert torch.equal(output_rows(granite), output_rows(llama))
    assert output_rows(llama) is llama.lm_head.weight
    forward = granite.forward

    def times(**options: Any) -> Any:
        found = forward(**options)
        found.logits = found.logits * FACTOR**2
        return found

    granite.forward = times  # as in HyperCLOVA X, by the same name in its config
    assert logit_factor(granite) == FACTOR


def test_a_model_that_cannot_run_has_the_usual_factor() -> None:
    with torch.device("meta"):
        granite = tf.GraniteForCausalLM(tf.GraniteConfig(**COMMON, logits_scaling=4.0))
        cohere = tf.CohereForCausalLM(tf.CohereConfig(**COMMON, logit_scale=0.5))
    assert (logit_factor(granite), logit_factor(cohere)) == (0.25, 0.5)
    sharded: Any = twins()[1]
    sharded.lm_head.weight.ds_id = 0
    assert logit_factor(sharded) == 1 / FACTOR
