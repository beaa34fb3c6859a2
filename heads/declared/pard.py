"""What a language model's `config.json` says of drafting several tokens at once: PARD's names."""

FAMILY = "pard"
"""The family of such artifacts; of others, such a model drafts one token after another."""


PARALLEL = "pard_token"
"""The mask token, of a model that does."""

AT_ONCE = "para_num"
"""How many tokens it drafts."""
