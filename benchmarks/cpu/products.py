"""A model's linear layers alone, in turn: torch's own, packed for oneDNN, and by our kernels.

All layers of a shape follow each other, so that their weights come from memory as in decoding. Each
way is also timed with the weights in pages of 2 MB, and the kernels with layers that read the same
states as one product.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.core import AmxLinear, PackedLinear, amx, use_huge_pages
from headstart.infer.measure.timing import interleaved, medians

from .shapes import SHAPES, random_llama

_Way = tuple[int, Callable[[Tensor], Any]]  # numbers that a layer reads, and its call
_ROWS = (1, 2, 4, 8, 16, 32, 64)
_TOGETHER = {("q_proj", "k_proj", "v_proj"): False, ("gate_proj", "up_proj"): True}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shape", default="160m", choices=SHAPES)
    add("--rows", type=int, action="append", help=f"(default: {_ROWS})")
    add("--repeats", type=int, default=5)


def run(options: argparse.Namespace) -> None:
    found = measure(options)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(
        f"{found['shape']}, bfloat16, {found['threads']} threads, {found['MB']:.0f} MB of weights"
    )
    for way, times in found["ms"].items():
        cells = "  ".join(f"{rows}: {ms:6.2f}" for rows, ms in times.items())
        print(f"  {way:32} ms by rows  {cells}")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    model = random_llama(options.shape, torch.bfloat16).requires_grad_(False)
    own = [part for part in model.modules() if isinstance(part, nn.Linear)]
    kinds: dict[str, Callable[[nn.Linear], nn.Module]] = {
        "torch": lambda layer: layer, "packed for oneDNN": PackedLinear,
    }  # fmt: skip
    if fits := all(map(amx.fits_amx, own)):
        kinds["kernels"] = AmxLinear
    ways: dict[str, list[_Way]] = {
        name: [(layer.in_features, kind(layer)) for layer in own] for name, kind in kinds.items()
    }
    if fits:
        ways["kernels, layers together"] = list(_together(model))
    times: dict[str, dict[int, float]] = {}
    for pages in ("", ", pages of 2 MB"):
        if pages:
            use_huge_pages(layer.weight for layer in own)
        calls = {}
        for rows in options.rows or _ROWS:
            calls |= {(way, rows): _call(made, rows) for way, made in ways.items()}
        found = medians(interleaved(calls, torch.device("cpu"), options.repeats, 1))
        for (way, rows), ms in found.items():
            times.setdefault(way + pages, {})[rows] = ms
    size = sum(layer.weight.nbytes for layer in own)
    threads = torch.get_num_threads()
    return {"shape": options.shape, "threads": threads, "MB": size / 1e6, "ms": times}


def _together(model: nn.Module) -> Iterator[_Way]:
    """Every layer, those that read the same states as one call."""
    for part in model.modules():
        alone = {name: each for name, each in part.named_children() if isinstance(each, nn.Linear)}
        for group, gated in _TOGETHER.items():
            if not alone.keys() >= set(group):
                continue
            layers = [AmxLinear(alone.pop(name)) for name in group]
            call = partial(amx.gated, *layers) if gated else partial(amx.products, layers)
            yield layers[0].in_features, call
        yield from ((layer.in_features, AmxLinear(layer)) for layer in alone.values())


def _call(way: list[_Way], rows: int) -> Callable[[], None]:
    states = {size: torch.randn(1, rows, size).bfloat16() for size, _ in way}

    @torch.no_grad()
    def call() -> None:
        for size, layer in way:
            layer(states[size])

    return call
