"""Settings of a recipe that have no effect beside the others: they are said before the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..recipe import Recipe

_Needs = tuple[str, Callable[[Recipe], bool]]

_TARGET: _Needs = ("corpus.source=target", lambda r: r.corpus.source == "target")
_OWN: _Needs = ("distill.writer=own", lambda r: r.distill.writer == "own")
_GIVEN: _Needs = ("distill.writer=given", lambda r: r.distill.writer == "given")
_TEMPLATE: _Needs = (
    "a chat template (distill.chat)",
    lambda r: r.distill.chat != "plain" or r.distill.writer == "openai",
)
_PACKS: _Needs = ("train.packing", lambda r: r.train.packing is not False)

_NEEDS: dict[str, _Needs] = {
    "corpus.opening_tokens": _TARGET,
    "corpus.writer": _TARGET,
    "corpus.columns": ("rows with columns", lambda r: r.corpus.source not in ("stdlib", "target")),
    "chat.supervise": _GIVEN,
    "chat.template_kwargs": _TEMPLATE,
    "chat.tools": _TEMPLATE,
    "distill.openai": ("distill.writer=openai", lambda r: r.distill.writer == "openai"),
    "distill.turns": (
        "answers to chats (distill.prefix=prompt, or distill.writer=openai)",
        lambda r: r.distill.writer == "openai" or (_OWN[1](r) and r.distill.prefix == "prompt"),
    ),
    "distill.too_long": _GIVEN,
    "distill.temperature": (
        "distill.writer=own or openai",
        lambda r: not _GIVEN[1](r),
    ),
    "distill.drafter": _OWN,
    "distill.use_drafter": (
        "distill.drafter or distill.rounds",
        lambda r: r.distill.drafter is not None or r.distill.rounds > 1,
    ),
    "distill.round_steps": ("distill.rounds above 1", lambda r: r.distill.rounds > 1),
    "distill.earlier_share": ("distill.earlier", lambda r: r.distill.earlier is not None),
    "train.packed_length": _PACKS,
    "train.gradient_accumulation": (
        "train.rows_per_step=null, which decides it otherwise",
        lambda r: r.train.rows_per_step is None,
    ),
}
"""What each of these settings needs to have an effect."""


def unused_settings(recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None = None) -> list[str]:
    """A line for each setting that differs from its default, and has no effect.

    Args:
        tokenizer: of the target; None where it is not known yet.
    """
    if tokenizer is not None and not tokenizer.chat_template:
        distill = dataclasses.replace(recipe.distill, chat="plain")
        recipe = dataclasses.replace(recipe, distill=distill)
    told = []
    for key, (needs, there) in _NEEDS.items():
        section, name = key.split(".")
        value = getattr(getattr(recipe, section), name)
        if value != _default(getattr(recipe, section), name) and not there(recipe):
            told.append(f"{key} has no effect here: it needs {needs}")
    return told


def _default(section: Any, name: str) -> Any:
    (field,) = (field for field in fields(section) if field.name == name)
    return field.default if field.default_factory is MISSING else field.default_factory()
