"""Muon in float32 learns what torch's does in bfloat16, and makes matrices orthogonal."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headstart.train import muon as module
from headstart.train.muon import Float32Muon, muon, orthogonal


def trained(kind: Callable[..., torch.optim.Optimizer], shape: tuple[int, int]) -> Tensor:
    """A matrix after a few steps, on gradients that change from one to the next."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.zeros(shape))
    optimizer = kind([weight], lr=0.1, momentum=0.95, weight_decay=0.0)
    for _ in range(4):
        weight.grad = torch.randn(shape, generator=generator)
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("shape", [(24, 24), (40, 16), (16, 40)])
def test_it_steps_as_torchs_does(shape: tuple[int, int]) -> None:
    ours, theirs = (trained(kind, shape) for kind in (Float32Muon, torch.optim.Muon))
    difference = (ours - theirs).norm() / theirs.norm()
    assert 0 < difference < 0.02  # of bfloat16, which has eight bits


@pytest.mark.parametrize("shape", [(24, 24), (40, 16), (16, 40)])
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    default = torch.optim.Muon([torch.nn.Parameter(matrix)]).defaults
    found = orthogonal(matrix, default["ns_coefficients"], default["ns_steps"], default["eps"])
    left, values, right = torch.linalg.svd(found, full_matrices=False)
    assert values.min() > 0.4 and values.max() < 1.3
    # The vectors are the matrix's own: in their basis it is diagonal.
    diagonal = left.T @ matrix @ right.T
    assert (diagonal - diagonal.diag().diag()).norm() < 1e-2 * diagonal.norm()


@pytest.mark.parametrize("fast", [False, True])
def test_bfloat16_is_taken_where_the_processor_has_it(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "onednn_packs", lambda dtype: fast)
    found = muon([torch.nn.Parameter(torch.zeros(4, 4))], 0.1)
    assert type(found) is (torch.optim.Muon if fast else Float32Muon)
    assert found.defaults["momentum"] == 0.95
