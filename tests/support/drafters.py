"""Drafters with random weights, bound to tiny targets."""

from typing import Any

import torch

from headstart.heads import TrainableDrafter, family
from tests.support.tiny import VOCAB, tiny

KEPT = torch.arange(1, VOCAB, 3)[:20]
"""The tokens that are the most frequent to the drafters of `started`."""


def started(name: str, random: bool = True, **options: Any) -> Any:
    """A float64 drafter of the tiny target, as training starts it or with random weights."""
    target, cls = tiny("llama"), family(name)
    config: Any = cls.config_class
    drafter: Any = cls(config.for_target(target, **options)).double().bind(target)
    counts = torch.ones(VOCAB, dtype=torch.long)
    counts[KEPT] = 10
    drafter.init_from_target(counts)
    if random:
        for parameter in drafter.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return drafter.eval()


def made(name: str, target: Any = None, **options: Any) -> Any:
    """A float32 drafter of a target, by default the tiny one, with random weights."""
    torch.manual_seed(3)
    target, cls = tiny("llama") if target is None else target, family(name)
    config: Any = cls.config_class
    drafter: Any = cls(config.for_target(target, **options)).float().bind(target)
    assert isinstance(drafter, TrainableDrafter)
    drafter.init_from_target(torch.arange(VOCAB))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return drafter.eval()


def deep() -> Any:
    """A target with the layers that EAGLE-3's authors read: 2, 3 and 4 of 7."""
    return tiny("llama", 2, num_hidden_layers=7)
