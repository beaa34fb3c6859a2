"""Settings and shapes as they are declared, against the families' own configs and modules."""

from itertools import product
from typing import Any

import pytest
import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError

from headstart.heads import family
from headstart.heads.declared.layer import Layer
from headstart.heads.families import KNOWN, declared_by

DECLARED = [name for name in KNOWN if declared_by(name) is not None]
LAYER = {
    "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 10, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0,
}  # fmt: skip
LAYERS: list[dict[str, Any]] = [
    {},
    {"num_hidden_layers": 3, "attention_bias": True, "mlp_bias": True},
    {"qk_norm": True, "mlp_bias": True, "attention_bias": True, "num_hidden_layers": 2},
    {"sliding_window": 8, "layer_types": ["sliding_attention"]},
    {"hidden_act": "gelu", "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"num_attention_heads": 10, "attention_bias": True},  # which do not divide the hidden size
]
OUTPUTS: list[dict[str, Any]] = [
    {"output": "shared"}, {"output": "own"}, {"output": "trimmed", "draft_vocab_size": 7},
]  # fmt: skip
CHOICES: dict[str, list[list[dict[str, Any]]]] = {
    "medusa": [OUTPUTS, [{}, {"heads": 3, "layers": 2}]],
    "medusa2": [OUTPUTS, [{}, {"heads": 2}]],
    "redrafter": [
        OUTPUTS[1:], [{}, {"rnn": False}], [{}, {"layers": 0}, {"exit_dim": 20}],
        [{}, {"embedding": "own"}],
    ],
    "mlp_speculator": [
        OUTPUTS[1:], [{}, {"inner_dim": 20}, {"heads": 1}],
        [{}, {"tied": False, "scale_input": False}, {"cell": "lstm"}],
    ],
    "hydra": [
        OUTPUTS, [{"heads": 3, "layers": 2}, {"layers": 1}], [{}, {"embedding": "own"}],
        [{}, *({"prefix": True, "layer": LAYER | each} for each in LAYERS)],
    ],
    "eagle": [
        OUTPUTS[:2], [{}, {"bias": False}, {"embedding": "own"}],
        [{"layer": LAYER | each} for each in LAYERS],
    ],
    "eagle3": [
        OUTPUTS[1:], [{"layer": LAYER | each} for each in LAYERS],
        [{}, {"norm_before_fc": True}, {"fc_norm": True, "feature_layers": [1, 2]},
         {"mask_token_id": 3}, {"embedding": "own"}],
    ],
    "early_exit": [
        [{"layers": 0}, *({"layer": LAYER | each} | output for each in LAYERS
                          for output in (OUTPUTS[0], OUTPUTS[2]))],
    ],
    "dflash": [
        [{"layer": LAYER | {"qk_norm": True} | each, "layers": each.get("num_hidden_layers", 1)}
         for each in LAYERS],
        [OUTPUTS[0], OUTPUTS[2]],
        [{}, {"feature_layers": [1, 2]}, {"markov_rank": 3}, {"embedding": "own"}, {"window": 4},
         *({"markov_rank": 3, "markov_head_type": kind} for kind in ("gated", "rnn")),
         {"domino_rank": 3, "gru_hidden_dim": 5},
         {"selector_rank": 2, "conv_kernel_size": 3, "conv_group_size": 6}],
    ],
    "gemma4_assistant": [
        [{"kinds": ["sliding_attention", "full_attention"], "width": 20, "inner_dim": 30,
          "head_dims": {"sliding_attention": 6, "full_attention": 8}}],
        [{}, {"centroids": 10, "top_centroids": 2}],
    ],
    "lookup": [[{}, {"max_match": 4}]],
    "recycling": [[{}, {"successors": 3}]],
    "retrieval": [[{}, {"max_match": 4}], [{}, {"tokens": 9, "places": 5}]],
    "suffix": [[{}, {"max_match": 4}]],
}  # fmt: skip


def settings(name: str) -> list[dict[str, Any]]:
    sizes = {"hidden_size": 24, "vocab_size": 50}
    chosen = product(*CHOICES[name])
    return [sizes | dict(pair for part in one for pair in part.items()) for one in chosen]


@pytest.mark.parametrize("name", DECLARED)
def test_shapes_are_those_of_the_module(name: str) -> None:
    kind: Any = family(name)
    for given in settings(name):
        config = kind.config_class(**given)
        with torch.device("meta"):
            made = kind(config).state_dict()
        assert config.shapes() == {key: list(tensor.shape) for key, tensor in made.items()}, given


WRONG: list[dict[str, Any]] = [
    {"heads": 0}, {"heads": 10**12}, {"heads": "4"}, {"layers": -1}, {"output": "evil"},
    {"draft_vocab_size": 5}, {"vocab_size": "x"}, {"feature_layers": "abc"}, {"depths": 0},
    {"feature_layers": [None]}, {"hidden_size": None}, {"dropout": 1.0}, {"rnn": 3},
    {"max_match": 10**9}, {"norm_before_fc": True, "fc_norm": True}, {"layer": []},
    {"cell": "gru"}, {"cell": "lstm", "tied": False}, {"inner_dim": -1},
    {"kinds": ["conv"]}, {"kinds": "x"}, {"kinds": ["full_attention"], "head_dims": {"x": 3}},
    {"centroids": 7}, {"centroids": 5, "top_centroids": 6}, {"head_dims": {"full_attention": "x"}},
    {"mask_token_id": "x"}, {"embedding": 3}, {"ramp": "square"}, {"modules": [1]},
]  # fmt: skip


@pytest.mark.parametrize("name", DECLARED)
def test_settings_are_refused_alike(name: str) -> None:
    """What is read without torch is refused exactly where the family's own config refuses it."""
    kind: Any = declared_by(name)
    own: Any = family(name).config_class
    alone: Any = strict(type(kind.__name__, (kind,), {}))
    for wrong in WRONG:
        given = {key: value for key, value in wrong.items() if hasattr(kind, key)}
        answers = []
        for read in (alone, own):
            try:
                read(**{"hidden_size": 24, "vocab_size": 50, **given})
                answers.append(None)
            except StrictDataclassError as error:
                answers.append(str(error))
        assert answers[0] == answers[1], wrong


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "x"}, {"hidden_size": -24}, {"head_dim": 0}, {"num_key_value_heads": 3},
        {"num_attention_heads": 5}, {"num_attention_heads": 10, "mlp_bias": True},
        {"num_hidden_layers": 10**9}, {"rope_theta": "x"},
        {"intermediate_size": None}, {"stranger": 1}, {"hidden_act": 5}, {"layer_types": "abc"},
    ],
    ids=str,
)  # fmt: skip
def test_a_layer_that_there_is_not(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"layer (sets|cannot be)"):
        Layer.of(LAYER | change)
    with pytest.raises(ValueError, match="layer cannot be"):
        Layer.of(None)
    assert Layer.of(LAYER | {"sliding_window": None}).plain
