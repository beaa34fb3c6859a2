"""MTP for targets of which some layers see a window alone: the modules in their files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from headstart.heads import OptionError, load_drafter
from headstart.infer import Speculator
from tests.support.equations import rms
from tests.support.families import LENGTHS
from tests.support.shipped_mtp import ours, windowed_with_module
from tests.support.tiny import one_line, prompts

GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize("kind", ["exaone4", "exaone-moe"])
@torch.no_grad()
def test_its_layer_is_like_the_targets_first(kind: str, tmp_path: Path) -> None:
    target, module = windowed_with_module(kind, tmp_path)
    drafter = load_drafter("mtp", target)
    ids, _ = prompts([12])
    features = target.get_decoder()(ids)[0][:, :-1]
    eps, length = target.config.rms_norm_eps, features.shape[1]
    words = target.get_input_embeddings()(ids[:, 1:])
    pairs = [
        rms(words, module["pre_fc_norm_embedding.weight"], eps),
        rms(features, module["pre_fc_norm_hidden.weight"], eps),
    ]
    states = F.linear(torch.cat(pairs, -1), module["fc.weight"])
    layer: Any = type(target.model.layers[0])(target.config, 0).double().eval()
    prefix = "layers.0."
    own = {n.removeprefix(prefix): t for n, t in module.items() if n.startswith(prefix)}
    layer.load_state_dict(own)
    positions = torch.arange(length).unsqueeze(0)
    behind = positions.T - positions
    seen = (behind >= 0) & (behind < target.config.sliding_window)
    found = layer(
        states, attention_mask=seen[None, None], position_ids=positions,
        position_embeddings=target.model.rotary_emb(states, positions),
    )  # fmt: skip
    found = found[0] if isinstance(found, tuple) else found
    expected = target.lm_head(rms(found, module["norm.weight"], eps)[:, -1])
    torch.testing.assert_close(ours(target, drafter, ids), expected, rtol=1e-6, atol=1e-6)
    ids, mask = prompts(LENGTHS)
    written = target.generate(ids, attention_mask=mask, **GREEDY)
    speculator = Speculator(target, drafter, tree="best-first:8,3,3")
    assert torch.equal(speculator.generate(ids, attention_mask=mask, **GREEDY), written)


def test_a_layer_unlike_the_first_is_not_guessed(tmp_path: Path) -> None:
    """vLLM heeds `mtp_layer_types` of K-EXAONE; a layer that sees all has positions there alone."""
    target, _ = windowed_with_module("exaone-moe", tmp_path)
    target.config.mtp_layer_types = ["sliding_attention"]
    load_drafter("mtp", target)
    target.config.mtp_layer_types = ["full_attention"]
    with pytest.raises(OptionError, match="nothing says whether its own does"):
        load_drafter("mtp", target)


def test_a_layer_that_nothing_tells_of_is_not_guessed(tmp_path: Path) -> None:
    target, _ = windowed_with_module("gemma2", tmp_path)
    with pytest.raises(OptionError, match="nothing says whether its own does") as caught:
        load_drafter("mtp", target)
    one_line(caught.value)
