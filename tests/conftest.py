"""What all tests share: no network, one seed, and no test that this machine lacks something for."""

import os

# Before any test imports the libraries, which read these once. A test that needs a model makes one.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if "PYTEST_XDIST_WORKER" in os.environ:  # threads of workers side by side would wait on each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import random
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.support.paths import SPECULATORS

# A shell starts what runs in its background without SIGINT, which tests and their processes get.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests without CUDA; torch is asked only if there is such a test. Skip those of
    speculators without its environment."""
    for item in items:
        if item.get_closest_marker("speculators") and not SPECULATORS.exists():
            item.add_marker(pytest.mark.skip(reason="needs the environment of .ci/speculators"))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Leave what was imported out of the collections of garbage that tests and training ask for:
    each would look at it anew, for a third of a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers for a test whichever tests ran before it."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def disk_is_not_waited_for() -> Iterator[None]:
    """What a crash of the machine would lose no test can see, and waiting for the disk takes a
    fifth of a small run's time. Processes that tests start do wait for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where matplotlib is not installed: drawing takes longer than a small run's training."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture(autouse=True)
def default_verbosity() -> Iterator[None]:
    """Undo what a test changed of transformers' verbosity, as the pipeline does."""
    yield
    if logging := sys.modules.get("transformers.utils.logging"):
        logging.set_verbosity_warning()
