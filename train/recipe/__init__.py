"""Recipes: `schema` and `text` are what one may say, `files` reads, `loading` checks."""

from .fields import RecipeError
from .files import family_keys, shipped_combinations, shipped_parts, shipped_recipes
from .loading import keys_of, load_recipe, parse_recipe, recipe_of
from .schema import (
    Decode,
    DrafterSpec,
    Hardware,
    OnPolicy,
    Recipe,
    Scratch,
    TargetSpec,
    Train,
)
from .text import Chat, Corpus, Distill, OpenAI, Source

__all__ = [
    "Chat", "Corpus", "Decode", "Distill", "DrafterSpec", "Hardware", "OnPolicy", "OpenAI",
    "Recipe", "RecipeError", "Scratch", "Source", "TargetSpec", "Train",
    "family_keys", "keys_of", "load_recipe", "parse_recipe", "recipe_of", "shipped_combinations",
    "shipped_parts", "shipped_recipes",
]  # fmt: skip
