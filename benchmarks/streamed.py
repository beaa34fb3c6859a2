"""Forwards of a target whose decoder layers are on disk: read ahead, or fetched by accelerate.

    python -m benchmarks.streamed FOLDER [--shape 1b] [--layers 16] [--nodes 1 64] [--turns 5]

A model of a known shape with random weights is saved to FOLDER and loaded from there, all of its
layers on disk; embedding and output layer stay, as where a drafter borrows them. Forwards over
trees run one after another, both ways in turns, with the files in the page cache and with the
cache told to forget them before each forward (Linux; what other caches a disk has is not touched).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM

from headstart.heads import TokenTree
from headstart.heads.core import Prefetch, keep_resident
from headstart.infer.target import Target
from headstart.infer.trees.static import StaticTree

from .gpu.shapes import SHAPES, random_target

_CONTEXT = 64


def load(folder: Path, shape: str, layers: int) -> Any:
    """The model, from a checkpoint that is made where there is none."""
    if not (folder / "config.json").is_file():
        made = random_target(
            replace(SHAPES[shape], layers=layers, vocab=4096), torch.device("cpu"), torch.bfloat16
        )
        made.save_pretrained(folder)
        for path in folder.glob("*.safetensors"):  # what is not written yet cannot be forgotten
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
    places = dict.fromkeys((f"model.layers.{n}" for n in range(layers)), "disk")
    ends = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu")
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map={**places, **ends}
    )
    keep_resident(model, [model.model.embed_tokens, model.lm_head])
    return model.eval()


def forget(folder: Path) -> None:
    """Have the page cache forget a folder's weights."""
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@torch.no_grad()
def seconds(model: Any, nodes: int, cold: Path | None, count: int) -> list[float]:
    """What each of so many forwards over a tree took, after one more."""
    target = Target(model, ())
    ids = torch.arange(_CONTEXT).view(1, -1)
    target.prefill(ids, [_CONTEXT], _CONTEXT + nodes)
    topology, row = StaticTree([[rank] for rank in range(nodes - 1)]).shape(1, ids.device)
    tree, lengths = TokenTree(ids[:, :1].expand(1, nodes), topology, None, row), ids[:, -1] + 1
    took = []
    for _ in range(count + 1):
        if cold is not None:
            forget(cold)
        begun = time.perf_counter()
        target.verify(tree, lengths, _CONTEXT)
        took.append(time.perf_counter() - begun)
    return took[1:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.streamed", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=list(SHAPES), default="1b")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--turns", type=int, default=3)
    chosen = parser.parse_args(arguments)
    model = load(chosen.folder, chosen.shape, chosen.layers)
    ahead = Prefetch.of(model)
    assert ahead is not None and ahead.on_disk == chosen.layers
    print(f"{chosen.layers} layers of {chosen.shape}, {ahead.size / 1e9:.2f} GB a forward\n")
    print(
        "| cache | nodes | accelerate, ms | read ahead, ms | × | GB/s |\n|---|---|---|---|---|---|"
    )
    fetched = mock.patch.object(Prefetch, "of", lambda model: None)
    for cold in (False, True):
        for nodes in chosen.nodes:
            times: tuple[list[float], list[float]] = [], []
            for _ in range(chosen.turns):
                where = chosen.folder if cold else None
                with fetched:
                    times[0].extend(seconds(model, nodes, where, 2))
                times[1].extend(seconds(model, nodes, where, 2))
            before, after = map(statistics.median, times)
            print(
                f"| {'cold' if cold else 'warm'} | {nodes} | {1e3 * before:.0f} | "
                f"{1e3 * after:.0f} | {before / after:.2f} | {ahead.size / after / 1e9:.2f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
