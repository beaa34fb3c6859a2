"""How fast layers on disk come into host memory: read as for a GPU, or fetched by accelerate.

    python -m benchmarks.streamed FOLDER [--shape 1b] [--layers 16] [--turns 5]

A model of a known shape with random weights is saved to FOLDER and loaded from there, all of its
layers on disk. Each layer is read into one block of memory, as `Prefetch` does in its thread, or
its weights are copied there one by one from accelerate's map, which is what a copy to a GPU reads.
Both in turns, with the file in the page cache and with the cache told to forget it before each turn
(Linux; what other caches a disk has is not touched). No GPU is needed, and nothing is computed.
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

import torch
from accelerate.utils import has_offloaded_params
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from headstart.heads.core import decoder_layers
from headstart.heads.core.prefetch import streamed_layer

from .gpu.shapes import SHAPES, random_target


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
    return model


def forget(folder: Path) -> None:
    """Have the page cache forget a folder's weights."""
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(layers: list[nn.Module], memory: Tensor) -> int:
    """Bring each layer into memory as `Prefetch` does; the bytes of all."""
    found = [layer for each in layers if (layer := streamed_layer(each)) is not None]
    for layer in found:
        layer.read(memory)
    return sum(layer.size for layer in found)


@torch.no_grad()
def fetch(layers: list[nn.Module], memory: Tensor) -> int:
    """Bring each layer into memory by accelerate's map; the bytes of all."""
    size = 0
    for layer in layers:
        at = 0
        for module in filter(has_offloaded_params, layer.modules()):
            hook: Any = module._hf_hook
            for name, _ in module.named_parameters(recurse=False):
                weight = hook.weights_map[name]
                to = memory[at : at + weight.nbytes].view(weight.dtype).view(weight.shape)
                to.copy_(weight)
                at += weight.nbytes
        size += at
    return size


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.streamed", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=list(SHAPES), default="1b")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    chosen = parser.parse_args(arguments)
    layers = list(decoder_layers(load(chosen.folder, chosen.shape, chosen.layers)))
    memory = torch.zeros(1 << 30, dtype=torch.uint8)
    print("| cache | by accelerate, GB/s | read, GB/s |\n|---|---|---|")
    for cold in (False, True):
        speeds: dict[Any, list[float]] = {fetch: [], read: []}
        for turn in range(chosen.turns + 1):
            for way, found in speeds.items():
                if cold:
                    forget(chosen.folder)
                begun = time.perf_counter()
                size = way(layers, memory)
                if turn:  # the first one fills the page cache
                    found.append(size / (time.perf_counter() - begun) / 1e9)
        shown = " | ".join(
            f"{statistics.median(each):.2f} ({min(each):.2f}–{max(each):.2f})"
            for each in speeds.values()
        )
        print(f"| {'cold' if cold else 'warm'} | {shown} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
