"""Whether rows may hold several documents: a trial of the target and of the drafter.

transformers finds the documents of a row by its positions, which start again with each, but not in
every model and not for every attention. One that does not would let a document read the one before
it, without an error, and its features would be wrong. Recurrent layers always do: they know no
mask, and their state at a document's end is where the next one begins.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headstart.heads import OptionError
from headstart.heads.core import device_of
from headstart.heads.core.features import eval_mode
from headstart.heads.core.probe import tolerance
from headstart.heads.parts.own_layers import recurrent_layers

from ..processes.engine import layer_by_layer
from .target_with_drafter import TargetWithDrafter

_LENGTHS = ((20, 13), (17, 16))  # of the documents in two rows


def check_packing(packing: bool | None, target: PreTrainedModel) -> None:
    """Raise OptionError where a recipe insists on packed rows that recurrent layers would mix."""
    if packing and (reason := _carried(target)):
        raise OptionError(
            f"train.packing is true, but {reason}; set it to false, or to null, which packs where "
            "that is right: train.group_by_length keeps padding low, too."
        )


def _carried(model: PreTrainedModel) -> str | None:
    """What a model's recurrent layers would carry into a row's next document."""
    if not recurrent_layers(model.config):
        return None
    name = model.config.get_text_config(decoder=True).model_type
    return f"{name} has recurrent layers, which carry their state into a row's next document"


@torch.no_grad()
def packing_obstacle(module: TargetWithDrafter) -> str | None:
    """Why rows that hold several documents would be trained wrongly; None where they are not.

    Two rows of two documents each are run packed, and each document alone. The features, and the
    drafter's states, must be the same to rounding. What is read of the document before may fade
    within a few tokens, so those that begin the second documents are also compared by themselves.
    """
    for model in (module.target, module.drafter.language_model):
        if model is not None and (reason := _carried(model)) is not None:
            return reason
    drafter, name = module.drafter, module.target.config.model_type
    family = type(drafter).__name__
    if "positions" not in inspect.signature(drafter.draft_hidden_states).parameters:
        return f"{family} knows no documents within a row"
    device = device_of(module.target)
    positions = torch.stack([torch.cat([*map(torch.arange, pair)]) for pair in _LENGTHS])
    positions = positions.to(device)  # [2, T]
    vocab = module.target.config.get_text_config(decoder=True).vocab_size
    # From the middle of the vocabulary, away from special tokens.
    tokens = torch.arange(positions.numel(), device=device) * 7 + vocab // 2
    tokens = (tokens % vocab).view_as(positions)
    documents = [(row, slice(0, first)) for row, (first, _) in enumerate(_LENGTHS)]
    documents += [(row, slice(first, None)) for row, (first, _) in enumerate(_LENGTHS)]
    with layer_by_layer(module.target), eval_mode(module.target), eval_mode(module.drafter):
        try:
            packed = module.features(tokens, positions)  # [2, T, C]
            states = _states(module, packed, tokens, positions)
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
            what = f"{type(error).__name__}: {error}".partition("\n")[0]
            return f"{name} or {family} cannot run a row of two documents ({what})"
        reads_across = f"{name} with its attention reads across the documents of a row"
        begins_otherwise = []
        for row, part in documents:
            features = module.features(tokens[row : row + 1, part])
            own = packed[row : row + 1, part]
            if _differ(own, features):
                return reads_across
            if part.start:
                begins_otherwise.append(_differ(own[:, :1], features[:, :1]))
            # Of the same features, whose rounding would be in the states, too.
            alone = _states(module, own, tokens[row : row + 1, part])
            own = states[:, row : row + 1, part]
            known = own.shape[2] - len(own)  # a state that needs a token past them may be anything
            if _differ(own[:, :, :known], alone[:, :, :known]):
                return f"{family} reads across the documents of a row"
    # In both rows, so that one expert routed otherwise by rounding does not count.
    return reads_across if all(begins_otherwise) else None


def _states(
    module: TargetWithDrafter, features: Tensor, tokens: Tensor, positions: Tensor | None = None
) -> Tensor:
    """The drafter's states of features [B, T, C] and tokens [B, T]: [K, B, T, D']."""
    how, drafter = {} if positions is None else {"positions": positions}, module.drafter
    every = torch.ones_like(tokens, dtype=torch.bool)
    states = drafter.draft_hidden_states(
        features[..., : module.width], tokens, every, drafter.train_depths, **how
    )
    return states.unflatten(1, tokens.shape)


def _differ(one: Tensor, two: Tensor) -> bool:
    """Whether vectors [..., D] differ by more than rounding, most of them."""
    if not one.numel() or not one.is_floating_point():
        return False
    error, size = ((x.float().std(-1)) for x in (one - two, two))
    return bool((error / size.clamp(min=1e-6)).median() > tolerance(one.dtype))
