"""Rows that hold several documents: the same loss and gradient as with a row for each."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM

from headstart.heads import FAMILIES, family
from headstart.heads.hydra import Hydra
from headstart.train.fit.packing_trial import packing_obstacle
from tests.support.drafters import deep
from tests.support.packed import LENGTHS, apart, batches, module_of, slopes
from tests.support.tiny import VOCAB, tiny

ROWS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in FAMILIES if family(name).trainable),
    ("hydra", {"prefix": True}),
    ("eagle3", {"output": "trimmed", "draft_vocab_size": 40}),
]
ATTEND = {"dflash", "hydra", "eagle", "eagle3", "mtp", "draft_model"}
"""Families, with these options, that read more of the text than one feature."""


@pytest.mark.parametrize("loss", ["cross_entropy", "forward_kl"])
@pytest.mark.parametrize(("name", "options"), ROWS, ids=lambda v: str(v) if v else "")
def test_packed_gradients_are_those_of_a_row_each(
    name: str, options: dict[str, Any], loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(name, options, tiny("llama"), loss)
    plain, packed = batches()
    try:
        expected = slopes(module, plain)
        found = slopes(module, packed)
        assert found[0] == pytest.approx(expected[0], rel=1e-10)
        assert apart(found, expected) <= 1e-10
        # Every way in which a document could learn of the one before it, planted.
        leaks = [slopes(module, packed | {"segments": None})]  # the labels
        run, states = module.run_target, module.drafter.draft_hidden_states
        if module.tap is not None:
            monkeypatch.setattr(module, "run_target", lambda tokens, _=None: run(tokens))
            leaks.append(slopes(module, packed))
            monkeypatch.setattr(module, "run_target", run)
        if name in ATTEND and (name != "hydra" or options):
            alone = lambda *given, positions: states(*given)  # noqa: E731
            monkeypatch.setattr(module.drafter, "draft_hidden_states", alone)
            leaks.append(slopes(module, packed))
        for leak in leaks:
            assert apart(leak, expected) > 1e-4
    finally:
        module.release()
        if module.drafter.adapter is not None:
            module.drafter.adapter.detach()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma3", "gpt2"])
def test_targets_that_keep_documents_apart_are_packed(name: str, attention: str) -> None:
    target = tiny(name)
    before = target.config._attn_implementation
    target.set_attn_implementation(attention)
    module = module_of("medusa", {}, target, "forward_kl")
    plain, packed = batches()
    try:
        assert packing_obstacle(module) is None
        one, two = module.features(plain["tokens"]), module.features(**{
            key: packed[key] for key in ("tokens", "positions")
        })  # fmt: skip
        assert (two[0, LENGTHS[0] :] - one[1, : LENGTHS[1]]).abs().max() < 1e-10
    finally:
        module.release()
        target.set_attn_implementation(before)


def test_a_target_that_does_not_is_named() -> None:
    """Bloom has no positions to find them by."""
    torch.manual_seed(0)
    target = BloomForCausalLM(
        BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.4)
    ).eval()
    found = packing_obstacle(module_of("medusa", {}, target, "cross_entropy"))
    assert found is not None and "bloom" in found and "\n" not in found


def test_a_family_that_does_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of("hydra", {"prefix": True}, tiny("llama"), "cross_entropy")
    assert packing_obstacle(module) is None
    states = Hydra.draft_hidden_states

    def leaking(self: Hydra, *given: Any, positions: Any = None) -> Tensor:
        return states(self, *given)

    def older(self: Hydra, features: Tensor, tokens: Tensor, where: Tensor, depths: int) -> Tensor:
        return states(self, features, tokens, where, depths)

    monkeypatch.setattr(Hydra, "draft_hidden_states", leaking)
    assert packing_obstacle(module) == "Hydra reads across the documents of a row"
    monkeypatch.setattr(Hydra, "draft_hidden_states", older)
    assert packing_obstacle(module) == "Hydra knows no documents within a row"
    module.release()


@pytest.mark.parametrize("name", ["medusa", "redrafter", "eagle3"])
def test_a_target_in_bfloat16_is_packed(name: str) -> None:
    """What its features are rounded to is more than may differ in a drafter in float32."""
    module = module_of(name, {}, deep().to(torch.bfloat16), "cross_entropy")
    module.drafter.float()
    assert packing_obstacle(module) is None
    module.release()


def test_one_long_row_has_the_same_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """What FlashAttention is given: all rows behind one another, found apart by positions."""
    target = tiny("llama")
    module = module_of("medusa", {}, target, "cross_entropy")
    _, packed = batches()
    given = {key: packed[key] for key in ("tokens", "positions")}
    expected, shapes = module.features(**given), []
    decoder = target.get_decoder()
    forward = decoder.forward

    def seen(input_ids: Tensor, **how: Any) -> Any:
        shapes.append(input_ids.shape)
        monkeypatch.setattr(decoder.config, "_attn_implementation", "sdpa")
        return forward(input_ids=input_ids, **how)

    monkeypatch.setattr(decoder, "forward", seen)
    monkeypatch.setattr(decoder.config, "_attn_implementation", "flash_attention_2")
    found = module.features(**given)
    assert shapes == [(1, 30)] and (found - expected).abs().max() < 1e-10
    module.release()
