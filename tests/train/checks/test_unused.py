"""Settings without effect are said, each of them, and those of shipped recipes have one."""

from types import SimpleNamespace
from typing import Any

import pytest

from headstart.train.checks.unused import unused_settings
from headstart.train.recipe import load_recipe, shipped_combinations, shipped_recipes

# A setting, what it needs beside the others, and where it has an effect.
UNUSED = [
    ("corpus.opening_tokens=9", "corpus.source=target", "corpus.source=target"),
    ("corpus.columns={prompt: task}", "rows", "corpus.source=rows.jsonl"),
    ("chat.supervise=last", "distill.writer=given", "distill.writer=given"),
    ("chat.template_kwargs={thinks: false}", "a chat template", "distill.chat=template"),
    ("distill.openai.url=http://there", "distill.writer=openai", "distill.writer=openai"),
    ("distill.turns=first", "answers to chats", "distill.prefix=prompt"),
    ("distill.too_long=truncate", "distill.writer=given", "distill.writer=given"),
    ("distill.temperature=0.5", "distill.writer=own or", "distill.writer=own"),
    ("distill.drafter=lookup", "distill.writer=own", "distill.writer=own"),
    ("distill.use_drafter=always", "distill.drafter or", "distill.drafter=lookup"),
    ("distill.use_drafter=always", "distill.drafter or", "distill.rounds=2"),
    ("distill.round_steps=9", "distill.rounds above 1", "distill.rounds=2"),
    ("distill.earlier_share=0.5", "distill.earlier", "distill.earlier=runs/r/distill"),
    ("train.packed_length=99", "train.packing", "train.packing=null"),
    ("train.gradient_accumulation=4", "train.rows_per_step=null", "train.rows_per_step=null"),
]
WITHOUT = {  # what a setting is without effect beside, where that is no default
    "chat.template_kwargs": ["distill.chat=plain"],
    "distill.temperature": ["distill.writer=given"],
    "distill.drafter": ["distill.writer=given"],
    "train.gradient_accumulation": ["train.rows_per_step=64"],
}
BASE = ["target.model=m", "target.scratch=null"]


@pytest.mark.parametrize(("setting", "needs", "companion"), UNUSED)
def test_a_setting_without_effect_is_said(setting: str, needs: str, companion: str) -> None:
    key = setting.partition("=")[0].removesuffix(".url")
    given = [*BASE, *WITHOUT.get(key, []), setting]
    (told,) = unused_settings(load_recipe("quickstart", given))
    assert told.startswith(f"{key} has no effect here: it needs {needs}")
    assert not unused_settings(load_recipe("quickstart", [*given, companion]))


def test_a_tokenizer_without_a_template_takes_no_arguments_of_one() -> None:
    recipe = load_recipe("quickstart", [*BASE, "chat.template_kwargs={thinks: false}"])
    plain: Any = SimpleNamespace(chat_template=None)
    assert not unused_settings(recipe) and len(unused_settings(recipe, plain)) == 1


@pytest.mark.parametrize("name", [*shipped_recipes(), *shipped_combinations()])
def test_every_setting_of_a_shipped_recipe_has_an_effect(name: str) -> None:
    assert not unused_settings(load_recipe(name))
