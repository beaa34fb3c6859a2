"""Recipes: `schema` is what one may say, `loading` reads and checks one."""

from .loading import load_recipe, parse_recipe, shipped_recipes
from .schema import (
    Corpus,
    Distill,
    DrafterSpec,
    OnPolicy,
    Recipe,
    RecipeError,
    Scratch,
    Source,
    TargetSpec,
    Train,
)

__all__ = [
    "Corpus", "Distill", "DrafterSpec", "OnPolicy", "Recipe", "RecipeError", "Scratch", "Source",
    "TargetSpec", "Train", "load_recipe", "parse_recipe", "shipped_recipes",
]  # fmt: skip
