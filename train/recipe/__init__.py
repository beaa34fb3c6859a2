"""Recipes: `schema` is what one may say, `loading` reads and checks one."""

from .loading import load_recipe, parse_recipe, shipped_recipes
from .schema import (
    Chat,
    Corpus,
    Distill,
    DrafterSpec,
    OnPolicy,
    OpenAI,
    Recipe,
    RecipeError,
    Scratch,
    Source,
    TargetSpec,
    Train,
)

__all__ = [
    "Chat", "Corpus", "Distill", "DrafterSpec", "OnPolicy", "OpenAI", "Recipe", "RecipeError",
    "Scratch", "Source", "TargetSpec", "Train", "load_recipe", "parse_recipe", "shipped_recipes",
]  # fmt: skip
