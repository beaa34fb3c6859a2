"""What is undone of a drafter's settings, one cause at a time."""

from typing import Any

import pytest
import torch

from headstart.doctor.of_drafters import drafter_settings, vocabulary_size
from headstart.doctor.pairs import Pair
from headstart.doctor.scene import Scene
from headstart.heads import Manifest
from headstart.heads.artifacts.conditions import drafter_conditions
from tests.support.drafters import made
from tests.support.tiny import tiny


def test_undoing_one_setting_of_a_layer_leaves_its_others() -> None:
    drafter = made("eagle3")
    no_tokenizer: Any = None
    trained, pair = drafter.config.layer, Pair(tiny("llama"), drafter, no_tokenizer)
    manifest = Manifest("eagle3", "x", "", trained={"drafter": drafter_conditions(drafter)})
    here = {**trained, "rms_norm_eps": 0.1, "rope_theta": 20.0, "sliding_window": 4}
    moved = pair.with_drafter({"layer": here, "norm_before_residual": True})

    undone = {
        difference.cause: difference.ways["as trained"](moved).drafter.config
        for difference in drafter_settings(Scene(moved, manifest))
    }

    own: dict[str, Any] = {cause: config.layer for cause, config in undone.items()}
    unbounded = {name: value for name, value in here.items() if name != "sliding_window"}
    assert own == {
        "drafter's norms": {**here, "rms_norm_eps": trained["rms_norm_eps"]},
        "drafter's rotary base": {**here, "rope_theta": trained["rope_theta"]},
        "drafter's window": unbounded,
    }
    norms: Any = undone["drafter's norms"]
    assert norms.norm_before_residual is False


@pytest.mark.parametrize(
    ("written", "noted", "said"),
    [
        ([1, 2, 3, 60], True, "25% of the tokens that the target writes here are not among the 8 "),
        ([1, 2, 3, 60], False, "25% of the tokens"),  # a drafter that others trained
        ([1] * 96 + [60] * 4, True, ""),
    ],
)
def test_a_draft_vocabulary_that_lacks_what_the_target_writes(
    written: list[int], noted: bool, said: str
) -> None:
    drafter = made("eagle3", output="trimmed", draft_vocab_size=8)
    with torch.no_grad():
        drafter.vocabulary.copy_(torch.arange(8))
    no_tokenizer: Any = None
    pair = Pair(tiny("llama"), drafter, no_tokenizer)
    manifest = Manifest("eagle3", "x", "", trained={"drafter": drafter_conditions(drafter)})
    scene = Scene(pair, manifest if noted else None, written=torch.tensor(written))
    found = vocabulary_size(scene)
    assert [each.cause for each in found] == (["draft vocabulary's size"] if said else [])
    assert all(each.said.startswith(said) and not each.ways for each in found)
    moved = pair.with_drafter(vocabulary=torch.arange(8) + 20)  # another cause names this one
    assert not vocabulary_size(Scene(moved, manifest, written=torch.tensor(written)))
