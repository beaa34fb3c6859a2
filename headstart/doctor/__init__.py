"""Why is acceptance low: what training saw compared with what decoding sees, cause by cause."""

LEAST_PROMPTS = 4
"""As many as standard errors need; they are small from about 16."""
