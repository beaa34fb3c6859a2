"""By which name the models of this version of transformers take a cache."""

from transformers.modeling_outputs import BaseModelOutputWithPast

CACHE_NAMES = ("cache", "past_key_values")
"""Newer versions take it by either."""
CACHE = next(name for name in CACHE_NAMES if name in BaseModelOutputWithPast.__dataclass_fields__)
"""The argument in which a model takes its cache, and the field in which it returns it: `cache`
since transformers 5.24."""
