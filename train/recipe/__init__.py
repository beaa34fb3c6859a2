"""Recipes: `schema` says what a recipe may hold, `files` reads one, `build` checks it."""

from .build import parse_recipe
from .fields import RecipeError
from .files import load_recipe, shipped_recipes
from .schema import LOSSES, Corpus, Distill, DrafterSpec, OnPolicy, Recipe, Scratch, Train

__all__ = [
    "LOSSES", "Corpus", "Distill", "DrafterSpec", "OnPolicy", "Recipe", "RecipeError", "Scratch",
    "Train", "load_recipe", "parse_recipe", "shipped_recipes",
]  # fmt: skip
