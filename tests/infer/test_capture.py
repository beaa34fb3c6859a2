"""Captures: what they hold, and what a failed one leaves behind, on a stand-in for CUDA."""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from headstart.infer.capture import Borrowed, Captured, CudaCapture, unwatched
from tests.support.tape import DeadMemory, Living, Tape


def test_small_memory_from_outside_is_held() -> None:
    small, large = torch.ones(4), torch.ones(1 << 19)
    borrowed = Borrowed()
    with borrowed:
        made = small + 1
        made += large[:4]
        made = made.view(2, 2).t().contiguous()
        with unwatched():
            made = made.flatten() + torch.zeros(4)
    assert set(borrowed.held) == {small.untyped_storage().data_ptr()}


def test_what_work_reads_lives_as_long_as_it_can_be_repeated() -> None:
    def work_of(value: float) -> Any:
        number = torch.tensor([value])
        return lambda: number * 2

    def forgetful(work: Callable[[], Any]) -> Callable[[], Any]:
        work()
        return lambda: None

    captured = Captured.by(Tape(), work_of(3.0))
    assert captured().tolist() == [6.0]
    with pytest.raises(DeadMemory, match="mul uses, is gone"):
        Tape()(work_of(3.0))()
    with pytest.raises(DeadMemory, match="4 bytes, which mul uses, are gone"):
        Living(forgetful)(work_of(3.0))()
    held = Captured.by(Living(forgetful), work_of(3.0))
    assert held().tolist() == [6.0]


def test_compiled_code_runs_while_it_is_captured() -> None:
    """A dispatch mode has compilers step aside, and the graph would hold uncompiled kernels."""
    ran = []

    def backend(module: Any, inputs: Any) -> Any:
        def run(*given: Any) -> Any:
            ran.append(len(given))
            return module(*given)

        return run

    compiled = torch.compile(lambda value: value.sin() + 1, backend=backend)
    value = torch.ones(3)
    compiled(value)
    Captured.by(lambda work: (work(), work)[1], lambda: compiled(value))
    assert len(ran) == 2
    torch._dynamo.reset()


class Stream(str):
    """A stream of the stand-in, by its name."""

    @property
    def cuda_stream(self) -> int:
        return hash(self)


class Gpu:
    """What of torch.cuda a capture calls, and what it changes there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.stream, self.pools, self.random = "its own", set[int](), "of all threads"
        self.capturing, self.taken = False, list[str]()  # states of random numbers, by captures
        self.handles = iter(range(1, 9))
        for name in ("current_stream", "set_stream", "device", "graph", "Stream", "CUDAGraph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr("headstart.infer.capture._streams", {})
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(self.handles))
        monkeypatch.setattr(torch.cuda, "default_generators", (self, self))
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release, raising=False)
        self.made, self.released = list[str](), list[int]()
        self.graphs: list[weakref.ref[Any]] = []

    def current_stream(self, device: Any) -> "Stream":
        return Stream(self.stream)

    def set_stream(self, stream: str) -> None:
        self.stream = stream

    @contextmanager
    def device(self, device: torch.device) -> Any:
        assert device.index is not None
        yield

    def Stream(self, device: torch.device) -> str:
        self.made.append(f"capture stream of {device}")
        return self.made[-1]

    def CUDAGraph(self) -> Any:
        gpu = self

        class Graph:
            def capture_begin(self, pool: int, capture_error_mode: str) -> None:
                assert capture_error_mode == "thread_local"
                gpu.pools.add(pool)
                gpu.taken.append(gpu.random)
                if gpu.refuses:
                    raise RuntimeError("a capture is under way")

            def capture_end(self) -> None:
                if gpu.invalid:
                    raise RuntimeError("operation failed due to a previous error during capture")
                gpu.pools.clear()

            def replay(self) -> None:
                pass

        made = Graph()
        self.graphs.append(weakref.ref(made))
        return made

    def clone_state(self) -> str:
        return "of a capture"

    def graphsafe_get_state(self) -> str:
        return self.random

    def graphsafe_set_state(self, state: str) -> None:
        self.random = state

    @contextmanager
    def graph(self, graph: Any, pool: int, stream: str, capture_error_mode: str) -> Any:
        """As torch's: where the capture cannot be ended, nothing after that is done."""
        self.stream, self.capturing = stream, True
        graph.capture_begin(pool=pool, capture_error_mode=capture_error_mode)
        try:
            yield
        finally:
            self.capturing = False
            graph.capture_end()
            self.stream = "its own"

    invalid = refuses = False

    def end(self, index: int, pool: int) -> None:
        if pool not in self.pools:
            raise RuntimeError("not currently recording to this pool")
        self.pools.discard(pool)

    def release(self, index: int, pool: int) -> None:
        self.released.append(pool)


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_failed_capture_leaves_nothing_behind(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(monkeypatch)
    capture = CudaCapture(torch.device(device))

    def waits() -> None:
        index = torch.device(device).index or 0
        assert gpu.stream == f"capture stream of cuda:{index}" and gpu.pools
        gpu.invalid = True
        raise RuntimeError("operation not permitted when stream is capturing")

    for pool in (1, 2):
        with pytest.raises(RuntimeError, match="not permitted"):
            capture(waits)
        assert (gpu.stream, gpu.random, gpu.pools) == ("its own", "of all threads", set())
        assert gpu.released[-1] == pool
        gc.collect()
        assert gpu.graphs[-1]() is not None, "torch's allocator of pinned memory asks it still"
        gpu.invalid = False
    capture(lambda: None)()
    assert (gpu.stream, gpu.random, gpu.pools) == ("its own", "of all threads", set())


@pytest.mark.parametrize("refuses", [False, True])
def test_other_threads_draw_random_numbers_meanwhile(
    refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch refuses them numbers of the state that a capture has taken."""
    gpu, found = Gpu(monkeypatch), list[str]()
    gpu.refuses = gpu.invalid = refuses
    capture = CudaCapture(torch.device("cuda"))
    with pytest.raises(RuntimeError) if refuses else nullcontext():
        capture(lambda: found.append(gpu.random))
    assert gpu.taken == ["of a capture"] and gpu.random == "of all threads"
    assert found == ([] if refuses else ["of all threads"])


def test_an_error_of_the_work_itself_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture can be ended, and there is nothing to put back."""
    gpu = Gpu(monkeypatch)

    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        CudaCapture(torch.device("cuda"))(fails)
    gc.collect()
    assert gpu.stream == "its own" and not gpu.pools and not gpu.released
    assert gpu.graphs[-1]() is None


def test_a_capture_that_cannot_be_ended_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    gpu.invalid = True
    with pytest.raises(RuntimeError, match="previous error"):
        CudaCapture(torch.device("cuda"))(lambda: None)
    assert gpu.stream == "its own" and not gpu.pools


def test_one_thread_captures_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """To begin one waits for the whole device, which makes one that is under way invalid."""
    gpu = Gpu(monkeypatch)
    captures = [CudaCapture(torch.device("cuda")) for _ in range(2)]
    inside, order = threading.Event(), list[str]()

    def first() -> None:
        inside.set()
        time.sleep(0.05)  # for the other thread to begin, if it can
        order.append("first")

    def second() -> None:
        order.append("second")

    thread = threading.Thread(target=captures[0], args=(first,))
    thread.start()
    inside.wait(5)
    captures[1](second)
    thread.join()
    assert order == ["first", "second"] and not gpu.capturing


def test_a_stream_captures_for_all_that_run_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries keep memory for each stream, and graphs of one stream share it."""
    gpu = Gpu(monkeypatch)
    for device in ("cuda", "cuda:0", "cuda:1", "cuda:1"):
        CudaCapture(torch.device(device))(lambda: None)
    assert gpu.made == ["capture stream of cuda:0", "capture stream of cuda:1"]
    gpu.stream = "another"
    CudaCapture(torch.device("cuda"))(lambda: None)
    assert gpu.made[2:] == ["capture stream of cuda:0"]


@pytest.mark.gpu
def test_more_captures_take_no_more_memory() -> None:
    """cuBLAS keeps a workspace for each stream that has multiplied."""
    device = torch.device("cuda", torch.cuda.current_device())
    one = torch.ones(64, 64, device=device)
    assert (one @ one).sum().item() == 64**3  # outside a capture, where libraries begin
    taken = []
    for _ in range(4):
        CudaCapture(device)(lambda: one @ one)
        gc.collect()
        taken.append(torch.cuda.memory_allocated(device))
    assert len(set(taken[1:])) == 1


@pytest.mark.gpu
def test_decoding_goes_on_after_a_failed_capture() -> None:
    """On CUDA itself: a read within a capture, then allocation, random numbers and a capture."""
    device = torch.device("cuda", torch.cuda.current_device())
    capture, value = CudaCapture(device), torch.ones(4, device=device)
    stream = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        capture(lambda: value.sum().item())
    assert torch.cuda.current_stream() == stream
    assert torch.rand(1000, device=device).mean().item() > 0
    found: list[Any] = []
    replay = capture(lambda: found.append(value + 1))
    value.fill_(2)
    replay()
    assert found[0].tolist() == [3.0] * 4


@pytest.mark.gpu
def test_another_thread_uses_the_gpu_during_a_capture() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    value, found = torch.ones(4, device=device), list[Any]()

    def elsewhere() -> float:
        return torch.rand(1000, device=device).mean().item()

    def work() -> None:
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(elsewhere).result())
        found.append(value + 1)

    replay = CudaCapture(device)(work)
    value.fill_(2)
    replay()
    assert 0 < found[0] < 1 and found[1].tolist() == [3.0] * 4
