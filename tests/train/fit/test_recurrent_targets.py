"""Targets with recurrent layers in training: rows that are not packed, padding, and gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from headstart.heads import FINAL, OptionError
from headstart.heads.core import FeatureTap, capture
from headstart.train.fit import packing_trial
from headstart.train.fit.packing_trial import packing_obstacle
from headstart.train.recipe import Train
from tests.support.packed import LENGTHS, apart, batches, module_of, slopes
from tests.support.recurrent import RECURRENT, recurrent
from tests.support.tiny import one_line
from tests.support.training import IDLE, drafter_of, trainer_of


@pytest.mark.parametrize("name", RECURRENT)
def test_padding_changes_no_feature_of_a_text(name: str) -> None:
    """Features of rows padded on the right, at every layer, are those of each text alone."""
    target = recurrent(name)
    layers = [*range(target.config.num_hidden_layers + 1), FINAL]
    plain, _ = batches()
    together = capture(target, layers, plain["tokens"])
    for row, length in enumerate(LENGTHS):
        alone = capture(target, layers, plain["tokens"][row : row + 1, :length])
        assert (together[row, :length] - alone[0]).abs().max() < 1e-4
    changed = plain["tokens"].clone()
    changed[1, 3] += 1  # a token of the text does change what follows it
    assert (capture(target, layers, changed)[1, 4 : LENGTHS[1]] - together[1, 4:6]).abs().max() > 1


@pytest.mark.parametrize("name", RECURRENT)
def test_features_are_the_states_that_the_model_itself_tells_of(name: str) -> None:
    target = recurrent(name)
    plain, _ = batches()
    count, size = target.config.num_hidden_layers, target.config.hidden_size
    with torch.no_grad(), FeatureTap(target, [*range(count), FINAL]) as tap:
        told = target(input_ids=plain["tokens"], output_hidden_states=True, use_cache=False)
    found = tap.take().split(size, -1)
    assert len(told.hidden_states) == count + 1
    for own, expected in zip(found, told.hidden_states, strict=True):
        assert torch.equal(own, expected)
    last = capture(target, [count], plain["tokens"])
    norm: Any = next(m for n, m in target.named_modules() if n.endswith(_NORMS))
    assert (norm(last) - found[-1]).abs().max() < 1e-9


_NORMS = ("model.norm", "model.norm_f", "model.final_layernorm", "model.embedding_norm")


@pytest.mark.parametrize("name", RECURRENT)
def test_rows_of_recurrent_targets_are_not_packed(name: str, tmp_path: Path, caplog: Any) -> None:
    target = recurrent(name)
    module = module_of("medusa", {}, target, "cross_entropy")
    found = packing_obstacle(module)
    assert found is not None and "has recurrent layers, which carry their state" in found
    plain, packed = batches()
    leaked = module.features(packed["tokens"], packed["positions"])[0, LENGTHS[0] :]
    assert (leaked - module.features(plain["tokens"])[1, : LENGTHS[1]]).abs().max() > 0.1
    module.release()
    spec = Train(batch_size=2, max_steps=1, eval_every=None, packing=None)
    drafter = drafter_of(target.float(), "medusa", heads=2)
    try:
        trainer = trainer_of(drafter, tmp_path, spec, lambda _: IDLE)
        assert trainer.batches.packs is None and "rows are not packed: " in caplog.text
        spec = Train(batch_size=2, max_steps=1, packing=True)
        with pytest.raises(OptionError, match=r"packing is true.*recurrent.*set it to false") as no:
            trainer_of(drafter, tmp_path, spec, lambda _: IDLE)
        one_line(no.value)
    finally:
        target.double()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["lfm2", "qwen3.5", "falcon-h1"])
def test_the_trial_alone_finds_what_only_a_document_begins_with(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What short convolutions read of the document before is gone after a few tokens."""
    monkeypatch.setattr(packing_trial, "_carried", lambda target: None)
    module = module_of("medusa", {}, recurrent(name, dtype), "cross_entropy")
    found = packing_obstacle(module)
    assert found is not None and "reads across" in found
    module.release()


PROJECTIONS = {
    "qwen3.5": "linear_attn.in_proj_qkv",
    "kimi-linear": "self_attn.q_proj",
    "lfm2": "conv.out_proj",
    "falcon-h1": "mamba.in_proj",
    "bamba": "mamba.out_proj",
    "nemotron-h": "mixer.in_proj",
    "zamba2": "mamba.in_proj",
}
"""Linear layers of recurrent ones."""


@pytest.mark.parametrize(("name", "projection"), PROJECTIONS.items())
def test_an_adapter_learns_the_same_from_padded_rows(name: str, projection: str) -> None:
    """Its gradients flow through the recurrences; activations may be computed again."""
    module: Any = module_of("medusa2", {}, recurrent(name), "forward_kl")
    plain, _ = batches()
    try:
        expected = slopes(module, plain)
        padded = {key: functional.pad(plain[key], (0, 7)) for key in ("tokens", "supervised")}
        assert apart(slopes(module, plain | padded), expected) < 1e-8
        module(**plain, weight=0.5)["loss"].backward()
        factor = f"layers.0.{projection}.lora_B.default.weight"
        slope = module.target.get_decoder().get_parameter(factor).grad
        assert slope is not None and slope.abs().max() > 1e-6
        module.checkpoint_activations()
        assert apart(slopes(module, plain), expected) < 1e-8
    finally:
        module.release()
        module.adapter.detach()
