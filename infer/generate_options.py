"""What `generate` takes, read and checked: everything that is not honoured is refused."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from headstart.heads import OptionError, Sampling
from headstart.heads.core import (
    CACHE,
    STATEFUL,
    Biased,
    counted,
    device_and_dtype,
    row_seeds,
)

from .own_options import read_seed

_OTHER_METHODS = {
    "constraints": "constrained beam search",
    "force_words_ids": "constrained beam search",
    "num_beam_groups": "group beam search",
    "num_beams": "beam search",
    "dola_layers": "DoLa",
    "prompt_lookup_num_tokens": "prompt lookup",
    "assistant_early_exit": "early-exit assistance",
    "use_mtp": "multi-token prediction",
    "penalty_alpha": "contrastive search",
}
"""Options that ask for another decoding method, in the order in which `generate` decides."""

_INPUTS = {"attention_mask", "position_ids", CACHE, "logits_to_keep", "use_cache"}
_INPUTS |= {"output_attentions", "output_hidden_states"}
"""Model inputs that are honoured, or never change the text."""

_ENCODED = "mm_encoder_outputs"
"""What `generate` adds for a model that also reads images: nothing in it where there are none."""


_COLDEST = 1e-30
"""The least temperature: divided by much less, scores are no numbers of float32 any more."""

_LEAVES_NONE_OUT = {
    "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}  # fmt: skip
"""Of the options that leave tokens out of sampling, the values with which they leave out none."""


def whole_distribution(model: PreTrainedModel) -> dict[str, float]:
    """The options of `generate` that sample from all tokens, whatever a model's own config says.

    Without top_k, `generate` would take the 50 most likely ones.
    """
    config: Any = model.generation_config
    own = {name for name in _LEAVES_NONE_OUT if getattr(config, name, None) is not None}
    return {n: value for n, value in _LEAVES_NONE_OUT.items() if n in own | {"top_k", "top_p"}}


class GenerateOptions:
    """The options of one call of `Speculator.generate`, resolved as transformers resolves them."""

    def __init__(self, options: dict[str, Any], defaults: GenerationConfig):
        self.options, self._defaults = options, defaults

    def get(self, name: str) -> Any:
        """An option as `generate` resolves it: the call's, its config's, the model's."""
        if name in self.options:
            return self.options[name]
        given = getattr(self.options.get("generation_config"), name, None)
        return getattr(self._defaults, name, None) if given is None else given

    def set(self, **values: Any) -> None:
        """Set options of the call, in its generation config where it has one, in a copy."""
        options = self.options
        if options.get("generation_config") is None:
            options.update(values)
            return
        config = options["generation_config"] = copy.deepcopy(options["generation_config"])
        for name, value in values.items():
            options.pop(name, None)
            setattr(config, name, value)

    def take_stop_strings(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        criterion_of: Callable[[Any, Any], StopStringCriteria],
    ) -> None:
        """Turn `stop_strings` into a criterion; `generate` hands no tokenizer to a callable."""
        if not (strings := self.get("stop_strings")):
            if "stop_strings" in self.options:  # none by name, whatever the config says
                self._without_stop_strings()
            return
        criteria = StoppingCriteriaList(self.options.pop("stopping_criteria", None) or [])
        if not any(type(criterion) is StopStringCriteria for criterion in criteria):
            if tokenizer is None:
                raise OptionError(
                    "stop_strings need the target's tokenizer, found none; pass tokenizer=…."
                )
            criteria.append(criterion_of(tokenizer, strings))
        self.options["stopping_criteria"] = criteria
        self._without_stop_strings()

    def _without_stop_strings(self) -> None:
        self.set(stop_strings=None)
        self.options.pop("stop_strings", None)

    def end_tokens(self) -> list[int]:
        """The tokens that end a text."""
        eos = self.get("eos_token_id")
        return torch.as_tensor([] if eos is None else eos).flatten().tolist()

    def check_padding(self, ids: Tensor | None) -> None:
        """Refuse prompts [B, P] that look padded on the right, with no mask to say so.

        `generate` infers none, and takes padding for text, when the padding token is an end token.
        """
        if ids is None or len(ids) < 2 or self.options.get("attention_mask") is not None:
            return
        eos, pad = self.end_tokens(), self.get("pad_token_id")
        pad = eos[0] if pad is None and eos else pad
        if pad in eos and ids.shape[1] and bool((ids[:, -1] == pad).any()):
            raise OptionError(
                f"a prompt ends with token {pad}, which is padding and end token, and there is no "
                "attention_mask; pass it, and pad on the left: tokenizer.padding_side = 'left'."
            )


def check_ids(ids: Any) -> None:
    """Refuse prompts that are no token ids [B, P]."""
    if ids is None:
        return
    shape = type(ids).__name__
    if isinstance(ids, Tensor):
        if ids.dim() == 2 and ids.dtype in (torch.int64, torch.int32):
            return
        shape = f"a tensor of shape {[*ids.shape]} and type {str(ids.dtype).removeprefix('torch.')}"
    raise OptionError(
        f"input_ids is {shape}; expected token ids [batch, tokens], such as "
        "generate(**tokenizer(text, return_tensors='pt'))."
    )


def check_mask(mask: Any, ids: Tensor) -> None:
    """Refuse a mask that has another shape than its prompts [B, P], or is no tensor."""
    shape = [*mask.shape] if isinstance(mask, Tensor) else None
    if shape != [*ids.shape]:
        found = type(mask).__name__ if shape is None else f"of shape {shape}"
        raise OptionError(
            f"attention_mask is {found}; expected a tensor of the shape of input_ids, "
            f"{[*ids.shape]}, with 1 at tokens and 0 at padding."
        )


def check_not_empty(ids: Tensor) -> None:
    """Refuse prompts [B, P] without a row, or of no token."""
    if 0 in ids.shape:
        raise OptionError(
            f"input_ids is empty, of shape {[*ids.shape]}; expected at least one prompt, of at "
            "least one token."
        )


def without_stop_strings(model: PreTrainedModel) -> PreTrainedModel:
    """The model as `generate` is to be called on it, which has no tokenizer for a callable.

    That is a shallow copy with a generation config of its own where the model's has stop strings.
    """
    if model.generation_config.stop_strings is None:
        return model
    view, view_config = copy.copy(model), copy.deepcopy(model.generation_config)
    view.generation_config, view_config.stop_strings = view_config, None
    return view


def check_cache(kind: str | None) -> None:
    """Refuse a `cache_implementation` other than the speculator's own."""
    if (kind or "").startswith(("quantized", "offloaded")):
        raise OptionError(
            f"cache_implementation is {kind!r}; the speculator keeps its own cache, in the model's "
            "dtype and on its devices: leave it out."
        )


def check_config(config: GenerationConfig, model: PreTrainedModel) -> None:
    """Refuse, by name, options that ask for something else than one greedy or sampled text."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        for name, method in _OTHER_METHODS.items():
            value = getattr(config, name, None)
            if value and not (value == 1 and name.startswith("num_")):
                raise OptionError(
                    f"{name} is {value} and asks for {method}; speculative decoding writes one "
                    "greedy or sampled text: leave it out."
                )
    for name in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name, None):
            raise OptionError(f"{name}=True is not supported while speculating; set it to False.")
    check_cache(config.cache_implementation)
    temperature = config.temperature
    if config.do_sample and temperature is not None and not temperature >= _COLDEST:
        raise OptionError(
            f"temperature is {temperature}; expected a number from {_COLDEST}, or do_sample=False."
        )
    if model.training:
        raise OptionError(
            "the target is in training mode, where dropout is random; call model.eval()."
        )


def check_autocast(model: PreTrainedModel) -> None:
    """Refuse autocast to another dtype, under which keys and values differ in theirs."""
    device, dtype = device_and_dtype(model)
    if torch.is_autocast_enabled(device.type):
        cast = torch.get_autocast_dtype(device.type)
        if cast != dtype:
            raise OptionError(
                f"autocast to {cast} is on, and the target is in {dtype}; leave it out, and load "
                "the target in the dtype that it shall run in."
            )


def read_sampling(
    config: GenerationConfig,
    processors: LogitsProcessorList | None,
    seed: Any,
    input_ids: Tensor,
    vocab: int,
) -> Sampling:
    """The seeds and processors of a request for prompts [B, P]; no seeds where it is greedy.

    Refused are another number of seeds than rows, processors that no tree can follow, and biases
    of tokens that are not among the target's `vocab` ids.
    """
    found = [_of_single_tokens(item, vocab, input_ids.device) for item in processors or ()]
    kept, (batch, width) = LogitsProcessorList(found), input_ids.shape
    for processor in kept:
        if batch > 1 and isinstance(processor, STATEFUL):
            raise OptionError(
                f"{type(processor).__name__} keeps a state that all rows share, and speculating "
                f"rows advance apart; found {batch} rows: give it one prompt at a time."
            )
        if isinstance(processor, RepetitionPenaltyLogitsProcessor):
            ignored = processor.prompt_ignore_length
            if ignored is not None and (most := int(torch.as_tensor(ignored).max())) > width:
                raise OptionError(
                    f"prompt_ignore_length of {type(processor).__name__} is {most} and the prompt "
                    f"has {width} tokens; expected no more than those."
                )
    if not config.do_sample:
        return Sampling(None, kept)
    seeds = int(torch.randint(2**62, ())) if seed is None else read_seed(seed)
    if not isinstance(seeds, int) and len(seeds) != batch:
        raise OptionError(
            f"found {counted(len(seeds), 'seed')} for {counted(batch, 'row')}; give one seed, or "
            "one per row."
        )
    return Sampling(row_seeds(seeds, batch, input_ids.device), kept)


def _of_single_tokens(item: Any, vocab: int, device: torch.device) -> Any:
    """The processor of a `sequence_bias` or of `bad_words_ids` without its look at the text, if all
    that it is about are single tokens; any other processor as it is.
    """
    if type(item) not in (SequenceBiasLogitsProcessor, NoBadWordsLogitsProcessor):
        return item
    if any(len(tokens) != 1 for tokens in item.sequence_bias):
        return item
    pairs = [(int(tokens[0]), float(bias)) for tokens, bias in item.sequence_bias.items()]
    # None at all where `bad_words_ids` are end tokens alone, which transformers leaves out.
    if (most := max((token for token, _ in pairs), default=-1)) >= vocab:
        name = "sequence_bias" if type(item) is SequenceBiasLogitsProcessor else "bad_words_ids"
        raise OptionError(
            f"token {most} of {name} is not among the target's {vocab} token ids; use the target's "
            "tokenizer."
        )
    return Biased.of(pairs, vocab, device)


def read_inputs(input_ids: Tensor, inputs: Mapping[str, Any], vocab: int) -> Tensor:
    """The mask of prompts [B, P], 1 at true tokens; inputs that would be ignored are refused.

    `inputs` are what else `generate` would pass to the model, which has `vocab` token ids.
    """
    for name, value in inputs.items():
        if name == _ENCODED and not value:
            continue
        if value is not None and name not in _INPUTS:
            what = "an image or a video" if name == _ENCODED else name
            raise OptionError(
                f"{what} was given, but a token tree is run with token ids and positions alone; "
                "leave it out."
            )
    cache = inputs.get(CACHE)
    if cache is not None and (
        getattr(cache, "_is_user_defined", False) or int(cache.get_seq_length()) > 0
    ):
        raise OptionError(
            f"{CACHE} was given; the speculator keeps its own cache: pass the whole prompt instead."
        )
    check_not_empty(input_ids)
    mask = inputs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device)
    check_mask(mask, input_ids)
    if bool(((mask != 0) & (mask != 1)).any()):
        raise OptionError(
            "attention_mask holds other numbers than 0 and 1; expected 1 at tokens, 0 at padding."
        )
    mask = mask.long()
    if not bool(mask[:, -1].all()):
        raise OptionError(
            "the prompts are padded on the right, or a row is all padding; expected at least one "
            "token a row, padded on the left: set tokenizer.padding_side = 'left'."
        )
    if bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise OptionError(
            "attention_mask hides tokens inside a prompt; expected padding on the left alone."
        )
    strange = (mask > 0) & ((input_ids < 0) | (input_ids >= vocab))
    if bool(strange.any()):
        row = int(strange.any(1).byte().argmax())
        raise OptionError(
            f"token {int(input_ids[strange][0])} of row {row} is not among the target's {vocab} "
            "token ids; use the target's tokenizer."
        )
    positions = inputs.get("position_ids")
    if positions is not None:
        # Models that also read images number each token several times: [3 or 4, B, P], of text
        # alone always the same. How padding is numbered never matters.
        natural, given = mask.cumsum(-1) - 1, positions.to(mask.device)
        # A mask of ones is dropped by `generate`, which has made positions of its shape.
        check_mask(given.new_ones(given.shape[-2:]), input_ids)
        if not bool(((given == natural) | (mask == 0)).all()):
            raise OptionError(
                "position_ids do not count the prompt's tokens from 0; the speculator numbers them "
                "itself: leave position_ids out."
            )
    return mask


@dataclass(frozen=True)
class Ending:
    """When rows end.

    Attributes:
        limit: columns of text, padding and prompt included.
        eos: token ids, in the order given; pad: the one that is written after a row's end.
        others: criteria that must be asked after every token.
        lengths: the criteria that `limit` came from.
    """

    limit: int
    eos: list[int]
    pad: int
    others: StoppingCriteriaList
    lengths: list[MaxLengthCriteria]

    @classmethod
    def of(
        cls, criteria: StoppingCriteriaList | None, config: GenerationConfig, width: int
    ) -> Self:
        """Sort the criteria of `generate` for prompts of `width` columns."""
        found = StoppingCriteriaList(criteria or [])
        lengths = [c for c in found if isinstance(c, MaxLengthCriteria)]
        limit = min((c.max_length for c in lengths), default=None)
        if limit is None or not width < limit < math.inf:
            raise OptionError(
                f"the length limit is {limit} and the prompt has {width} tokens; set "
                "max_new_tokens to a whole number, at least 1."
            )
        ends = [c for c in found if isinstance(c, EosTokenCriteria)]
        others = [c for c in found if not isinstance(c, MaxLengthCriteria | EosTokenCriteria)]
        eos = [int(token) for c in ends for token in c.eos_token_id.tolist()]
        pad = (eos or [0])[0] if config.pad_token_id is None else int(config.pad_token_id)
        return cls(math.ceil(limit), eos, pad, StoppingCriteriaList(others), lengths)

    def warn_of_length(self, sequences: Tensor) -> None:
        """Let transformers warn, as it does, when the text outgrew the model's trained length."""
        if sequences.shape[1] > 1:
            for criterion in self.lengths:
                criterion(sequences[:, :-1], None)  # type: ignore[arg-type]
