"""What a level of drafters with layers launches, and a round of those that match texts.

Counted on the CPU under a dispatch mode, as in `benchmarks.launches`, which prints it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headstart.heads import DrafterGroup, group
from headstart.heads.core import tree_attention

from .gpu.shapes import SHAPES, random_drafter, random_target

FAMILIES = ("eagle", "draft_model")
MATCHING = ("lookup", "retrieval", "suffix")


@torch.no_grad()
def count_level(
    family: str, width: int, counts: Callable[[], Any], gpu: Callable[[], Any]
) -> tuple[Any, int]:
    """A second level of `width` nodes a row, with layers fused, and tree attention.

    Args:
        counts: makes what counts, see `benchmarks.launches.Counts`.
        gpu: a context in which layers are fused as on a GPU.

    Returns:
        The counts, and how many layers the drafter has.
    """
    target: PreTrainedModel = random_target(SHAPES["toy"], torch.device("cpu"), torch.float32)
    tokens = torch.arange(12).view(1, -1)
    with gpu(), mock.patch.object(group, "has_kernels_for", lambda model: True):
        drafter: Any = random_drafter(family, target)
        layers, counted = drafter._layers, counts()
        setup = layers.forward_setup
        layers._forward_setup = setup._replace(windows=replace(setup.windows, tree=True))
        (member,), state = DrafterGroup.of(drafter).members, drafter.start(1, 64)
        features = torch.randn(1, 12, target.config.hidden_size)
        drafter.prefill(state, features, tokens, torch.tensor([12]))
        drafter.reserve(state, 16, 2 * width)
        member.begin([state], features[:, :1], tokens[:, :1], torch.tensor([1]))
        parents = torch.full((1, width), -1)
        true = tree_attention.tree_attention

        def attend(query: Tensor, *given: Any) -> Tensor:
            with counted.as_many(2):  # the parts, and what merges them
                return true(query, *given)

        with mock.patch.object(tree_attention, "tree_attention", attend):
            member.extend([state], tokens[:, :width], parents)
            with counted:
                member.extend([state], tokens[:, :width], parents + 1)
    return counted, len(setup.shapes)


@torch.no_grad()
def count_matching(family: str, counts: Callable[[], Any]) -> tuple[Any, Any]:
    """What a drafter that matches texts launches to find its matches, and for a level of a tree."""
    target = random_target(SHAPES["toy"], torch.device("cpu"), torch.float32)
    drafter, tokens = random_drafter(family, target), torch.arange(12).view(1, -1)
    state, features, begun, level = drafter.start(1, 64), torch.empty(1, 12, 0), counts(), counts()
    drafter.prefill(state, features, tokens, torch.tensor([12]))
    drafter.reserve(state, 12, 8)
    with begun:
        drafter.begin(state, features[:, :1], tokens[:, :1], torch.tensor([1]))
    with level:
        drafter.extend(state, tokens[:, :4], torch.full((1, 4), -1))
    return begun, level
