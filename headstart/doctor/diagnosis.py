"""The diagnosis: what differs, what undoing it gains, and what follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from headstart.heads import Manifest, OptionError
from headstart.heads.core import counted
from headstart.infer.measure.noise import Gain
from headstart.train.data.documents import Document
from headstart.train.provenance import mean_loss

from . import LEAST_PROMPTS
from .acceptance import Accepted, Decodes, gain
from .causes import CAUSES
from .pairs import Pair
from .scene import Difference, Scene

_ERRORS = 2.0
"""Standard errors that undoing a difference has to gain for it to count as a cause."""

_ERRORS_OF_TRIALS = 4.0
"""The same where nothing is known to differ: several such are tried, and chance gives some gain."""


@dataclass(frozen=True)
class Finding:
    """A difference, and what undoing it gained.

    Attributes:
        gain: tokens a round, and its standard error; None where it cannot be undone here.
        by: the way of undoing that gained most.
        matters: whether it is a cause: it gains by more than two standard errors; or, where nothing
            was known to differ, by more than four, and more than what is known to differ does.
    """

    cause: str
    said: str
    advice: str
    gain: Gain | None
    by: str = ""
    matters: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found.

    Attributes:
        causes: those that cost acceptance, the costliest first.
        harmless: differences whose undoing gains nothing measurable.
        unmeasured: differences that only a training could undo, or the target of training, if that
            was not there.
        tried: without a known difference, and without a gain: they are ruled out.
        measured: τ and acceptance, of training's validation (`trained`) and here.
    """

    causes: list[Finding]
    harmless: list[Finding]
    unmeasured: list[Finding]
    tried: list[Finding]
    measured: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(
    pair: Pair,
    documents: Sequence[Document],
    manifest: Manifest | None = None,
    original: Callable[[], PreTrainedModel] | None = None,
    new_tokens: int = 64,
    depth: int = 4,
) -> Diagnosis:
    """Compare what training saw with what decoding sees, and measure each difference undone.

    Acceptance is teacher-forced along the target's greedy text: every token of it is the root of a
    chain of `depth` in turn. Gains are paired by prompts.

    Args:
        manifest: the drafter's; None for one that others trained.
        original: loads the target that the manifest names, which is called only where the one that
            decodes is another.

    Raises:
        OptionError: fewer than four prompts can be decoded.
    """
    decodes = Decodes(documents, new_tokens, depth)
    before = decodes.accepted(pair)
    if len(before.counts) < LEAST_PROMPTS:
        raise OptionError(
            f"found {counted(len(before.counts), 'prompt')} to decode; standard errors need at "
            f"least {LEAST_PROMPTS}, and are small from about 16."
        )
    sampled = decodes.sampled(pair)
    texts = sampled.pop("texts")
    masks = [torch.arange(len(text)) >= prompt for text, prompt in texts]
    own_loss = mean_loss(pair.target, [text for text, _ in texts], masks)
    longest = max(map(len, before.texts))
    chats = any(document.messages for document in documents)
    first = before.first_round()
    answers = [text[prompt:] for text, prompt in zip(before.texts, before.prompts, strict=True)]
    scene = Scene(
        pair, manifest, original, longest, new_tokens, chats, own_loss, first, torch.cat(answers)
    )
    differences = [each for find in CAUSES for each in find(scene)]
    found = judged([_measured(each, pair, decodes, before) for each in differences])
    ranked = sorted(found, key=lambda f: -(f.gain.tau if f.gain else 0.0))  # stable
    known = [each for each in ranked if each.said]
    return Diagnosis(
        causes=[each for each in ranked if each.matters],
        harmless=[each for each in known if each.gain is not None and not each.matters],
        unmeasured=[each for each in known if each.gain is None],
        tried=[each for each in ranked if not each.said and not each.matters],
        measured=_figures(before, sampled, documents, manifest),
    )


def _measured(difference: Difference, pair: Pair, decodes: Decodes, before: Accepted) -> Finding:
    gains = {
        name: gain(before, decodes.accepted(undo(pair))) for name, undo in difference.ways.items()
    }
    best = max(gains, key=lambda name: gains[name].tau, default="")
    won = gains.get(best)
    errors = _ERRORS if difference.said else _ERRORS_OF_TRIALS
    matters = won is not None and won.beyond(errors)
    return Finding(difference.cause, difference.said, difference.advice, won, best, matters)


def judged(found: Sequence[Finding]) -> list[Finding]:
    """With a known cause, what was merely tried has been measured together with that fault."""
    known = max((f.gain.tau for f in found if f.matters and f.said and f.gain), default=0.0)
    return [
        replace(f, matters=False) if not f.said and f.gain and f.gain.tau <= known else f
        for f in found
    ]


def _figures(
    before: Accepted,
    sampled: dict[str, Any],
    documents: Sequence[Document],
    manifest: Manifest | None,
) -> dict[str, Any]:
    names = [document.category or document.source for document in documents]
    each = {name: {i for i, of in enumerate(names) if of == name} for name in sorted(set(names))}
    categories = {name: before.of(numbers) for name, numbers in each.items()}
    return {
        "prompts": len(before.counts),
        "left_out": len(documents) - len(before.counts),
        "depth": before.depth,
        "trained": {
            name: manifest.metrics.get(name) for name in ("tau", "acceptance_by_depth")
        } if manifest else None,
        "temperature 0": {"tau": before.tau, "by_depth": before.by_depth},
        "temperature 1": sampled,
        "first_round": before.first_round(),
        "by_position": before.by_position(),
        "by_category": {name: tau for name, tau in categories.items() if tau is not None},
    }  # fmt: skip
