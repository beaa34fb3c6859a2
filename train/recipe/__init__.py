"""Recipes: `schema` says what a recipe may hold, `files` reads one, `build` checks it."""

from .build import parse_recipe
from .fields import RecipeError
from .files import load_recipe, shipped_recipes
from .schema import (
    LOSSES,
    Corpus,
    Decode,
    Distill,
    DrafterSpec,
    OnPolicy,
    Recipe,
    Scratch,
    TargetSpec,
    Train,
)

__all__ = [
    "LOSSES", "Corpus", "Decode", "Distill", "DrafterSpec", "OnPolicy", "Recipe", "RecipeError",
    "Scratch", "TargetSpec", "Train", "load_recipe", "parse_recipe", "shipped_recipes",
]  # fmt: skip
