"""Causes that lie in how a drafter is set up."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from headstart.heads.artifacts.conditions import vocabulary_hash
from headstart.heads.core import FINAL, decoder_layers

from .scene import Difference, Scene, Undo


def feature_layers(scene: Scene) -> list[Difference]:
    """Layers off by one are what conversions between projects most often get wrong."""
    here = list(scene.drafter["layers"]["by_input"])
    there = scene.trained("drafter").get("layers", {}).get("by_input")
    if not here or any(layer == FINAL for layer in here):
        return []
    last = len(decoder_layers(scene.pair.target)) - 1
    ways: dict[str, Undo] = {}
    if there is not None and there != here:
        ways[f"reading layers {_list(there)}"] = _with_layers(there)
    for step in (-1, 1):
        moved = [layer + step for layer in here]
        if min(moved) >= 0 and max(moved) <= last and moved != there:
            ways[f"reading layers {_list(moved)}"] = _with_layers(moved)
    said = f"trained on the inputs of layers {_list(there)}, reads those of {_list(here)}"
    return [
        Difference(
            "feature layers", said if there not in (None, here) else "",
            "Correct feature_layers in the drafter's config.json. Projects count the same state as "
            "one layer's output or the next one's input, so ids are easily off by one.", ways,
        )
    ]  # fmt: skip


def _with_layers(layers: list[int]) -> Undo:
    return lambda pair: pair.with_drafter({"feature_layers": layers})


_KINDS = {
    "norm": ("norms", "normalises otherwise than it was trained"),
    "rope": ("rotary base", "turns positions otherwise than it was trained"),
    "rotary": ("rotary base", "turns positions otherwise than it was trained"),
    "sliding": ("window", "attends to another window than it was trained with"),
    "layer_types": ("window", "attends to another window than it was trained with"),
    "position": ("maximum positions", "has other positions than it was trained with"),
}


def drafter_settings(scene: Scene) -> list[Difference]:
    """Settings of the drafter's config other than its layers, grouped by what they change."""
    there = scene.trained("drafter").get("config")
    if there is None:
        return _norm_trial(scene)
    here = scene.drafter["config"]
    groups: dict[str, list[tuple[str, ...]]] = {}
    for path in _differing(there, here):
        name = next((_KINDS[k][0] for k in _KINDS if k in path[-1]), "other settings")
        if path[0] != "feature_layers":
            groups.setdefault(f"drafter's {name}", []).append(path)
    found = []
    for name, paths in groups.items():
        each = [f"{'.'.join(p)} {_at(there, p)}, here {_at(here, p)}" for p in paths]
        found.append(Difference(
            name, f"trained with {'; '.join(each)}",
            f"Restore {', '.join('.'.join(path) for path in paths)} in the drafter's config.json.",
            {"as trained": _with_settings(there, here, paths)},
        ))  # fmt: skip
    return found


def _norm_trial(scene: Scene) -> list[Difference]:
    name = "norm_before_residual"
    if name not in scene.pair.drafter.config.to_dict():
        return []
    other = not getattr(scene.pair.drafter.config, name)
    advice = f"Set {name} to {str(other).lower()} in the drafter's config.json."
    ways: dict[str, Undo] = {f"{name}={other}": lambda pair: pair.with_drafter({name: other})}
    return [Difference("drafter's norms", "", advice, ways)]


def _with_settings(there: Any, here: Any, paths: list[tuple[str, ...]]) -> Undo:
    changes = copy.deepcopy(here)
    for *groups, name in paths:
        ours, theirs = changes, there
        for group in groups:
            ours, theirs = ours[group], theirs[group]
        ours.pop(name, None)
        if name in theirs:
            ours[name] = theirs[name]
    return lambda pair: pair.with_drafter({path[0]: changes.get(path[0]) for path in paths})


def _differing(there: Any, here: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Where two JSON documents differ, down to whatever is no dict in both."""
    if isinstance(there, dict) and isinstance(here, dict):
        names = sorted(there.keys() | here.keys())
        return [at for n in names for at in _differing(there.get(n), here.get(n), (*path, n))]
    return [] if there == here else [path]


def _at(document: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        document = document.get(name) if isinstance(document, dict) else None
    return document


def vocabulary(scene: Scene) -> list[Difference]:
    """A draft vocabulary whose ids are shifted, or were read as offsets or the other way round."""
    ids, size = scene.pair.drafter.draft_vocabulary, scene.pair.drafter.config.vocab_size
    there = scene.trained("drafter").get("vocabulary_sha256")
    if ids is None or there == vocabulary_hash(ids):
        return []
    if scene.pair.drafter.saved_as_language_model:  # its rows are those of its own tokens
        return []
    place = torch.arange(len(ids), device=ids.device)
    tried = {"ids one less": ids - 1, "ids one more": ids + 1}
    tried |= {"ids as offsets": ids + place, "offsets as ids": ids - place}
    valid = {name: each for name, each in tried.items() if each.min() >= 0 and each.max() < size}
    exact = {name: each for name, each in valid.items() if vocabulary_hash(each) == there}
    return [
        Difference(
            "draft vocabulary",
            "" if there is None else "the tokens that its logits stand for are not those of "
            "training (the sha256 of its map differs)",
            "Restore the map (d2t): it holds each token's target id, less its own number where "
            "vLLM and SGLang read it.",
            {name: _with_vocabulary(each) for name, each in (exact or valid).items()},
        )
    ]  # fmt: skip


_MISSED = 0.05
"""A share of undraftable tokens that costs: at τ 3 about every sixth round ends at one of them."""


def vocabulary_size(scene: Scene) -> list[Difference]:
    """Tokens that the target writes here, and the drafter cannot: each ends a round."""
    ids = scene.pair.drafter.draft_vocabulary
    if ids is None or scene.written is None:
        return []
    if scene.trained("drafter").get("vocabulary_sha256") not in (None, vocabulary_hash(ids)):
        return []  # the map is not that of training, which is a cause of its own
    missed = 1 - float(torch.isin(scene.written, ids.to(scene.written.device)).float().mean())
    if missed < _MISSED:
        return []
    return [
        Difference(
            "draft vocabulary's size",
            f"{missed:.0%} of the tokens that the target writes here are not among the "
            f"{len(ids):,} that can be drafted",
            "Train with more of them (drafter.draft_vocab_size), or trim to more (headstart trim "
            "--tokens), by text like these prompts: the commonest tokens of that are drafted.",
        )
    ]  # fmt: skip


def _with_vocabulary(ids: Tensor) -> Undo:
    return lambda pair: pair.with_drafter(vocabulary=ids)


def drafter_dtype(scene: Scene) -> list[Difference]:
    """The type that the drafter computes in, where its target does not."""
    found = []
    if scene.drafter["dtype"] not in (scene.target["dtype"], "float32"):
        found.append(Difference(
            "drafter's dtype",
            f"the drafter is in {scene.drafter['dtype']}, its target in {scene.target['dtype']}",
            "Load the drafter in the target's type.",
            {"float32": lambda pair: pair.with_drafter(dtype=torch.float32)},
        ))  # fmt: skip
    return found


def _list(layers: Any) -> str:
    return ", ".join(map(str, layers or []))
