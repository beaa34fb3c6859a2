"""`generate` of transformers at its fastest: with a static cache, compiled on a GPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from headstart.infer.measure.baselines import TimedDecode, timed_generate
from headstart.terminal import one_line


def static_generate(
    model: PreTrainedModel, longest: Tensor, options: dict[str, Any]
) -> tuple[dict[str, TimedDecode], str]:
    """That contender by its name, and why there is none where it cannot be run.

    Args:
        longest: [1, P], the longest prompt to come; its cache serves all, so nothing is compiled
            again.
        options: of `generate`.
    """
    decode = timed_generate(model, **options, cache_implementation="static")
    try:
        for _ in range(2):  # compiles, then captures
            decode(longest)
    except Exception as error:  # of the compiler too; the other contenders are measured
        return {}, f"{type(error).__name__}: {one_line(error)[:200]}"
    return {"generate_static": decode}, ""
