"""Tokens chosen by the kernels are those that torch's operators choose."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.heads.core import cpu_choices, cpu_kernels, row_seeds
from headstart.heads.core.noise import Stream
from headstart.heads.core.sampling import Sampling, argmax

SIZES = (1, 5, 16, 1000, 4096, 12_293)


def best(scores: Tensor) -> Tensor:
    found = cpu_choices.best_tokens(scores)
    assert found is not None
    return found


@pytest.mark.parametrize("size", SIZES)
def test_the_best_is_the_first_of_equal_ones(size: int, kernel_type: torch.dtype) -> None:
    draws = torch.Generator().manual_seed(size)
    scores = torch.randint(-9, 9, (3, 4, size), generator=draws).to(kernel_type)  # many are equal
    assert torch.equal(best(scores), argmax(scores))
    assert torch.equal(best(scores[:, 1:3]), argmax(scores[:, 1:3]))  # not contiguous
    scores[0, 0] = -torch.inf
    scores[0, 1, size // 2] = torch.inf
    scores[1, 2, size - 1] = torch.nan
    scores[2, 3, 0] = torch.nan
    assert torch.equal(best(scores), argmax(scores))
    assert best(scores)[1, 2] == best(scores)[2, 3] == -1


def both(kernel_type: torch.dtype) -> tuple[Sampling, Sampling]:
    """Ways to sample two rows: by kernels, and without."""
    if kernel_type != torch.float32:
        pytest.skip("scores are float32")
    seeds = row_seeds(11, 2)
    return Sampling(seeds, kernels=True), Sampling(seeds)


SHAPES = {"alike": (3, 3), "a position": (3, 1), "a row of scores": (1, 3), "one": (1, 1)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_noise_is_the_same(
    size: int, shape: str, kernel_type: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, torchs = both(kernel_type)
    rows, places = SHAPES[shape]
    draws = torch.Generator().manual_seed(size)
    scores = torch.randn(2, rows, size, generator=draws)
    scores[0, 0, :: max(size // 3, 1)] = -torch.inf
    positions = torch.randint(0, 2**40, (2, places), generator=draws)
    ran = list[Any]()
    true: Callable[..., Any] = cpu_choices.with_noise

    def counted(*given: Any) -> Any:
        ran.append(true(*given))
        return ran[-1]

    monkeypatch.setattr("headstart.heads.core.sampling.with_noise", counted)
    own = torch.randint(9 * size, (2, max(rows, places), size), generator=draws)
    for tokens in (None, torch.randperm(size, generator=draws) + 7, own):
        for stream in Stream:
            given = scores, positions, tokens, stream
            found, known = ours.perturb(*given), torchs.perturb(*given)
            assert torch.equal(found.isinf(), known.isinf())
            torch.testing.assert_close(found, known, rtol=1e-13, atol=1e-13)
    assert torch.equal(ours.choose(scores, positions), torchs.choose(scores, positions))
    assert len(ran) == 10 and all(each is not None for each in ran)


def test_scores_that_are_no_distribution_choose_nothing(kernel_type: torch.dtype) -> None:
    ours, torchs = both(kernel_type)
    scores = torch.randn(2, 4, 100)
    scores[0, 1] = -torch.inf
    scores[0, 2, 99] = torch.inf
    scores[1, 0, 50] = torch.nan
    positions = torch.arange(8).view(2, 4)
    assert torch.equal(ours.choose(scores, positions), torchs.choose(scores, positions))
    assert (ours.choose(scores, positions) < 0).sum() == 3


def test_the_extreme_noise_is_finite(kernel_type: torch.dtype) -> None:
    """Of many draws the least and the largest agree with torch's logarithms."""
    ours, torchs = both(kernel_type)
    scores, positions = torch.zeros(2, 1, 1), torch.arange(200_000).expand(2, -1)
    found, known = ours.perturb(scores, positions), torchs.perturb(scores, positions)
    assert found.isfinite().all() and found.max() > 10 and found.min() < -2
    torch.testing.assert_close(found, known, rtol=1e-13, atol=1e-13)


def test_what_does_not_fit_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, positions = row_seeds(1, 1), torch.zeros(1, 1, dtype=torch.long)
    for scores in (torch.randn(1, 1, 4).double(), torch.randn(1, 1, 4, requires_grad=True)):
        given = scores, seeds, positions, None, 0, True
        assert cpu_choices.best_tokens(scores) is None and cpu_choices.with_noise(*given) is None
    monkeypatch.setattr(cpu_kernels, "kernels", lambda dtype: None)
    assert cpu_choices.best_tokens(torch.randn(1, 4)) is None
    assert Sampling(kernels=True).best(torch.tensor([[1.0, 3.0]])).tolist() == [1]
