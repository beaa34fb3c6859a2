"""One thread, and `tiny` importable by name; what a test hooks onto a shared model is taken off."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))
pytest.register_assert_rewrite("tiny")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
