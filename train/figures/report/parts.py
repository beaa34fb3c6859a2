"""Parts that every report has: the environment, texts in pieces, and sentences on the figures."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..pieces import PieceReader
from .page import Sample

NOTES = [
    "τ is the number of tokens per round, including the target's own token; plain decoding has 1. "
    "It depends on the text, not on the speed of the machine.",
    "A speedup holds only for this machine, dtype and batch size. A larger target takes longer for "
    "a forward, which changes what drafting gains.",
    "Repetitive text makes every drafter look good: compare speedups only together with the share "
    "of distinct 4-grams.",
]


def environment(device: str, dtype: str) -> list[tuple[str, str]]:
    """What the run was measured on, without names of the machine or of its user."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    count = torch.get_num_threads()
    threads = f"{count} thread{'s' if count > 1 else ''} used"
    rows = [
        ("device, dtype", f"{device}, {dtype}"),
        ("processor", f"{_processor()}, {cores} cores, {threads}"),
        ("system", f"{platform.system()} {platform.machine()}, Python {sys.version.split()[0]}"),
    ]
    if torch.cuda.is_available():
        rows.append(("GPU", torch.cuda.get_device_name()))
    return [*rows, ("packages", ", ".join(_versions(("torch", "transformers", "headstart"))))]


def _versions(names: Iterable[str]) -> Iterable[str]:
    for name in names:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:  # run from a checkout
            continue


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model n")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or "unknown processor"


def depths_of(rounds: Iterable[Sequence[int]]) -> list[int]:
    """The depth of each new token; 0 for the first, which the prefill gives, and the target's own.

    Args:
        rounds: of each round, the tokens it emitted, and the nodes of its accepted path, the root
            counted: a path of n nodes is n - 1 drafted tokens, then one of the target's own.

    >>> depths_of([(3, 3), (1, 1)])
    [0, 1, 2, 0, 0]
    """
    found = [0]
    for count, nodes in rounds:
        found += [step if step < nodes else 0 for step in range(1, count + 1)]
    return found


def sample(
    title: str,
    tokenizer: Any,
    ids: Sequence[int],
    rounds: Iterable[Sequence[int]],
    prompt: Sequence[int] = (),
) -> Sample:
    """New tokens as a text with the depth of each piece; whole characters alone are pieces.

    Args:
        prompt: the last tokens before them, of which the last line is shown.
    """
    reader = PieceReader(tokenizer, prompt)
    pieces = [*reader.add(ids, depths_of(rounds)), *reader.end()]
    before = tokenizer.decode(list(prompt)).rpartition("\n")[2] if prompt else ""
    return Sample(title, [(piece.text, piece.depth) for piece in pieces], before)
