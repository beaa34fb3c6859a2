"""Layers whose activations are computed again in the backward pass, in place of being kept."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def compute_again(layers: Iterable[nn.Module]) -> Callable[[], None]:
    """From now on drop what layers compute until the backward pass asks; returns the undoing.

    Forwards without a gradient, as while decoding, are as before.
    """
    before = [(layer, layer.__dict__.get("forward")) for layer in layers]
    for layer, _ in before:
        layer.forward = partial(_run, layer.forward)  # type: ignore[method-assign]

    def undo() -> None:
        for layer, own in before:
            del layer.forward
            if own is not None:  # a hook's
                layer.forward = own

    return undo


def _run(forward: Callable[..., Any], *given: Any, **how: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*given, **how)
    return checkpoint(forward, *given, use_reentrant=False, **how)
