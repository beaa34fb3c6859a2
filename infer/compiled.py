"""A model's forward, compiled by `torch.compile`."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from transformers import PreTrainedModel

from headstart.heads import OptionError

from .capture import unwatched


def compiled(model: PreTrainedModel, mode: str, attention: str) -> Callable[..., Any]:
    """A model's forward, compiled for the shapes that it meets; hooks of its parts run in it."""
    if attention == "masked":
        raise OptionError(
            "compile with attention='masked': its masks grow with the text, and each would be "
            "compiled anew; leave attention out."
        )

    def run(**inputs: Any) -> Any:
        return model(**inputs)

    # What is compiled is kept by code, and its guards overlook hooks: with code of its own, a
    # target never meets what was compiled for another one's features. And each shape has its own,
    # since torch compiles the same code for eight of them at most, and runs others as they are.
    by_shape: dict[torch.Size, Callable[..., Any]] = {}

    def call(**inputs: Any) -> Any:
        shape = inputs["input_ids"].shape
        if shape not in by_shape:
            own = FunctionType(run.__code__.replace(), globals(), closure=run.__closure__)
            by_shape[shape] = torch.compile(own, dynamic=False, mode=mode)
        with unwatched():  # it reads the model's weights, and what the round has just made
            return by_shape[shape](**inputs)

    return call
