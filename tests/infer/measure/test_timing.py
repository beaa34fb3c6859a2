"""The clock, and measurements that take turns."""

from typing import Any

import pytest
import torch

from headstart.infer.capture import CudaCapture
from headstart.infer.measure.timing import Stopwatch, interleaved, medians, take_turns

CPU = torch.device("cpu")


def test_calls_take_turns_and_warm_up() -> None:
    called: list[str] = []
    calls = {name: lambda name=name: called.append(name) for name in "ab"}
    times = interleaved(calls, CPU, repeats=2, burst=3)
    assert called == [*"aaaa", *"bbbb"] * 2  # one of each four is not timed
    assert {name: len(each) for name, each in times.items()} == {"a": 2, "b": 2}
    assert medians({"a": [1.0, 9.0, 2.0]}) == {"a": 2.0}


def test_a_turn_passes_its_value_on() -> None:
    called: list[tuple[str, int]] = []
    runs = {name: lambda n, name=name: called.append((name, n)) or 10 * n for name in "ab"}
    assert take_turns(runs, [3, 4]) == {"a": [30, 40], "b": [30, 40]}
    assert called == [("a", 3), ("b", 3), ("a", 4), ("b", 4)]


def test_a_gpu_is_timed_by_its_own_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in: marks are events in the stream, and only reading them waits."""
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool, external: bool):
            assert enable_timing and external  # or a graph would hold no mark

        def record(self, stream: str) -> None:
            log.append(f"mark in {stream}")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: Any) -> float:
            return 12.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"{device}'s stream")
    gpu = torch.device("cuda")
    times = interleaved({"a": lambda: log.append("call")}, gpu, repeats=1, burst=3)
    mark = "mark in cuda's stream"
    assert log == [mark, "call", mark, "wait", mark, *["call"] * 3, mark, "wait"]
    assert times == {"a": [4.0]}


@pytest.mark.gpu
def test_marks_in_a_graph_are_made_anew() -> None:
    device = torch.device("cuda")
    watch, marks = Stopwatch(device), []
    matrix = torch.randn(2048, 2048, device=device)

    def work() -> None:
        marks.append(watch.mark())
        torch.mm(matrix, matrix)
        marks.append(watch.mark())

    torch.mm(matrix, matrix)  # libraries' own
    replay = CudaCapture(device)(work)
    begun = watch.mark()
    replay()
    assert watch.between(*marks) > 0 and watch.between(begun, marks[0]) >= 0
