"""The block drafter that Meta publishes for Muse Glimmer, and such a target, whose embeddings and
logits are not what a table and a layer alone give."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from headstart.heads import FINAL, family, load_drafter
from headstart.heads.artifacts.export import export_drafter
from headstart.heads.core import OutputLayer, capture, logit_factor
from headstart.heads.dflash import DFlash
from headstart.infer import Speculator
from tests.support.tiny import COMMON, VOCAB, prompts

if not hasattr(tf, "MuseGlimmerAssistantModel"):
    pytest.skip("this transformers has no Muse Glimmer", allow_module_level=True)

MASK, BLOCK, LAYERS = 60, 5, [0, 2]  # the target's layers by their output
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}


def randomised(model: Any) -> Any:
    for name, weight in model.named_parameters():
        if "norm" in name:  # else ones, which hide what is left out
            weight.data = torch.rand_like(weight) + 0.5
        elif weight.dim() == 2:
            weight.data = torch.randn_like(weight) / weight.shape[1] ** 0.5
    return model.double().eval()


@cache
def target() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = tf.MuseGlimmerConfig(  # type: ignore[attr-defined]
            text_config=COMMON | {"num_hidden_layers": 4, "sliding_window": 9},
            vision_config=VISION | {"num_attention_heads": 2},
        )
        return randomised(tf.MuseGlimmerForConditionalGeneration(config))  # type: ignore[attr-defined]


def assistant() -> Any:
    torch.manual_seed(4)
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = (*sizes, "num_key_value_heads", "head_dim", "max_position_embeddings")
    config = tf.MuseGlimmerAssistantConfig(  # type: ignore[attr-defined]
        **{name: COMMON[name] for name in sizes},
        target_layer_ids=LAYERS, mask_token_id=MASK, block_size=BLOCK, sliding_window=64,
    )  # fmt: skip
    return randomised(tf.MuseGlimmerAssistantModel(config))  # type: ignore[attr-defined]


def drafts(drafter: Any, ids: Tensor) -> Tensor:
    """The logits [K, V] of the drafts after a text [1, T]."""
    features = capture(drafter.target, drafter.config.feature_layers, ids[:, :-1])
    count = torch.tensor([ids.shape[1] - 1])
    state = drafter.start(1, 64)
    drafter.reserve(state, ids.shape[1] - 1, 8)
    drafter.prefill(state, features, ids[:, :-1], count)
    one = torch.ones(1, dtype=torch.long)
    return drafter.begin(state, features[:, -1:], ids[:, -1:], one).logits[0]


@torch.no_grad()
def test_the_published_drafter_drafts_as_in_transformers(tmp_path: Path) -> None:
    theirs, (ids, _) = assistant(), prompts([12])
    theirs.save_pretrained(tmp_path / "published")
    drafter: Any = load_drafter(tmp_path / "published", target())
    assert isinstance(drafter, DFlash) and drafter.max_depth == BLOCK - 1
    block = torch.tensor([[ids[0, -1], *[MASK] * (BLOCK - 1)]])
    table = target().get_input_embeddings()
    features = capture(target(), [layer + 1 for layer in LAYERS], ids[:, :-1])
    left = theirs(
        noise_embeds=torch.nn.functional.embedding(block, table.weight),  # without its norm
        context_hidden_states=features,
    ).last_hidden_state
    factor = target().config.text_config.output_multiplier
    expected = target().lm_head(left)[0, 1:] * factor
    torch.testing.assert_close(drafts(drafter, ids), expected, rtol=1e-9, atol=1e-9)

    line = export_drafter(drafter, "vllm", tmp_path / "exported")
    assert line is not None and '"method": "dflash"' in line
    text = target().generate(ids, max_new_tokens=20, do_sample=False)
    found = Speculator(target(), drafter).generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(found, text)


@torch.no_grad()
def test_its_logits_are_multiplied_and_capped() -> None:
    ids = torch.randint(VOCAB, (2, 6))
    hidden = capture(target(), [FINAL], ids)
    assert torch.equal(OutputLayer(target())(hidden), target()(input_ids=ids).logits)
    assert logit_factor(target()) == target().config.text_config.output_multiplier


def test_a_new_drafter_starts_from_it() -> None:
    kind, (ids, _) = family("dflash"), prompts([12])
    drafter: Any = kind(kind.config_class.for_target(target(), layers=2)).double()  # type: ignore[attr-defined]
    drafter.bind(target()).init_from_target()
    text = target().generate(ids, max_new_tokens=12, do_sample=False)
    found = Speculator(target(), drafter.eval()).generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(found, text)
