"""Options of `generate` that transformers does not have."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import index
from typing import Any

from torch import Tensor
from transformers import LogitsProcessorList

from headstart.heads import OptionError
from headstart.heads.core import CountPenalty
from headstart.heads.core.errors import brief
from headstart.heads.core.forms import FormsByRow

from .grammars import Grammar, GrammarForm, GrammarTokens


def read_seed(seed: Any) -> int | list[int]:
    """A whole number, or several, in the types of Python, numpy or torch; others are refused."""
    found = seed.tolist() if hasattr(seed, "tolist") else seed
    try:
        if not isinstance(found, Sequence):
            return index(found)
        seeds = [index(each) for each in found]
    except TypeError:
        seeds = [2**63]
    if all(-(2**63) <= each < 2**63 for each in seeds):
        return seeds
    raise OptionError(
        f"seed is {found!r}; expected a whole number, or a list with one of 64 bits for each row."
    )


def read_logprobs(asked: Any, vocabulary: int) -> int | None:
    """How many of the most likely tokens a request asks for at each place; None for nothing.

    Raises:
        OptionError: it is no number of tokens.
    """
    if asked is None:
        return None
    try:
        found = -1 if isinstance(asked, bool) else index(asked)
    except TypeError:
        found = -1
    if not 0 <= found <= vocabulary:
        raise OptionError(
            f"logprobs is {asked!r}; expected a whole number from 0, of the most likely tokens to "
            f"tell beside each one's own log-probability, up to the target's {vocabulary} tokens."
        )
    return found


def take_count_penalty(options: dict[str, Any], ids: Tensor | None) -> None:
    """Turn the options `presence_penalty` and `frequency_penalty` into a processor, which comes
    before those that are given.

    Args:
        ids: the prompts [B, P].

    Raises:
        OptionError: one of them is no number.
    """
    penalties = []
    for name in ("presence_penalty", "frequency_penalty"):
        value = options.pop(name, None)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and math.isfinite(value)):
            raise OptionError(f"{name} is {value!r}; expected a number, such as 0.5.")
        penalties.append(float(value or 0))
    if any(penalties) and ids is not None:
        others = options.pop("logits_processor", None) or []
        first = CountPenalty(*penalties, prompt=ids.shape[1])
        options["logits_processor"] = LogitsProcessorList([first, *others])


def take_grammar(
    options: dict[str, Any], ids: Tensor | None, copies: int, tokens_of: Callable[[], GrammarTokens]
) -> None:
    """Turn the option `grammar` into a processor, which comes after those that are given.

    Args:
        ids: the prompts [B, P]; copies: how many texts follow each of them.
        tokens_of: prepares the target's tokens.

    Raises:
        OptionError: it is no `Grammar`, or none can be used here.
    """
    if (grammar := options.pop("grammar", None)) is None:
        return
    if not isinstance(grammar, Grammar):
        raise OptionError(f"grammar is {brief(repr(grammar))}; expected a Grammar.")
    rows, width = (1, 1) if ids is None else ids.shape
    form = GrammarForm(grammar, tokens_of(), width)
    others = options.pop("logits_processor", None) or []
    last = FormsByRow([form, *(form.again() for _ in range(rows * copies - 1))])
    options["logits_processor"] = LogitsProcessorList([*others, last])
