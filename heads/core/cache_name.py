"""By which name the models of this version of transformers take a cache."""

from transformers.modeling_outputs import BaseModelOutputWithPast

_NEW = "cache" in BaseModelOutputWithPast.__dataclass_fields__
CACHE = "cache" if _NEW else "past_key_values"
"""The argument in which a model takes its cache, and the field in which it returns it: `cache`
since transformers 5.24."""
