"""The noise of scores in one launch is that of torch's operators, and so are the best tokens."""

import json
import math
import sys

import pytest
import torch
from torch import Tensor

from headstart.heads import Sampling
from headstart.heads.core import noise, row_seeds
from headstart.heads.core.noise import Stream
from tests.support.interpreter import run_interpreted, without_triton

WIDTHS = (1, 50, 1024, 2500)
NARROW = (1, 50, 256, 600)  # in the interpreter, whose blocks are smaller
TIES = 1e-12  # more than float64 rounds to, and less than two scores differ by


def cases(widths: tuple[int, ...]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Scores [B, M or 1, V], seeds [B], positions [B, M or 1]; with ends of the number line."""
    generator, found = torch.Generator().manual_seed(2), []
    for width in widths:
        for batch, score_rows, position_rows in ((1, 1, 1), (3, 4, 4), (2, 1, 3), (2, 5, 1)):
            scores = 4 * torch.randn(batch, score_rows, width, generator=generator)
            scores[0, 0, ::3] = -math.inf
            if score_rows > 1:
                scores[0, 1] = -math.inf
                scores[0, 2, width // 2] = math.nan
                scores[0, 3, width // 3] = math.inf
            positions = torch.randint(40_000, (batch, position_rows), generator=generator)
            positions[-1, -1] += 9 << 32  # as of a node
            found.append((scores, row_seeds(width, batch) - 2**61, positions))
    return found


def check_kernels(device: str = "cpu") -> int:
    """How many rows were compared."""
    from headstart.heads.core import noise_kernels as kernels

    count = 0
    for case in cases(NARROW if device == "cpu" else WIDTHS):
        scores, seeds, positions = (each.to(device) for each in case)
        width = scores.shape[-1]
        names = torch.randperm(200_000, device=device)[:width]
        rows = len(scores), max(scores.shape[1], positions.shape[1]), width
        apart = torch.randint(200_000, rows, device=device)
        streams = (None, Stream.TARGET), (names, Stream.CHILDREN), (apart, Stream.TARGET)
        for tokens, stream in streams:
            own = kernels.add_noise(scores, seeds, positions, tokens, stream)
            true = noise._noisy(scores, seeds, positions, tokens, stream)
            torch.testing.assert_close(own, true, rtol=0, atol=TIES, equal_nan=True)
        own = kernels.best_with_noise(scores, seeds, positions)
        true = noise._best(noise._noisy(scores, seeds, positions, None, 0))
        assert torch.equal(own, true), (own, true)
        count += own.numel()
    return count


@without_triton
def test_the_kernels_compute_what_torch_does() -> None:
    assert run_interpreted(__name__) == sum(
        s.shape[0] * max(s.shape[1], p.shape[1]) for s, _, p in cases(NARROW)
    )


@pytest.mark.gpu
@without_triton
def test_the_kernels_compiled() -> None:
    assert check_kernels("cuda")


def test_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `choose` for the target, by `perturb` for a drafter, with its own vocabulary or without;
    rows without noise stay so."""
    asked = list[str]()
    scores, positions = torch.randn(2, 3, 70), torch.arange(3).expand(2, -1)
    sampling, named = Sampling(torch.tensor([4, 5])), torch.randperm(500)[:70]
    calls = (
        lambda: sampling.choose(scores, positions),
        lambda: sampling.perturb(scores, positions[:, :1], named, Stream.CHILDREN),
        lambda: sampling.perturb(scores[:, :1], positions),
    )
    plain = [call() for call in calls]
    for name in ("_add_noise", "_best_with_noise"):
        true = getattr(noise, name)
        monkeypatch.setattr(noise, name, lambda *a, n=name, t=true: (asked.append(n), t(*a))[1])
    monkeypatch.setattr(noise, "_has_kernels", lambda scores: True)
    for call, expected in zip(calls, plain, strict=True):
        assert torch.equal(call(), expected)
    assert asked == ["_best_with_noise", "_add_noise", "_add_noise"]


if __name__ == "__main__":
    from headstart.heads.core import noise_kernels

    noise_kernels._BLOCK, noise_kernels._PARTS = 128, 4  # several steps, parts and blocks a row
    print(json.dumps(check_kernels()))
    sys.exit(0)
