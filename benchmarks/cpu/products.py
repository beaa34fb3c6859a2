"""A model's linear layers alone, in turn: torch's own, packed for oneDNN, and by our kernels.

All layers of a shape follow each other, so that their weights come from memory as in decoding. Each
way is also timed with the weights in pages of 2 MB. The kernels are those of each instruction set
that this processor has, also with layers that read the same states as one product.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.core import CpuLinear, PackedLinear, cpu_kernels, use_huge_pages
from headstart.heads.core.cpu_compile import instruction_set, instruction_sets, kernels
from headstart.heads.core.packing import onednn_packs
from headstart.infer.measure.timing import interleaved, medians

from .shapes import SHAPES, random_llama

_Way = tuple[int, Callable[[Tensor], Any]]  # numbers that a layer reads, and its call
_ROWS = (1, 2, 4, 8, 16, 32, 64)
_TOGETHER = {("q_proj", "k_proj", "v_proj"): False, ("gate_proj", "up_proj"): True}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shape", default="160m", choices=SHAPES)
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    add("--rows", type=int, action="append", help=f"(default: {_ROWS})")
    add("--repeats", type=int, default=5)


def run(options: argparse.Namespace) -> None:
    found = measure(options)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{found['shape']}, {options.dtype}, {found['threads']} threads, {found['MB']:.0f} MB")
    for way, times in found["ms"].items():
        cells = "  ".join(f"{rows}: {ms:6.2f}" for rows, ms in times.items())
        print(f"  {way:32} ms by rows  {cells}")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    dtype = getattr(torch, options.dtype)
    model = random_llama(options.shape, dtype).requires_grad_(False)
    own = [part for part in model.modules() if isinstance(part, nn.Linear)]
    ways = {"torch": _layers(own)}
    if onednn_packs(dtype):
        ways["packed for oneDNN"] = _layers(map(PackedLinear, own))
    for name in instruction_sets(dtype):
        with instruction_set(name):
            if kernels(dtype) is not None:
                ways[name] = [
                    (size, _by(name, call)) for size, call in _layers(map(CpuLinear, own))
                ]
                ways[f"{name}, layers together"] = [
                    (size, _by(name, call)) for size, call in _together(model)
                ]
    times: dict[str, dict[int, float]] = {}
    for pages in ("", ", pages of 2 MB"):
        if pages:
            use_huge_pages(layer.weight for layer in own)
        calls = {}
        for rows in options.rows or _ROWS:
            calls |= {(way, rows): _call(made, rows, dtype) for way, made in ways.items()}
        found = medians(interleaved(calls, torch.device("cpu"), options.repeats, 1))
        for (way, rows), ms in found.items():
            times.setdefault(way + pages, {})[rows] = ms
    size = sum(layer.weight.nbytes for layer in own)
    threads = torch.get_num_threads()
    return {"shape": options.shape, "threads": threads, "MB": size / 1e6, "ms": times}


def _layers(layers: Iterable[nn.Linear]) -> list[_Way]:
    return [(layer.in_features, layer) for layer in layers]


def _by(name: str, call: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """A call that runs by the kernels of an instruction set."""

    def run(states: Tensor) -> Any:
        with instruction_set(name):
            return call(states)

    return run


def _together(model: nn.Module) -> Iterator[_Way]:
    """Every layer, those that read the same states as one call."""
    for part in model.modules():
        alone = {name: each for name, each in part.named_children() if isinstance(each, nn.Linear)}
        for group, gated in _TOGETHER.items():
            if not alone.keys() >= set(group):
                continue
            layers = [CpuLinear(alone.pop(name)) for name in group]
            call = (
                partial(cpu_kernels.gated, *layers)
                if gated
                else partial(cpu_kernels.products, layers)
            )
            yield layers[0].in_features, call
        yield from ((layer.in_features, CpuLinear(layer)) for layer in alone.values())


def _call(way: list[_Way], rows: int, dtype: torch.dtype) -> Callable[[], None]:
    states = {size: torch.randn(1, rows, size).to(dtype) for size, _ in way}

    @torch.no_grad()
    def call() -> None:
        for size, layer in way:
            layer(states[size])

    return call
