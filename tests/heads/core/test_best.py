"""The best tokens in two launches are those that a stable sort puts first."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.heads import Sampling
from headstart.heads.core import argmax, best, best_log_probabilities, best_of
from tests.support.interpreter import run_interpreted, without_triton

OTHERS = (torch.float64, torch.bfloat16, torch.float16)
COUNTS = (1, 2, 5, 16)


def rows() -> dict[str, Tensor]:
    """Scores [M, V]: with ties, without a probability, both zeros, infinities, and no number."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    odd = 3 * normal(9, 70)
    odd[0, 7], odd[1, 3], odd[2] = float("nan"), float("inf"), float("-inf")
    odd[3, 5:], odd[4, :25], odd[5] = float("-inf"), float("-inf"), -1e4
    odd[6] = odd[6].sign() * 0.0  # of both signs
    odd[7], odd[8, 20:25], odd[8, 60] = float("nan"), float("inf"), float("nan")
    return {
        "normal": 3 * normal(2, 400),
        "one part": 3 * normal(2, 16),
        "few values": torch.randint(-3, 3, (3, 333), generator=generator).float(),
        "ascending": torch.arange(300.0).unsqueeze(0),
        "descending": -torch.arange(300.0).unsqueeze(0),
        "flat": torch.zeros(2, 128),
        "odd": odd,
    }


def found_by_sorting(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    values, places = scores.sort(dim=-1, descending=True, stable=True)
    return values[:, :count].masked_fill(scores.isnan().any(-1, True), torch.nan), places[:, :count]


def wrong(device: str = "cpu") -> list[str]:
    """Cases whose values, places or log-probabilities are not those of a sort."""
    from headstart.heads.core import best_kernels as kernels

    found = []
    kinds = [(torch.float32, count) for count in COUNTS] + [(dtype, 3) for dtype in OTHERS]
    for name, given in rows().items():
        for dtype, count in kinds:
            scores = given.to(device, dtype)
            values, places = kernels.best_of(scores, count)
            logs, again = kernels.best_of(scores, count, logs=True)
            true, where = found_by_sorting(given.to(dtype), count)
            sums = scores.cpu().to(torch.promote_types(dtype, torch.float32)).logsumexp(-1, True)
            number = ~true.isnan()
            near = 1e-12 if dtype == torch.float64 else 1e-5
            same = (
                values.dtype == dtype
                and logs.dtype == torch.float64
                and torch.equal(values.cpu().nan_to_num(1e5), true.nan_to_num(1e5))
                and torch.equal(places.cpu()[number], where[number])
                and torch.equal(again, places)
                and bool(((places >= 0) & (places < scores.shape[-1])).all())
                and torch.allclose(
                    logs.cpu(), true.double() - sums, rtol=near, atol=near, equal_nan=True
                )
            )
            found += [] if same else [f"{name}, {dtype}, {count}"]
    return found


@without_triton
def test_the_kernels_find_what_a_sort_puts_first() -> None:
    assert run_interpreted(__name__) == []


@pytest.mark.gpu
@without_triton
def test_the_kernels_compiled() -> None:
    assert wrong("cuda") == []


@pytest.mark.gpu
@without_triton
def test_a_whole_vocabulary() -> None:
    """Of the sizes that models have, in float16: many ties."""
    for width in (128_256, 151_936, 262_144):
        scores = torch.randn(3, width, generator=torch.Generator().manual_seed(1)).half()
        for count in COUNTS:
            values, places = best_of(scores.cuda(), count)
            true, where = found_by_sorting(scores, count)
            assert torch.equal(values.cpu(), true) and torch.equal(places.cpu(), where)


def test_operators_find_the_same_where_there_is_no_kernel() -> None:
    for name, given in rows().items():
        for count in COUNTS if name != "odd" else ():
            values, places = best_of(given, count)
            logs, again = best_log_probabilities(given, count)
            assert torch.equal(values, found_by_sorting(given, count)[0])
            assert torch.equal(given.gather(-1, places), values) and torch.equal(again, places)
            assert torch.allclose(logs.float(), given.log_softmax(-1).gather(-1, places))


def test_low_precision_is_summed_in_float32() -> None:
    scores = torch.randn(2, 999, generator=torch.Generator().manual_seed(2)).bfloat16()
    logs, places = best_log_probabilities(scores, 3)
    assert torch.allclose(logs.float(), scores.float().log_softmax(-1).gather(-1, places))


def test_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the target's token and a tree's children, for as many as a launch looks for."""
    asked: list[int] = []

    def noted(scores: Tensor, count: int) -> Any:
        asked.append(count)
        return best._topk(scores, count)

    monkeypatch.setattr(best, "_has_kernels", lambda scores, count: count <= best._MOST)
    monkeypatch.setattr(best, "_best", noted)
    scores = torch.randn(2, 3, 50)
    assert torch.equal(argmax(scores), scores.argmax(-1))
    assert torch.equal(Sampling().choose(scores, torch.zeros(2, 3).long()), scores.argmax(-1))
    best_of(scores, best._MOST)
    best_of(scores, best._MOST + 1)
    assert asked == [1, 1, best._MOST]


if __name__ == "__main__":
    from headstart.heads.core import best_kernels

    best_kernels._BLOCK = 128  # several parts a row
    print(json.dumps(wrong()))
