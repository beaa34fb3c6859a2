"""Where training text comes from: corpora, prompts, and what a model writes."""
