"""Threads that wait for a thread's next parallel work do not outlast what needed them."""

import subprocess
import sys

import pytest

from headstart.heads.core.machine import openmp_library
from tests.support.paths import ROOT

THREADS = """
import time, torch
from pathlib import Path
from transformers import StoppingCriteria
from headstart.heads.core import release_threads
from headstart.infer import Speculator
from tests.support.tiny import tiny

torch.set_num_threads(2)
numbers = torch.ones(1 << 22)

def threads(wanted=None):
    limit = time.monotonic() + 10
    while True:
        status = Path("/proc/self/status").read_text()
        found = int(status.split("Threads:")[1].split()[0])
        if wanted in (None, found) or time.monotonic() > limit:
            return found
        time.sleep(0.01)

class Adds(StoppingCriteria):
    most = 0

    def __call__(self, ids, scores, **options):
        numbers.sum()
        Adds.most = max(Adds.most, threads())
        return torch.zeros(len(ids), dtype=torch.bool)
"""


def run(script: str) -> None:
    command = [sys.executable, "-c", THREADS + script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.skipif(
    "libgomp" not in (openmp_library() or ""), reason="torch runs on another OpenMP's threads"
)
def test_threads_are_released() -> None:
    """By themselves, and by each request; they come again where there is work."""
    run(
        """
speculator = Speculator(tiny("llama"))
few = threads()
numbers.sum()
assert threads() == few + 1, threads()
release_threads()
assert threads(few) == few, threads()
release_threads()
assert numbers.sum() == len(numbers)
for _ in range(2):
    ids = torch.tensor([[5, 6, 7]])
    speculator.generate(ids, max_new_tokens=4, do_sample=False, stopping_criteria=[Adds()])
    assert Adds.most == few + 1 and threads(few) == few, (Adds.most, threads())
"""
    )
