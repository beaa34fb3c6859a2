"""What is undone of a drafter's settings, one cause at a time."""

from typing import Any

from headstart.doctor.of_drafters import drafter_settings
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
