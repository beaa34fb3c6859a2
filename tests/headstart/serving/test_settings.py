"""Settings in `generation_config` are checked by name, type and range."""

import json
from typing import Any

import pytest

from headstart.serving.settings import check_settings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"eos_token_id": "x"}, "generation_config.eos_token_id is 'x'; expected a token id, or"),
        ({"stop_strings": 5}, "stop_strings is 5; expected a text, or a list"),
        ({"stop_strings": []}, "none of them empty"),
        ({"stop_strings": ["a"] * 65}, "generation_config.stop_strings has 65 texts"),
        ({"min_new_tokens": "a"}, "min_new_tokens is 'a'; expected a whole number from 0"),
        ({"min_new_tokens": 10**30}, "min_new_tokens is 1000"),
        ({"forced_eos_token_id": "z"}, "forced_eos_token_id is 'z'"),
        ({"zzz": 3}, "'zzz', which this server does not know; it takes temperature, "),
        ({"topk": 3}, "did you mean 'top_k'"),
        ({"suppress_tokens": [99]}, "suppress_tokens is 99; expected token ids below 10"),
        ({"suppress_tokens": [-1]}, "suppress_tokens is -1"),
        ({"bad_words_ids": [[3, 10]]}, "bad_words_ids is 10"),
        ({"bad_words_ids": [[]]}, "none of them empty"),
        ({"sequence_bias": [[[10], 1.0]]}, "sequence_bias is 10"),
        ({"sequence_bias": [[[3], 1]]}, "a decimal point"),
        ({"exponential_decay_length_penalty": [1, -1]}, "a number above 0"),
        ({"top_p": 2}, "top_p is 2; expected a number from 0 to 1"),
        ({"do_sample": "yes"}, "expected true or false"),
        ({"num_beams": 3}, "num_beams is 3, which this server cannot do"),
        ({"max_length": 20}, "give max_new_tokens"),
        ({"watermarking_config": {"no": 1}}, "cannot be read"),
        ({"stop_strings": "\ud800"}, "half of a surrogate pair"),
        ([1], "expected a JSON object"),
    ],
)
def test_refused(settings: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        check_settings({"generation_config": json.dumps(settings)}, 10)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"eos_token_id": -1, "pad_token_id": None, "num_beams": 1, "use_cache": True},
        {"eos_token_id": [1, 2], "transformers_version": "5.17.0", "_from_model_config": True},
        {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1, "typical_p": 0.9},
        {"bad_words_ids": [[3, 4]], "sequence_bias": [[[3], 1.0]], "stop_strings": "a"},
        {"exponential_decay_length_penalty": [1, 1.1], "watermarking_config": {}},
    ],
)
def test_taken(settings: Any) -> None:
    check_settings({"generation_config": json.dumps(settings)}, 10)


def test_ids_have_no_bound_where_none_is_known() -> None:
    check_settings({"generation_config": '{"suppress_tokens": [99999]}'}, None)
