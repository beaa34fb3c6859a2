"""One thread, and no hooks left on the models that tests share."""

from collections.abc import Iterator

import pytest
import torch

from tests.support.tiny import CONFIGS, tiny


@pytest.fixture(autouse=True)
def one_thread_and_clean_models() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for name in CONFIGS:
        for module in tiny(name).modules():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
