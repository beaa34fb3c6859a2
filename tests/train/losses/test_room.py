"""Memory that steps use one after the other: never while somebody else may still read it."""

import gc

import pytest
import torch
from torch import nn

from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.train.losses import LOSSES
from headstart.train.losses.draft_loss import DraftLoss, head_labels, label_counts
from headstart.train.losses.room import Room
from tests.support.losses import embedding_target

WIDTH, SIZE, HEADS = 50, 16, 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_memory_is_lent_again_when_nothing_shares_it(dtype: torch.dtype) -> None:
    room, like = Room(), torch.empty(4, 6, dtype=dtype)
    first = room.lend(0, like)
    assert (first.shape, first.dtype, first.is_contiguous()) == (like.shape, dtype, True)
    place, view = first.data_ptr(), first[1:].detach()
    del first
    assert room.lend(0, like).data_ptr() != place  # a view is left
    assert room.lend(1, like).data_ptr() != place
    del view
    gc.collect()
    assert room.lend(0, like).data_ptr() == place
    assert room.lend(0, torch.empty(7, 9, dtype=dtype)).shape == (7, 9)


def setting(loss: str) -> tuple[Medusa, DraftLoss]:
    torch.manual_seed(0)
    config = MedusaConfig(hidden_size=SIZE, vocab_size=WIDTH, heads=HEADS, output="own")
    drafter = Medusa(config)
    object.__setattr__(drafter, "_target", (embedding_target(WIDTH, SIZE),))
    for parameter in drafter.parameters():
        nn.init.normal_(parameter)
    return drafter, DraftLoss(drafter, 0.8, loss)


def backward(loss: DraftLoss, seed: int, times: float = 1.0) -> None:
    torch.manual_seed(seed)
    tokens, final = torch.randint(WIDTH, (1, 12)), torch.randn(1, 12, SIZE)
    labels = head_labels(tokens, torch.ones_like(tokens, dtype=torch.bool), HEADS)
    (times * loss(final, tokens, labels, label_counts(labels), final)).backward()


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_that_are_kept_stay_as_they_are(name: str) -> None:
    """Also when they are added up over several batches."""
    drafter, loss = setting(name)
    alone: list[torch.Tensor] = []
    for seed in (1, 2):
        backward(loss, seed)
        assert drafter.output.grad is not None
        alone.append(drafter.output.grad.clone())
        place = drafter.output.grad.data_ptr()
        drafter.zero_grad()
    backward(loss, 1)
    kept = drafter.output.grad
    assert kept is not None and kept.data_ptr() == place  # the memory of the step before
    drafter.output.grad = None
    backward(loss, 2)
    assert drafter.output.grad is not None
    assert torch.equal(kept, alone[0]) and torch.equal(drafter.output.grad, alone[1])
    backward(loss, 1)
    torch.testing.assert_close(drafter.output.grad, alone[0] + alone[1])
    drafter.zero_grad()
    backward(loss, 1, times=4.0)
    torch.testing.assert_close(drafter.output.grad, 4 * alone[0])
