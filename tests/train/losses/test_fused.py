"""The loss and its gradient, found in one pass: what it is equal to, and what it needs."""

import importlib.machinery
import subprocess
import sys
import types

import pytest
import torch

from headstart.train.losses import LOSSES, comparisons
from headstart.train.losses.comparisons import HardLabels
from tests.support.paths import ROOT


def test_a_fused_kernel_is_taken_on_a_gpu_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in for liger_kernel; the numbers of both ways are compared on a GPU below."""
    asked = []
    kernel = types.ModuleType("liger_kernel.transformers.functional")
    kernel.liger_cross_entropy = lambda *given, **how: asked.append(how) or torch.ones(())  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, kernel.__name__, kernel)
    comparisons.fused_cross_entropy.cache_clear()
    logits, labels = torch.randn(5, 9), torch.tensor([1, -100, 3, 8, 0])
    try:
        found = comparisons.fused_cross_entropy("cuda")
        assert found is not None and found(logits, labels) == 1
        assert asked == [{"ignore_index": -100, "reduction": "sum"}]
        assert comparisons.fused_cross_entropy("cpu") is None
    finally:
        comparisons.fused_cross_entropy.cache_clear()


@pytest.mark.gpu
def test_a_fused_kernel_says_the_same() -> None:
    pytest.importorskip("liger_kernel")
    logits, labels = torch.randn(64, 1000), torch.randint(1000, (64,))
    labels[::7] = -100
    found = []
    for device in ("cuda", "cpu"):
        ((_, chosen, compare),) = HardLabels(labels[None].to(device), 64).chunks(learns=True)
        nats, rise = compare(logits.to(device)[chosen].clone(), False)
        assert rise is not None
        found.append((nats.cpu(), rise.cpu()))
    torch.testing.assert_close(found[0], found[1])


MEMORY = """
import re, sys, torch
from pathlib import Path
from torch import nn
from tests.support.losses import embedding_target
from headstart.heads.redrafter import ReDrafter, ReDrafterConfig
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.train.losses.draft_loss import DraftLoss, head_labels, label_counts
family, name, width, positions, depths = *sys.argv[1:3], *map(int, sys.argv[3:6])
size = 16
if family == "medusa":
    config = MedusaConfig(hidden_size=size, vocab_size=width, heads=depths, output="shared")
    drafter = Medusa(config)
else:
    drafter = ReDrafter(ReDrafterConfig(hidden_size=size, vocab_size=width, depths=depths))
model = embedding_target(width, size)
object.__setattr__(drafter, "_target", (model,))
tokens = torch.randint(width, (1, positions + depths + 1))
final = torch.randn(1, positions + depths + 1, size)
labels = head_labels(tokens, torch.ones_like(tokens, dtype=torch.bool), depths)[:, :, :positions]
labels = nn.functional.pad(labels, (0, depths + 1), value=-100)
for parameter in drafter.parameters():
    parameter.grad = torch.zeros_like(parameter)
small = labels.clone()
small[:, :, 4:] = -100
def step(labels, size=None):
    loss = DraftLoss(drafter, 0.8, name, size=size)
    loss(final, tokens, labels, label_counts(labels), final).backward()
    # Not ru_maxrss, which a new process takes over from the one that started it.
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1e6
before = step(small)  # what torch itself takes at its first step
for size in map(int, sys.argv[6:] or [0]):
    print(step(labels, size or None) - before)
"""


def peak_gigabytes(
    family: str, name: str, width: int, positions: int, depths: int, *sizes: int
) -> list[float]:
    """What forward and backward take above inputs, weights and gradients, in a fresh process.

    Args:
        sizes: positions of a chunk, 0 for what `rows_at_once` says; a peak for each. They ascend.
    """
    arguments = [family, name, *map(str, (width, positions, depths, *sizes))]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, *arguments],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_chunks_bound_the_memory() -> None:
    """Three chunks, whose float32 tensors are 37 MB wide instead of 110."""
    name, width, positions = "forward_kl", 128_000, 216
    chunked, whole = peak_gigabytes("medusa", name, width, positions, 1, positions // 3, positions)
    formula = comparisons.tensors(LOSSES[name]) * positions * width * 4 / 1e9
    products = 0.08  # what the library of matrix products keeps for itself
    assert chunked < formula / 3 + products and whole > 1.7 * chunked, (chunked, whole, formula)


@pytest.mark.parametrize("name", LOSSES)
def test_a_chunk_has_the_memory_that_is_said(name: str) -> None:
    loss, limit = LOSSES[name], comparisons.CPU_BYTES
    for width in (1000, 32_000, 128_000):
        rows = comparisons.rows_at_once(loss, width, torch.device("cpu"))
        each = comparisons.tensors(loss) * width * 4
        assert rows * each <= limit < (rows + 1) * each
    assert comparisons.rows_at_once(loss, limit, torch.device("cpu")) == 1


def test_on_a_gpu_chunks_are_made_for_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a power of two: what else is on the device hardly ever changes a run's rounding."""
    gpu, found = torch.device("cuda"), []
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: 3e9)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda _: 2e9)  # 1 GB may be used again
    for free in (70e9, 60e9, 2.5e9, 2.0e9, 0.3e9):
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda _, free=free: (int(free), 0))
        found.append(comparisons.rows_at_once(LOSSES["forward_kl"], 2**15, gpu) * 2**15 * 16)
    assert found == [2**30, 2**30, 2**29, 2**29, 2**28]


@pytest.mark.proof
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("family", ["medusa", "redrafter"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_large_vocabulary_takes_little_memory(family: str, name: str) -> None:
    (peak,) = peak_gigabytes(family, name, 128_000, 2048, 5)
    print(f"{family}, {name}: {peak:.2f} GB")  # shown by `pytest -rP`
    assert peak < 1.2 * comparisons.CPU_BYTES / 1e9
