"""The settings of `generate` that a request may give: as fields, or in its `generation_config`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transformers import GenerationConfig

from headstart.terminal import is_utf8, one_line
from headstart.train.recipe.fields import nearest

from .shapes import Refused, check_stops, is_number, shown, wrong

_LARGEST = 1 << 62  # what torch and transformers count with has 64 bits

Wanted = tuple[Callable[[Any], bool], str]
"""What holds of a value, and how that is said."""


def _number(holds: Callable[[Any], bool], said: str) -> Wanted:
    return (lambda value: is_number(value) and holds(value)), f"a number {said}"


def _whole(least: int) -> Wanted:
    said = f"a whole number from {least}"
    return (lambda value: type(value) is int and least <= value < _LARGEST), said


def _is_filled(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and bool(value) and all(map(holds, value))


def _is_bias(pair: Any) -> bool:
    """Whether it is token ids and a float, since that of transformers takes no other number."""
    if not isinstance(pair, list) or len(pair) != 2 or not _is_filled(pair[0], _ID[0]):
        return False
    return isinstance(pair[1], float) and is_number(pair[1])


def _is_decay(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return _whole(0)[0](value[0]) and is_number(value[1]) and value[1] > 0


_SHARE = _number(lambda value: 0 <= value <= 1, "from 0 to 1")
_TRUTH: Wanted = (lambda value: isinstance(value, bool)), "true or false"
_ID: Wanted = (lambda value: type(value) is int), "a token id"
_IDS: Wanted = (
    (lambda value: isinstance(value, list) and all(map(_ID[0], value))),
    ("a list of token ids"),
)
_ONE_OR_MORE: Wanted = (lambda value: all(map(_ID[0], _listed(value)))), "a token id, or a list"

FIELDS: dict[str, Wanted] = {
    "temperature": _number(lambda t: t >= 0, "from 0"),
    "top_p": _SHARE,
    "min_p": _SHARE,
    "top_k": ((lambda k: type(k) is int and k >= -1), "a whole number, 0 or -1 for all tokens"),
    "repetition_penalty": _number(lambda p: p > 0, "above 0"),
    "presence_penalty": _number(lambda p: -2 <= p <= 2, "from -2 to 2"),
    "frequency_penalty": _number(lambda p: -2 <= p <= 2, "from -2 to 2"),
    "max_tokens": _whole(1),
    "max_completion_tokens": _whole(1),
    "max_output_tokens": _whole(1),
}
"""Numbers that are fields of a request."""

SETTINGS: dict[str, Wanted] = {
    **{name: FIELDS[name] for name in ("temperature", "top_p", "min_p", "repetition_penalty")},
    "do_sample": _TRUTH,
    "top_k": _whole(0),
    "top_h": _SHARE,
    "typical_p": _SHARE,
    "epsilon_cutoff": _SHARE,
    "eta_cutoff": _SHARE,
    "max_new_tokens": _whole(1),
    "min_new_tokens": _whole(0),
    "min_length": _whole(0),
    "max_time": _number(lambda seconds: seconds > 0, "above 0"),
    "stop_strings": (
        (lambda value: bool(value) and all(isinstance(s, str) and s for s in _listed(value))),
        "a text, or a list of texts, none of them empty",
    ),
    "no_repeat_ngram_size": _whole(0),
    "eos_token_id": _ONE_OR_MORE,
    "pad_token_id": _ID,
    "bos_token_id": _ID,
    "forced_bos_token_id": _ID,
    "forced_eos_token_id": _ONE_OR_MORE,
    "suppress_tokens": _IDS,
    "begin_suppress_tokens": _IDS,
    "bad_words_ids": (
        (lambda value: _is_filled(value, lambda ids: _is_filled(ids, _ID[0]))),
        "a list of lists of token ids, none of them empty",
    ),
    "sequence_bias": (
        (lambda value: _is_filled(value, _is_bias)),
        "a list of pairs, each a list of token ids and a number with a decimal point",
    ),
    "exponential_decay_length_penalty": (
        _is_decay,
        "a list of a whole number from 0 and a number above 0",
    ),
    "guidance_scale": _number(lambda scale: True, "such as 1.5"),
    "watermarking_config": ((lambda value: isinstance(value, dict)), "an object"),
    "renormalize_logits": _TRUTH,
    "remove_invalid_values": _TRUTH,
}
"""What `generation_config` may hold."""

_NEUTRAL = {
    "num_beams": 1, "num_return_sequences": 1, "num_beam_groups": 1, "use_cache": True,
    "early_stopping": False, "length_penalty": 1, "diversity_penalty": 0,
    "return_dict_in_generate": False, "output_scores": False, "output_logits": False,
    "output_attentions": False, "output_hidden_states": False, "token_healing": False,
}  # fmt: skip
"""Of what is not done here, the values that ask for nothing."""

_SAID_OF_A_FILE = ("transformers_version", "_from_model_config")  # in each generation_config.json


def check_settings(body: Mapping[str, Any], vocabulary: int | None) -> None:
    """Refuse what of a request's `generation_config` is unknown, of a wrong type or out of range.

    Args:
        vocabulary: how many token ids the target has, if that is known.

    Raises:
        ValueError: the name of the setting, what was found, and what was expected.

    >>> check_settings({"generation_config": '{"top_k": 5, "eos_token_id": [1, 2]}'}, 10)
    >>> check_settings({"generation_config": '{"top_k": "5"}'}, 10)
    Traceback (most recent call last):
    ...
    headstart.serving.shapes.Refused: generation_config.top_k is '5'; expected a whole number from 0
    """
    if "generation_config" not in body:
        return
    found = _read(body["generation_config"])
    for name, value in found.items():
        if value is None or name in _SAID_OF_A_FILE:
            continue
        at = f"generation_config.{name}"
        if name in SETTINGS:
            holds, wanted = SETTINGS[name]
            if not holds(value):
                raise wrong(at, value, wanted)
        elif name == "max_length":
            raise Refused(f"{at} is {shown(value)}; give max_new_tokens in place of it", at)
        elif name not in _NEUTRAL:
            raise Refused(
                f"generation_config has {shown(name)}, which this server does not know"
                f"{nearest(name[:100], SETTINGS)}; it takes {', '.join(SETTINGS)}",
                at,
                "unknown_parameter",
            )
        elif value != _NEUTRAL[name]:
            said = f"{at} is {shown(value)}, which this server cannot do; leave it out"
            raise Refused(said, at, "unsupported_value")
        for token in _ids_of(name, value):
            none = token == -1 and name in ("eos_token_id", "pad_token_id")
            if not none and not 0 <= token < (vocabulary or token + 1):
                said = "token ids" if vocabulary is None else f"token ids below {vocabulary}"
                raise wrong(at, token, said)
    check_stops(found.get("stop_strings") or [], "generation_config.stop_strings")
    try:
        GenerationConfig(**found)
    except (TypeError, AttributeError, KeyError) as error:  # from settings that are objects
        said = f"generation_config cannot be read: {one_line(error)}"
        raise Refused(said, "generation_config") from error


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _read(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise wrong("generation_config", text, "a JSON object, written as a text")
    if not is_utf8(json.dumps(found, ensure_ascii=False)):
        raise ValueError("generation_config holds half of a surrogate pair, which is no text")
    return found


def _ids_of(name: str, value: Any) -> Iterator[int]:
    """The token ids in the value of a setting."""
    if name == "sequence_bias":
        value = [ids for ids, _ in value]
    if not any(part in name for part in ("token_id", "suppress", "bad_words", "sequence_bias")):
        return
    for each in _listed(value):
        yield from each if isinstance(each, list) else [each]
