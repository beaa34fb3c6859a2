"""What takes the arguments of transformers' `generate`, and decodes in its place."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from headstart.heads import OptionError

from .generate_options import (
    GenerateOptions,
    check_cache,
    check_ids,
    check_mask,
    check_not_empty,
    without_stop_strings,
)
from .grammars import GrammarTokens
from .own_options import take_count_penalty, take_grammar
from .stats import Stats
from .streamer import check_streamer


class Given(NamedTuple):
    """What `generate` hands a decoding method, see `DecodingMethod.__call__`."""

    model: PreTrainedModel
    input_ids: Tensor
    logits_processor: LogitsProcessorList | None
    stopping_criteria: StoppingCriteriaList | None
    generation_config: GenerationConfig | None
    seed: int | Sequence[int] | Tensor | None
    logprobs: int | None
    model_kwargs: dict[str, Any]


class DecodingMethod(ABC):
    """A decoding method: `generate` hands it prompts, processors and criteria, see `__call__`.

    Attributes:
        tokenizer: the target's, or None where it was passed as a model without one; needed for
            `stop_strings` and a `grammar`.
        stats: what the last call did.
    """

    tokenizer: Any  # so that what `headstart.load` gives by name can be called without a check
    stats: Stats
    _last_criterion: tuple[Any, StopStringCriteria] | None = None  # and what it was made of
    _last_tokens: tuple[Any, GrammarTokens] | None = None

    def _criterion_of(
        self, tokenizer: PreTrainedTokenizerBase, strings: str | list[str]
    ) -> StopStringCriteria:
        """The last one again where it was made of the same: that takes seconds, since it looks for
        each string in the whole vocabulary. It keeps nothing of the texts that it is shown.
        """
        made_of, last = (tokenizer, len(tokenizer), repr(strings)), self._last_criterion
        if last is None or last[0] != made_of:
            self._last_criterion = last = made_of, StopStringCriteria(tokenizer, strings)
        return last[1]

    def _tokens_of(
        self, tokenizer: PreTrainedTokenizerBase | None, ends: list[int]
    ) -> GrammarTokens:
        """The last ones again where they were made of the same, since that too takes a while."""
        made_of = tokenizer, tokenizer is None or len(tokenizer), ends
        last = self._last_tokens
        if last is None or last[0] != made_of:
            self._last_tokens = last = made_of, GrammarTokens(tokenizer, ends)
        return last[1]

    @property
    @abstractmethod
    def model(self) -> PreTrainedModel:
        """The target."""

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        generation_config: GenerationConfig | None = None,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        seed: int | Sequence[int] | Tensor | None = None,
        logprobs: int | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Decode, as `generate` calls it.

        Args:
            input_ids: [B, P] int64, padded on the left.
            seed: one seed for the batch, or one per row; drawn from torch's default generator when
                None, so `transformers.set_seed` governs it.
            logprobs: see `generate`.

        Returns:
            [B, P + new] int64, or a `GenerateDecoderOnlyOutput` with `return_dict_in_generate`,
            without `past_key_values`. In its `scores` and `logits`, a row that has ended is certain
            of the padding token.

        Raises:
            OptionError: something was asked for that cannot be honoured, by name.
            DecodingError: the target's logits are NaN, or it has no further position.
        """
        check_streamer(streamer)
        input_ids = input_ids.long()  # int32, which `generate` takes too
        given = (model, input_ids, logits_processor, stopping_criteria, generation_config, seed)
        return self._decode(Given(*given, logprobs, model_kwargs), streamer)

    @abstractmethod
    def _decode(self, given: Given, streamer: BaseStreamer | None) -> Any:
        """See `__call__`."""

    @abstractmethod
    def _write_nothing(self, rows: int) -> None:
        """Have `stats` of a call that writes no token."""

    def generate(
        self,
        input_ids: Tensor | None = None,
        generation_config: Any = None,
        **options: Any,
    ) -> Any:
        """Generate text as `model.generate` does, with the same arguments and result, but faster.

            inputs = tokenizer(["a prompt", "another"], return_tensors="pt", padding=True)
            output = speculator.generate(**inputs, max_new_tokens=64, do_sample=True, seed=0)

        Also available as `model.generate(…, custom_generate=speculator)`, where a `streamer`,
        `stop_strings`, `max_new_tokens=0` and `temperature=0` do not work.

        Args:
            input_ids: [B, P] int64, the prompts, padded on the left.
            generation_config: a GenerationConfig; options given by name come before it.
            options: what `model.generate` takes, such as `attention_mask` [B, P] (1 at tokens, 0 at
                padding), `max_new_tokens`, `do_sample`, `temperature`, `top_p`, `top_k`,
                `logits_processor`, `stopping_criteria`, `num_return_sequences`,
                `return_dict_in_generate`; a `streamer`, for a single row; `stop_strings` (with
                `tokenizer`, unless the speculator has it). `temperature=0` is greedy. And `seed`,
                one for the batch or one per row, which makes sampling repeatable. Further a
                `grammar`, a `Grammar` that each text follows (with `tokenizer`, as `stop_strings`);
                `logprobs`, a number of tokens: `stats.logprobs` then has the log-probability of
                each new token and of as many of the most likely ones, see `LogProbabilities`; and
                `presence_penalty` and `frequency_penalty`, for new tokens, see `CountPenalty`.

        Returns:
            [B, P + new] int64, prompts included, or a `GenerateDecoderOnlyOutput` with
            `return_dict_in_generate=True`, whose `past_key_values` is None. `stats` then describes
            this call.

        Raises:
            OptionError: an option that cannot be honoured, by name.
            DecodingError: the target's logits are NaN, or it has no further position.
        """
        inputs = options.pop("inputs", None)
        if inputs is not None and input_ids is not None:
            raise OptionError(
                "input_ids and inputs are both given, and each is the prompts; leave inputs out."
            )
        input_ids = inputs if input_ids is None else input_ids
        check_ids(input_ids)
        if input_ids is not None and (mask := options.get("attention_mask")) is not None:
            check_mask(mask, input_ids)
        if generation_config is not None:
            options["generation_config"] = generation_config
        given = GenerateOptions(options, self.model.generation_config)  # type: ignore[arg-type]
        for name in ("assistant_model", "custom_generate", "synced_gpus"):
            if options.pop(name, None):
                raise OptionError(
                    f"{name} was given; the speculator decodes by itself, on one process: leave "
                    "it out."
                )
        streamer = options.pop("streamer", None)
        tokenizer = options.pop("tokenizer", None) or self.tokenizer
        take_count_penalty(options, input_ids)
        if given.get("temperature") == 0 and given.get("do_sample"):
            given.set(do_sample=False, temperature=1.0)
        given.take_stop_strings(tokenizer, self._criterion_of)
        copies = given.get("num_return_sequences") or 1
        take_grammar(
            options, input_ids, copies, lambda: self._tokens_of(tokenizer, given.end_tokens())
        )
        if input_ids is not None and "inputs_embeds" not in options:
            check_not_empty(input_ids)
        if given.get("max_new_tokens") == 0 and input_ids is not None:
            ids = input_ids.repeat_interleave(copies, dim=0)
            self._write_nothing(len(ids))
            if streamer is not None:
                streamer.put(ids.cpu())
                streamer.end()
            as_dict = given.get("return_dict_in_generate")
            return GenerateDecoderOnlyOutput(sequences=ids) if as_dict else ids  # type: ignore[arg-type]
        check_cache(given.get("cache_implementation"))  # before `generate` makes one
        given.check_padding(input_ids)
        generate: Any = without_stop_strings(self.model).generate
        call = functools.partial(self, streamer=streamer)
        return generate(input_ids, custom_generate=call, **options)
