"""The doctor on planted faults: each is named, and ranked first where undoing it helps."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from headstart.doctor.diagnosis import Diagnosis, diagnose
from headstart.doctor.pairs import Pair, Rendering
from headstart.heads import load_drafter
from headstart.heads.artifacts.manifest import read_manifest
from headstart.train.data.documents import Document
from tests.support import planted

pytestmark = pytest.mark.proof


class World:
    """A pair that was trained here, and what is planted into it."""

    def __init__(self, folder: Path):
        self.folder, self.artifact = folder, planted.write_pair(folder)
        self.manifest = read_manifest(self.artifact)
        self.sound = self.pair(self.artifact)

    def target(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder / "target").eval()

    def pair(self, artifact: Path) -> Pair:
        tokenizer, target = AutoTokenizer.from_pretrained(self.folder / "target"), self.target()
        drafter = load_drafter(artifact, target, tokenizer)
        return Pair(target, drafter, tokenizer, Rendering(template_kwargs=NO_THINKING))

    def diagnose(self, pair: Pair, turns: int = 1, manifest: Any = None) -> Diagnosis:
        asked = planted.chats(16, seed=9, turns=turns)
        documents = [Document.chat(str(i), chat[:-1]) for i, chat in enumerate(asked)]
        noted = manifest or self.manifest
        return diagnose(pair, documents, noted, self.target, new_tokens=24)


NO_THINKING = {"enable_thinking": False}


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("planted"))


def _other_template(pair: Pair) -> Pair:
    tokenizer = copy.deepcopy(pair.tokenizer)
    tokenizer.chat_template = planted.OTHER_TEMPLATE
    return Pair(pair.target, pair.drafter, tokenizer, pair.rendering)


def _rope(pair: Pair) -> Pair:
    layer = {**pair.drafter.config.layer, "rope_theta": 20.0}
    return pair.with_drafter({"layer": layer})


def _target_rope(**changes: Any) -> Callable[[Pair], Pair]:
    def plant(pair: Pair) -> Pair:
        return pair.with_target_config(
            {"rope_parameters": {**pair.target.config.rope_parameters, **changes}}
        )

    return plant


def _vocabulary(pair: Pair) -> Pair:
    ids = pair.drafter.draft_vocabulary
    assert ids is not None
    return pair.with_drafter(vocabulary=ids - 1)


def _bfloat16(pair: Pair) -> Pair:
    return pair.with_target_dtype(torch.bfloat16).with_drafter(dtype=torch.bfloat16)


PLANTED: dict[str, tuple[str, Callable[[Pair], Pair]]] = {
    "layers one more": (
        "feature layers", lambda pair: pair.with_drafter({"feature_layers": [2, 4, 5]}),
    ),
    "layers one less": (
        "feature layers", lambda pair: pair.with_drafter({"feature_layers": [0, 2, 3]}),
    ),
    "template": ("chat template", _other_template),
    "thinking": ("thinking mode", lambda pair: pair.rendered(template_kwargs={})),
    "system prompt": ("system prompt", lambda pair: pair.rendered(system="w3 w4")),
    "layers in another order": (
        "feature layers", lambda pair: pair.with_drafter({"feature_layers": [3, 1, 4]}),
    ),
    "target's rotary base": ("target's rotary base", _target_rope(rope_theta=20.0)),
    "target's rotary scaling": (
        "target's rotary base", _target_rope(rope_type="linear", factor=8.0),
    ),
    "window": (
        "target's window", lambda pair: pair.with_target_config({"sliding_window": 4}),
    ),
    "rotary base": ("drafter's rotary base", _rope),
    "vocabulary": ("draft vocabulary", _vocabulary),
    "norm": (
        "drafter's norms", lambda pair: pair.with_drafter({"norm_before_residual": True}),
    ),
    "fine-tune": (
        "target's weights", lambda pair: pair.with_target(planted.fine_tuned(pair.target)),
    ),
    "quantised": (
        "quantisation", lambda pair: pair.with_target(planted.rounded(pair.target)),
    ),
}  # fmt: skip
"""Faults whose undoing gains, and what each is called."""


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_that_costs_is_ranked_first(world: World, fault: str) -> None:
    name, plant = PLANTED[fault]
    found = world.diagnose(plant(world.sound))
    print(fault, [(each.cause, each.gain) for each in found.causes])
    assert [each.cause for each in found.causes] == [name]
    first = found.causes[0]
    assert first.said and first.advice and first.gain is not None and first.gain.beyond(2)
    assert not found.unmeasured


def test_a_sound_pair_has_no_cause(world: World) -> None:
    found = world.diagnose(world.sound)
    assert not (found.causes or found.harmless or found.unmeasured)
    assert found.tried and found.measured["temperature 0"]["tau"] > 3


def test_what_costs_nothing_is_listed_as_such(world: World) -> None:
    found = world.diagnose(_bfloat16(world.sound))
    assert not found.causes
    assert [each.cause for each in found.harmless] == ["target's dtype"]


def test_another_tokenizer_is_named(world: World) -> None:
    """Two words have each other's ids."""
    tokenizer: Any = copy.deepcopy(world.sound.tokenizer)
    saved = json.loads(tokenizer.backend_tokenizer.to_str())
    ids = saved["model"]["vocab"]
    ids["w0"], ids["w1"] = ids["w1"], ids["w0"]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(saved))
    found = world.diagnose(replace(world.sound, tokenizer=tokenizer))
    assert [each.cause for each in found.unmeasured] == ["tokenizer"] and not found.causes


def test_texts_longer_than_trained_are_named(world: World) -> None:
    found = world.diagnose(world.sound, turns=6)
    assert "context length" in {each.cause for each in (*found.causes, *found.harmless)}
    assert len(found.measured["by_position"]) > 1


def test_text_of_another_model_is_named(world: World) -> None:
    artifact = planted.train_drafter(
        world.folder, planted.STRANGERS, name="given",
        distill={"writer": "given", "examples": 192, "prefix": "prompt", "max_length": 64,
                 "shards": 1},
    )  # fmt: skip
    found = world.diagnose(world.pair(artifact), manifest=read_manifest(artifact))
    assert [each.cause for each in found.unmeasured] == ["text of another writer"]
    assert not found.causes and found.measured["temperature 0"]["tau"] < 2
