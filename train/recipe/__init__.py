"""Recipes: `schema` is what one may say, `files` reads and composes them, `loading` checks."""

from .fields import RecipeError
from .files import shipped_combinations, shipped_parts, shipped_recipes
from .loading import load_recipe, parse_recipe
from .schema import (
    Chat,
    Corpus,
    Distill,
    DrafterSpec,
    Hardware,
    OnPolicy,
    OpenAI,
    Recipe,
    Scratch,
    Source,
    TargetSpec,
    Train,
)

__all__ = [
    "Chat", "Corpus", "Distill", "DrafterSpec", "Hardware", "OnPolicy", "OpenAI", "Recipe",
    "RecipeError", "Scratch", "Source", "TargetSpec", "Train",
    "load_recipe", "parse_recipe", "shipped_combinations", "shipped_parts", "shipped_recipes",
]  # fmt: skip
