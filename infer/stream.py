"""Prompts decoded one after another in the rows of one batch, as training text is."""

from collections.abc import Callable, Iterator

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
)
from transformers.generation import logits_process as hf

from headstart.heads import OptionError
from headstart.heads.core import end_tokens

from .continuous import Stream
from .prompts import Manner, Prompt
from .speculator import Speculator

LEFT_OUT = (
    "min_new_tokens", "bad_words_ids", "sequence_bias", "exponential_decay_length_penalty",
    "guidance_scale", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
)  # fmt: skip
"""Settings of a generation config that a stream's texts are written without."""

_SHARE = 8  # rows are filled anew when one in so many is free


def decode_stream(
    speculator: Speculator,
    next_prompt: Callable[[], Prompt | None],
    batch: int,
    longest: int,
    temperature: float = 0.0,
) -> Iterator[tuple[Prompt, list[int]]]:
    """Decode prompts as rows become free; yields each with what was written, as they end.

    The speculator must not decode anything else until the end.

    Args:
        next_prompt: asked when rows are free; None where there is no prompt now. What is yielded
            may lead to further prompts.
        batch: rows at once, at most.
        longest: tokens of a prompt and its text, at most.
        temperature: 0 writes greedily; others sample from the target's whole distribution, as
            `stream_processors` change it.

    Raises:
        OptionError: a prompt is empty, or too long.
        DecodingError: the target's logits are NaN, or there is no memory even for one prompt.
    """
    model = speculator.model
    processors = stream_processors(model, temperature, speculator.device)
    manner = Manner(tuple(sorted(end_tokens(model))), temperature, processors)
    stream = Stream(speculator, manner, batch, longest)
    while True:
        # A few at a time, so that prompts rarely run alone.
        if not stream.active or stream.room >= max(1, batch // _SHARE):
            prompts = list(_take(next_prompt, stream.room))
            for prompt in prompts:
                _check(prompt, longest)
            stream.add(prompts)
        if stream.ended:
            return
        for piece in stream.round():
            if piece.error is not None:
                raise piece.error
            if piece.ended:
                yield piece.prompt, piece.text


def stream_processors(
    model: PreTrainedModel, temperature: float, device: torch.device
) -> LogitsProcessorList:
    """The processors of a stream's texts, in the order of `generate`: the temperature, and before
    it the repetition penalty, `no_repeat_ngram_size`, `min_length` and `suppress_tokens` of the
    target's generation config.
    """
    found, asked = LogitsProcessorList(), vars(model.generation_config or GenerationConfig())
    if (penalty := asked.get("repetition_penalty")) not in (None, 1.0):
        found.append(hf.RepetitionPenaltyLogitsProcessor(penalty))
    if size := asked.get("no_repeat_ngram_size"):
        found.append(hf.NoRepeatNGramLogitsProcessor(size))
    if (least := asked.get("min_length")) and (ends := sorted(end_tokens(model))):
        found.append(hf.MinLengthLogitsProcessor(least, ends, device=str(device)))
    if tokens := asked.get("suppress_tokens"):
        found.append(hf.SuppressTokensLogitsProcessor(tokens, device=str(device)))
    if temperature not in (0.0, 1.0):
        found.append(TemperatureLogitsWarper(temperature))
    return found


def _take(next_prompt: Callable[[], Prompt | None], count: int) -> Iterator[Prompt]:
    for _ in range(count):
        if (prompt := next_prompt()) is None:
            return
        yield prompt


def _check(prompt: Prompt, longest: int) -> None:
    length = len(prompt.tokens)
    if length < 1 or prompt.new_tokens < 1 or prompt.longest > longest:
        raise OptionError(
            f"found a prompt of {length} tokens and {prompt.new_tokens} new ones; expected at "
            f"least 1 of each, and at most {longest} in all."
        )
