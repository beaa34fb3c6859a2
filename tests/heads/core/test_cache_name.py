"""Models take and return their cache by the name that this version of transformers has for it."""

import inspect

import torch
from transformers import DynamicCache

from headstart.heads.core import CACHE
from tests.support.tiny import tiny


def test_a_model_takes_and_returns_it_by_this_name() -> None:
    model, given = tiny("llama"), DynamicCache()
    assert CACHE in inspect.signature(model.forward).parameters
    found = model(torch.tensor([[1, 2, 3]]), use_cache=True, **{CACHE: given})
    assert found[CACHE] is given and given.get_seq_length() == 3
