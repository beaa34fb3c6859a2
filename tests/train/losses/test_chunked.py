"""The teacher's distribution, and the sum over chunks: its kernel, and the memory it needs."""

import importlib.machinery
import subprocess
import sys
import types
from typing import Any

import pytest
import torch

from headstart.heads import OptionError
from headstart.train.losses import LOSSES, chunked
from headstart.train.losses.chunked import Teacher
from tests.support.losses import embedding_target
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
    chunked.summed_cross_entropy.cache_clear()
    logits, labels = torch.randn(5, 9), torch.tensor([1, -100, 3, 8, 0])
    try:
        assert chunked.summed_cross_entropy("cuda")(logits, labels) == 1
        assert asked == [{"ignore_index": -100, "reduction": "sum"}]
        own = chunked.summed_cross_entropy("cpu")(logits.bfloat16(), labels)
    finally:
        chunked.summed_cross_entropy.cache_clear()
    rows = labels >= 0
    expected = -logits.bfloat16().float().log_softmax(-1)[rows, labels[rows]].sum()
    torch.testing.assert_close(own, expected)


@pytest.mark.gpu
def test_a_fused_kernel_says_the_same() -> None:
    pytest.importorskip("liger_kernel")
    logits, labels = torch.randn(64, 1000, device="cuda"), torch.randint(1000, (64,)).cuda()
    labels[::7] = -100
    found = []
    for device in ("cuda", "cpu"):
        mine = logits.clone().requires_grad_()
        loss = chunked.summed_cross_entropy(device)(mine * 1, labels)
        loss.backward()
        assert mine.grad is not None
        found.append((loss, mine.grad))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize(
    "options",
    [{}, {"kind": "scaled", "logit_scale": 3.0}, {"kind": "scaled", "logits_scaling": 1 / 3},
     {"kind": "capped", "final_logit_softcapping": 2.0}],
)  # fmt: skip
def test_the_teacher_says_what_the_target_says(options: dict[str, Any]) -> None:
    model = embedding_target(**options)
    ids = torch.arange(5)[None]
    said = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    torch.testing.assert_close(Teacher(model)(model.embedding(ids)[0]), said)


def test_logits_that_nobody_can_follow_are_refused() -> None:
    with pytest.raises(OptionError, match=r"train\.loss=cross_entropy") as caught:
        Teacher(embedding_target(kind="scaled"))
    assert "\n" not in str(caught.value)


MEMORY = """
import re, sys, torch
from pathlib import Path
from torch import nn
from tests.support.losses import embedding_target
from headstart.heads.redrafter import ReDrafter, ReDrafterConfig
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.train.losses.chunked import KEPT_LOGITS
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
def step(labels, kept=KEPT_LOGITS):
    loss = DraftLoss(drafter, 0.8, name, kept=kept)
    loss(final, tokens, labels, label_counts(labels), final).backward()
    # Not ru_maxrss, which a new process takes over from the one that started it.
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1e6
before = step(small)  # what torch itself takes at its first step
for kept in map(int, sys.argv[6:] or [KEPT_LOGITS]):
    print(step(labels, kept or KEPT_LOGITS) - before)
"""


def peak_gigabytes(
    family: str, name: str, width: int, positions: int, depths: int, *kept: int
) -> list[float]:
    """What forward and backward take above inputs, weights and gradients, in a fresh process.

    Args:
        kept: see `KEPT_LOGITS`, 0 for its value; a peak for each, which must ascend.
    """
    arguments = [family, name, *map(str, (width, positions, depths, *kept))]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, *arguments],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_chunks_bound_the_memory() -> None:
    """Two chunks at each of two depths; their logits are 0.13 GB in every float32 tensor."""
    chunked, whole = peak_gigabytes("medusa", "jensen_shannon", 128_000, 128, 2, 0, 2**30)
    assert chunked < 0.4 and whole > 2 * chunked, (chunked, whole)


@pytest.mark.proof
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("family", ["medusa", "redrafter"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_large_vocabulary_takes_little_memory(family: str, name: str) -> None:
    (peak,) = peak_gigabytes(family, name, 128_000, 2048, 5)
    print(f"{family}, {name}: {peak:.2f} GB")  # shown by `pytest -rP`
    assert peak < 0.6
