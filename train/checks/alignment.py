"""Whether labels and features are what the drafter is trained for, judged by the real target.

Nothing here uses the code that is judged: labels are compared with what the target itself writes
next, and a feature is put back into the target, whose logits must not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from headstart.heads import FINAL
from headstart.heads.core import OptionError, decoder_layers
from headstart.heads.core.features import OutputLayer
from headstart.infer.measure.own_text import Written

from ..fit.target_with_drafter import TargetWithDrafter
from ..losses.comparisons import IGNORED
from .findings import Finding

_AGREE = 0.9  # of the labels; the target's own rounding turns near-ties around
_CLOSE = 1e-3, 5e-2  # of the largest logit: in float32 and float64, and in shorter types


def batch_of(texts: Sequence[Written]) -> tuple[Tensor, Tensor]:
    """Texts as a batch: tokens [B, T], padded on the right, and supervised [B, T]."""
    tokens = pad_sequence([text.tokens for text in texts], batch_first=True)
    steps = torch.arange(tokens.shape[1], device=tokens.device)
    first, end = (
        torch.tensor(each, device=tokens.device).unsqueeze(1)
        for each in ([t.prompt for t in texts], [len(t.tokens) for t in texts])
    )
    return tokens, (steps >= first) & (steps < end)


@torch.no_grad()
def labels_fit(module: TargetWithDrafter, texts: Sequence[Written]) -> Finding:
    """Each depth's labels against the target's own next tokens, on text that it wrote itself.

    Depth k at position t must have the label that the target's logits at t + k predict. Labels that
    are shifted fit the logits before or behind better.
    """
    tokens, supervised = batch_of(texts)
    predicted = module.target(input_ids=tokens, use_cache=False).logits.argmax(-1)  # [B, T]
    labels = module.labels(tokens, supervised)  # [K, B, T]
    vocabulary = module.drafter.draft_vocabulary
    shares: list[float] = []
    for depth in range(1, len(labels) + 1):
        own = labels[depth - 1]
        ids = own.clamp(min=0)
        ids = ids if vocabulary is None else vocabulary[ids]
        agree = {by: _agreement(predicted, ids, own != IGNORED, depth, by) for by in (-1, 0, 1)}
        if agree[0] is None:
            continue
        share, other = agree[0], max(s for by, s in agree.items() if by and s is not None)
        if share < _AGREE and other > share:
            by = next(by for by, s in agree.items() if s == other)
            return Finding(
                "labels", False,
                f"the labels of depth {depth} are the target's next tokens in {share:.0%} of the "
                f"places, and those one {'later' if by > 0 else 'earlier'} in {other:.0%}: labels "
                "are shifted",
            )  # fmt: skip
        shares.append(share)
    if not shares:
        return Finding("labels", None, "the target repeats itself on these texts")
    said = f"the target's own next token in {min(shares):.1%} of the places, at every depth"
    return Finding("labels", min(shares) >= _AGREE, said)


def _agreement(
    predicted: Tensor, labels: Tensor, known: Tensor, depth: int, by: int
) -> float | None:
    """The share of labels [B, T] that are predicted at t + depth + by; None without any place.

    Only places count where the target predicts three different tokens in a row: in a text that
    repeats itself, shifted labels agree as well.
    """
    length = labels.shape[1] - depth - 2
    if length <= 0:
        return None
    at = {shift: predicted[:, depth + shift :][:, :length] for shift in (0, 1)}
    before = predicted[:, depth - 1 :][:, :length]
    three = (at[0] != at[1]) & (at[0] != before) & (at[1] != before) & known[:, :length]
    if not three.any():
        return None
    guess = {-1: before, **at}[by]
    return float((guess == labels[:, :length])[three].float().mean())


@torch.no_grad()
def features_fit(module: TargetWithDrafter, texts: Sequence[Written]) -> Finding:
    """Each captured feature against the target: put back where it was taken, it changes nothing."""
    layers = list(module.drafter.config.feature_layers)
    if module.final is not None and FINAL not in layers:
        layers.append(FINAL)
    if not layers:
        return Finding("features", True, "the drafter reads tokens alone")
    tokens, supervised = batch_of(texts)
    target = module.target
    expected = target(input_ids=tokens, use_cache=False).logits.float()
    parts = module.run_target(tokens).chunk(len(layers), -1)  # [B, T, D] each
    close = _CLOSE[expected.dtype != torch.float32 or target.dtype.itemsize < 4]
    for layer, part in zip(layers, parts, strict=True):
        try:
            found = _logits_from(target, layer, part, tokens).float()
        except OptionError as error:
            return Finding("features", False, f"feature layer {layer}: {error}")
        places = supervised.unsqueeze(-1)
        error = ((found - expected) * places).abs().amax() / expected.abs().amax()
        if not float(error) <= close:
            return Finding(
                "features", False,
                f"what is taken as feature layer {layer} changes the target's logits by "
                f"{float(error):.1%} where it is put back: it is another layer's or text's",
            )  # fmt: skip
    named = ("after the last norm" if layer == FINAL else str(layer) for layer in layers)
    said = f"put back into the target, they give its own logits (layers: {', '.join(named)})"
    return Finding("features", True, said)


def _logits_from(target: PreTrainedModel, layer: int, states: Tensor, tokens: Tensor) -> Tensor:
    """The target's logits [B, T, V] with a layer's input replaced by states [B, T, D]."""
    if layer == FINAL:
        return OutputLayer(target)(states)

    def replace(module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (states, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": states}

    hook = decoder_layers(target)[layer].register_forward_pre_hook(replace, with_kwargs=True)
    try:
        return target(input_ids=tokens, use_cache=False).logits
    finally:
        hook.remove()
