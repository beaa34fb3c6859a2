"""Top-p without a sort keeps the tokens that the warper of transformers keeps."""

import json
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from headstart.heads import Sampling
from headstart.heads.core import nucleus
from tests.support.interpreter import run_interpreted, without_triton

SHARES = (0.0, 0.5, 0.95, 1.0, 0.1, 0.75, 0.9, 0.999)
MANY = 9  # rows of a kind; the interpreter takes a tenth of a second for one and a share
FEW = 1


def rows(count: int) -> dict[str, Tensor]:
    """Scores [M, V] with ties, equal scores, no probability, both zeros and what is no number;
    `count` rows of each random kind."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    odd = 3 * normal(8, 50)
    odd[0, 7], odd[1, 3], odd[2] = float("nan"), float("inf"), float("-inf")
    odd[3, 5:], odd[4, :25], odd[5] = float("-inf"), float("-inf"), -1e9
    odd[6] = odd[6].sign() * 0.0  # of both signs
    odd[7] *= 1e7
    return {
        "normal": 3 * normal(count, 600),
        "peaked": 8 * normal(count, 700),
        "rounded": (2 * normal(count, 300)).round() / 2,
        "few values": torch.randint(3, (count, 64), generator=generator).log(),
        "flat": torch.zeros(2, 128),
        "one": normal(2, 1),
        "odd": odd,
    }


def rounding(scores: Tensor, share: float) -> Tensor:
    """How close each row's running sums come to 1 - p without reaching it, in float64."""
    sums = scores.double().sort(-1).values.softmax(-1).cumsum(-1) - (1 - share)
    return sums.masked_fill(sums == 0, 1).abs().amin(-1)


def in_order(scores: Tensor, share: float) -> Tensor:
    """The warper's own lines with a sort that is stable, which torch's is not on every device."""
    least, numbers = scores.sort(stable=True)
    gone = least.softmax(-1).cumsum(-1) <= 1 - share
    gone[:, -1] = False
    return scores.masked_fill(gone.scatter(1, numbers, gone), -torch.inf)


def shares(count: int) -> tuple[float, ...]:
    return SHARES if count == MANY else SHARES[:4]


def judged(device: str = "cpu", count: int = MANY) -> dict[str, list[int]]:
    """Rows compared, those alike, and those that keep as many tokens as the warper."""
    from headstart.heads.core import nucleus_kernels as kernels

    found = {}
    for name, scores in rows(count).items():
        each = torch.tensor(shares(count), dtype=torch.float64, device=device)
        few = scores[:2].to(device)
        alone = [kernels.top_p(few, share, -torch.inf) for share in each]
        own = kernels.top_p(few.repeat(len(each), 1), each.repeat_interleave(len(few)), -torch.inf)
        assert torch.equal(own.nan_to_num(1.0), torch.cat(alone).nan_to_num(1.0))
        for share in shares(count):
            of = torch.tensor(share, dtype=torch.float64, device=device)
            own = kernels.top_p(scores.to(device), of, -torch.inf).cpu()
            true = in_order(scores, share)
            given: Any = TopPLogitsWarper(share)
            sure = rounding(scores, share) >= (1e-6 if device == "cpu" else 1e-5)
            alike = ((own == true) | (own.isnan() & true.isnan())).all(-1)
            many = (own == -torch.inf).sum(-1) == (given(None, scores) == -torch.inf).sum(-1)
            same = [int((each & sure).sum()) for each in (sure, alike, many)]
            found[f"{name}, {share}"] = same
    return found


@without_triton
@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.proof)])
def test_the_kernel_keeps_what_the_warper_keeps(count: int) -> None:
    """But where a running sum comes within rounding of 1 - p, without being it."""
    check(run_interpreted(__name__, str(count)), count)


@pytest.mark.gpu
@without_triton
def test_the_kernel_compiled() -> None:
    check(judged("cuda"), MANY)


def check(found: dict[str, list[int]], count: int) -> None:
    assert len(found) == 7 * len(shares(count))
    assert all(sure == alike == many for sure, alike, many in found.values()), found
    number = len(shares(count)) * sum(map(len, rows(count).values()))
    assert sum(sure for sure, _, _ in found.values()) > 0.6 * number


def test_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all ways of `Sampling`, for numbers and numbers on the device; not in float64."""
    asked: list[float] = []

    def noted(scores: Tensor, share: Tensor, filter_value: float) -> Tensor:
        asked.append(float(share))
        return nucleus.top_p(scores, share, filter_value)

    monkeypatch.setattr(nucleus, "has_kernels", lambda tensor: False)
    scores = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    prefix = torch.zeros(3, 2, dtype=torch.long)
    for share in (0.7, torch.tensor(0.7, dtype=torch.float64)):
        warper = TopPLogitsWarper(0.7)
        warper.top_p = share  # type: ignore[assignment]
        processors = LogitsProcessorList([TemperatureLogitsWarper(0.8), warper])
        for dtype, times in ((torch.float32, 3), (torch.float64, 0)):
            sampling = Sampling(torch.arange(3), processors, dtype)
            ways: list[Any] = [
                sampling.warp, sampling.process_each, lambda s, by=sampling: by.process(prefix, s)
            ]  # fmt: skip
            for way in ways:
                plain, asked[:] = way(scores), []
                with monkeypatch.context() as patch:
                    patch.setattr(nucleus, "_has_kernels", lambda s: s.dtype == torch.float32)
                    patch.setattr(nucleus, "_launch", noted)
                    assert torch.equal(way(scores), plain)
                assert asked == [0.7] * (times // 3)


def test_what_the_kernel_does_not_do_is_the_warpers() -> None:
    """More tokens to keep, and other processors."""
    scores = torch.randn(1, 9)
    assert not nucleus._searches(TopPLogitsWarper(0.5), scores)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nucleus, "_has_kernels", lambda scores: True)
        assert nucleus._searches(TopPLogitsWarper(0.5), scores)
        assert not nucleus._searches(TopPLogitsWarper(0.5, min_tokens_to_keep=2), scores)
        assert not nucleus._searches(MinPLogitsWarper(0.5), scores)


if __name__ == "__main__":
    from headstart.heads.core import nucleus_kernels

    nucleus_kernels._BLOCK = 256  # several steps a row
    print(json.dumps(judged(count=int(sys.argv[1]))))
