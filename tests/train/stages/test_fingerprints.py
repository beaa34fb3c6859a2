"""What decides a stage's result."""

from dataclasses import asdict
from typing import Any

from headstart.train.recipe import OpenAI, load_recipe
from headstart.train.stages.fingerprints import NOT_DECIDING, deciding


def paths(settings: dict[str, Any], above: str = "") -> set[str]:
    found = set[str]()
    for name, value in settings.items():
        path = f"{above}{name}"
        found |= {path} | (paths(value, f"{path}.") if isinstance(value, dict) else set())
    return found


def test_what_does_not_decide_is_a_setting_of_recipes() -> None:
    recipe = load_recipe("quickstart")
    known = asdict(recipe) | {"distill": asdict(recipe.distill) | {"openai": asdict(OpenAI())}}
    assert paths(known) >= NOT_DECIDING


def test_only_what_decides_is_left() -> None:
    recipe = asdict(load_recipe("quickstart"))
    left = deciding(recipe, ["distill", "train"])
    assert "shards" not in left["distill"] and "examples" in left["distill"]
    assert "report_to" not in left["train"] and "learning_rate" in left["train"]
