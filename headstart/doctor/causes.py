"""Suspected causes of low acceptance: one record each, with how it is found and undone.

| cause | compares | undone by |
|---|---|---|
| feature layers | which layers the drafter reads | those of training; or one less, one more |
| the drafter's settings | each of its config: norms, rotary base, window, positions | training's |
| draft vocabulary | which tokens its logits stand for | one id less, one more, read as offsets |
| its size | which of the target's tokens cannot be drafted | |
| the target's settings | rotary base, window, context | training's |
| chat template, thinking, system prompt | how prompts are rendered | training's |
| tokenizer | its tokens | |
| dtype | of target and drafter | training's |
| weights | what the target computes | the target that the manifest names |
| length | texts, and the longest training row | prompts cut to that |
| first answer token | whether what answers begin with was taught | |
| writer | whose text the drafter learnt | |

Without a manifest that says what training saw, some are tried all the same.
"""

from __future__ import annotations

from .of_drafters import (
    drafter_dtype,
    drafter_settings,
    feature_layers,
    vocabulary,
    vocabulary_size,
)
from .of_targets import target_dtype, target_settings, weights
from .of_texts import chat, length, openings, texts_not_chats, tokens, writer
from .scene import Find

CAUSES: tuple[Find, ...] = (
    feature_layers, drafter_settings, vocabulary, vocabulary_size, target_settings, chat,
    texts_not_chats, tokens, target_dtype, drafter_dtype, weights,
    length, openings, writer,
)  # fmt: skip
"""All of them; those whose undoing changes least come first, and so do they among equals."""
