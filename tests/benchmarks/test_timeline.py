"""Launches are told apart by the rounds that they belong to."""

import pytest
import torch

from benchmarks.gpu import timeline
from benchmarks.gpu.timeline import Launched, Place, lines_of, places

ROUND = [("draft", 5.0), ("verify", 30.0), ("Memcpy DtoH (Device -> Pinned)", 1.0)]


def launches(rounds: int, gap: float) -> list[Launched]:
    """A prompt, and rounds of which one has a launch more."""
    made, now = [Launched("prompt", 0.0, 100.0), Launched("Memcpy DtoH", 100.0, 1.0)], 101.0
    for number in range(rounds):
        for name, took in (*ROUND[:1], *([("restore", 2.0)] if number == 1 else []), *ROUND[1:]):
            made.append(Launched(name, now + gap, took))
            now += gap + took
    return made


def test_a_round_is_what_most_rounds_are() -> None:
    found = places(launches(5, 0.5))
    assert found == [Place(name, took, 0.5) for name, took in ROUND]
    assert list(lines_of(found, each=False))[:2] == [
        "3 launches of 0.036 ms, and 0.002 ms between them",
        "    1      30.0 µs  gaps     0.5  verify",
    ]
    assert [line.split()[-1] for line in list(lines_of(found, each=True))[1:3]] == [
        "draft",
        "verify",
    ]


def test_a_prompt_alone_has_no_rounds() -> None:
    assert places(launches(0, 1.0)) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert timeline.main([]) == 2
    assert "no GPU was found" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_plain_round(capsys: pytest.CaptureFixture[str]) -> None:
    assert timeline.main(["--shape", "toy", "--context", "20"]) == 0
    assert "launches of" in capsys.readouterr().out
