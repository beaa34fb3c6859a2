"""Weights that are streamed in: where they run, how they are read, and which of them stay."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headstart.heads import UnsupportedTarget, family, fingerprint
from headstart.heads.core import device_of, keep_resident, offloaded, streamed_from, weight_of
from tests.support.streamed import CPU, PLACES, streamed, streamed_tiny
from tests.support.tiny import CONFIGS, one_line, tiny


@pytest.mark.parametrize("place", PLACES)
def test_they_are_read_as_they_are(place: str, tmp_path: Path) -> None:
    model, whole = streamed_tiny(place, tmp_path), tiny("llama")
    assert offloaded(model) and not offloaded(whole)
    assert device_of(model) == device_of(model.lm_head) == CPU == device_of(whole)
    assert model.lm_head.weight.is_meta
    assert torch.equal(weight_of(model.lm_head), whole.lm_head.weight)
    assert model.lm_head.weight.is_meta, "it was read, not kept"
    assert fingerprint(model) == fingerprint(whole)


def test_how_much_is_streamed_and_from_where(tmp_path: Path) -> None:
    found = {place: streamed_from(streamed_tiny(place, tmp_path)) for place in PLACES}
    assert found == {"cpu": "100% from cpu", "disk": "100% from disk", "map": "50% from disk"}
    assert streamed_from(tiny("llama")) == ""


@pytest.mark.parametrize("place", PLACES)
def test_what_a_drafter_borrows_stays(place: str, tmp_path: Path) -> None:
    model: Any = streamed_tiny(place, tmp_path)
    before = streamed_from(model)
    kinds: Any = family("medusa"), family("redrafter")
    for kind in kinds:
        kind(kind.config_class.for_target(model)).double().bind(model)
    for layer, own in (("embed_tokens", model.model), ("lm_head", model)):
        assert not getattr(own, layer).weight.is_meta
    assert torch.equal(model.lm_head.weight, tiny("llama").lm_head.weight)
    assert model.model.layers[1].mlp.up_proj.weight.is_meta
    assert streamed_from(model) == before, "a plan holds whatever was bound since"
    ids = torch.arange(1, 9).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, tiny("llama")(ids).logits)
    assert not model.lm_head.weight.is_meta, "a forward sends it away again"


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_tied_layers_stay_as_one(place: str, tmp_path: Path) -> None:
    model = streamed(tiny("llama", tie_word_embeddings=True), place, tmp_path)
    for layer in (model.lm_head, model.model.embed_tokens):  # by two drafters
        keep_resident(model, [layer])
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("name", ["draft_model", "medusa", "redrafter"])
def test_drafters_start_from_weights_elsewhere(name: str, tmp_path: Path) -> None:
    cls: Any = family(name)
    options = {"draft_model": {"layers": 1}, "medusa": {"output": "own"}, "redrafter": {}}[name]
    made = []
    for model in (tiny("llama"), streamed_tiny("disk", tmp_path)):
        torch.manual_seed(3)
        drafter = cls(cls.config_class.for_target(model, **options)).double().bind(model)
        drafter.init_from_target()
        made.append(drafter.state_dict())
    here, there = made
    assert here.keys() == there.keys()
    assert all(torch.equal(here[key], there[key]) for key in here)


def test_weights_without_data_or_hook_are_refused() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    with pytest.raises(UnsupportedTarget) as caught:
        fingerprint(model)
    assert "device_map" in one_line(caught.value)
