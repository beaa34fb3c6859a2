"""One thread, helpers importable by name, and no hooks left on the models that tests share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent.parent / "heads")]
pytest.register_assert_rewrite("tiny", "scripted")


@pytest.fixture(autouse=True)
def one_thread_and_clean_models() -> Iterator[None]:
    from tiny import CONFIGS, tiny

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for name in CONFIGS:
        for module in tiny(name).modules():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
