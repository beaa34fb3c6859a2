"""Causes that lie in what a target is and computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from headstart.heads import fingerprint
from headstart.heads.artifacts.conditions import probe_losses

from .scene import Difference, Scene, Undo

_TARGETS = {"rope": "rope_parameters", "window": "sliding_window"}


def target_settings(scene: Scene) -> list[Difference]:
    """Rotary parameters and window of the target, as its config has them."""
    there, found = scene.trained("target"), []
    for name, key in _TARGETS.items():
        if name not in there or there[name] == scene.target[name]:
            continue
        what = {"rope": "target's rotary base", "window": "target's window"}[name]
        found.append(Difference(
            what, f"trained with {key} {there[name]}, here {scene.target[name]}",
            f"Set {key} in the target's config.json to that of training, or train for this one.",
            {"as trained": _with_target({key: there[name]})},
        ))  # fmt: skip
    return found


def _with_target(changes: dict[str, Any]) -> Undo:
    return lambda pair: pair.with_target_config(changes)


def target_dtype(scene: Scene) -> list[Difference]:
    """The type that the target computes in."""
    found = []
    there = scene.trained("target").get("dtype")
    if there is not None and there != scene.target["dtype"]:
        kind = getattr(torch, there)
        found.append(Difference(
            "target's dtype", f"trained in {there}, decodes in {scene.target['dtype']}",
            f"Load the target with --dtype {there}, or train in the type that decodes.",
            {} if scene.target["quantization"] else {
                there: lambda pair: pair.with_target_dtype(kind)
            },
        ))  # fmt: skip
    return found


_SAME = {"float64": 0.01, "float32": 0.01}
_OTHER_TYPE = 0.15  # nats; 16 bits round by that much


def weights(scene: Scene) -> list[Difference]:
    """Whether the target, with the settings of training, computes what training's did."""
    if scene.manifest is None:
        return []
    there, pair = scene.trained("target"), scene.pair
    for difference in target_settings(scene):
        for undo in difference.ways.values():
            pair = undo(pair)
    noted, said = there.get("probe_losses"), ""
    if noted:
        now = np.array(probe_losses(pair.target))
        apart = float(np.abs(now - np.array(noted)).mean()) if len(now) == len(noted) else 99.0
        same_type = there.get("dtype") == scene.target["dtype"]
        if apart > (_SAME.get(scene.target["dtype"], _OTHER_TYPE) if same_type else _OTHER_TYPE):
            said = f"its losses on {len(noted)} fixed tokens differ by {apart:.2f} nats on average"
    if not said and fingerprint(scene.pair.target) != scene.manifest.target_fingerprint:
        said = "its embedding and norms have another fingerprint"
    quantized, before = scene.target["quantization"], there.get("quantization")
    if quantized != before and "target" in scene.manifest.trained:
        kinds = (f"of kind {kind}" if kind else "not quantised" for kind in (before, quantized))
        said = "; ".join(filter(None, ("weights {}, here {}".format(*kinds), said)))
    if not said:
        return []
    name = "quantisation" if quantized != before else "target's weights"
    original = scene.original
    ways: dict[str, Undo] = {}
    if original is not None:
        ways["the target of training"] = lambda pair: pair.with_target(original())
    return [
        Difference(
            name, f"the target is not the one of training ({scene.manifest.target}): {said}",
            "Train on text of this target: headstart train with train.from set to this drafter "
            "takes a fraction of the steps.", ways,
        )
    ]  # fmt: skip
