"""How long the products of a layer take for few rows, by the kernels and by torch.

    python -m benchmarks.gpu.products [--rows 1 16 64] [--cuts]

Layers of Llama-3-8B's shape in bfloat16, with weights that are not in the GPU's cache. Each time is
the least of a few replays of a CUDA graph, over its launches. With `--cuts`, ways to cut the work
are timed for each kind of product, up to 16 rows and up to 64; the fastest are printed as
`product_kernels` would have them. That takes some minutes, most of them to compile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import linear

from headstart.cli import exit_status
from headstart.infer.capture import CudaCapture
from headstart.terminal import UsageError

_COPIES = 512 << 20  # bytes of weights that take turns, more than any GPU's cache
_REPLAYS, _LAUNCHES = 3, 4
_FASTEST = 5  # cuts printed
_SHARED = 227 << 10  # bytes that a program may have on Hopper
_IN_FLIGHT = 32 << 10  # bytes that a program reads ahead, at least
_UP_TO = (16, 64)  # rows that a cut is for


@dataclass(frozen=True)
class Product:
    """Layers that read the same states: of what kind of `product_kernels`, how many, and sizes."""

    name: str
    kind: str
    sizes: tuple[int, ...]
    width: int

    def weights(self, device: torch.device) -> list[list[Tensor]]:
        """Copies that take turns."""
        one = 2 * sum(self.sizes) * self.width
        made = range(-(-_COPIES // one))
        return [[self._weight(size, device) for size in self.sizes] for _ in made]

    def _weight(self, size: int, device: torch.device) -> Tensor:
        return torch.randn(size, self.width, device=device, dtype=torch.bfloat16) / self.width**0.5

    def ours(self, states: Tensor, weights: list[Tensor]) -> Any:
        """What the kernel makes of states [rows, width]."""
        from headstart.heads.core import product_kernels as kernels

        calls: dict[str, Callable[..., Any]] = {
            "three": kernels.three_layers, "gated": kernels.gated_layers,
        }  # fmt: skip
        return calls.get(self.kind, kernels.one_layer)(states, weights, [])


PRODUCTS = (
    Product("queries, keys and values", "three", (4096, 1024, 1024), 4096),
    Product("gated product", "gated", (14_336, 14_336), 4096),
    Product("after it", "one", (4096,), 14_336),
    Product("after attention", "one", (4096,), 4096),
    Product("output layer", "output", (128_256,), 4096),
)


def cuts(kind: str, rows: int) -> Iterator[Any]:
    """Ways to cut a kind of product of up to so many rows, as `product_kernels` has them."""
    from headstart.heads.core.product_kernels import _Cut

    for columns, depth, stages, warps, across in product(
        (16, 32, 64, 128), (64, 128, 256, 512), range(2, 7), (2, 4, 8), (False, True)
    ):
        staged, tile = 2 * (columns + rows) * depth, columns * rows
        if staged * stages > _SHARED or staged * (stages - 1) < _IN_FLIGHT:
            continue
        if tile // warps not in range(128, 2049) or (kind in ("one", "three") and columns > 64):
            continue
        yield _Cut(columns, depth, stages, warps, across)


def microseconds(call: Callable[[list[Tensor]], Any], weights: list[list[Tensor]]) -> float:
    """Of a call, by a graph in which the weights take turns."""
    launches = max(_LAUNCHES, len(weights))

    def work() -> None:
        for number in range(launches):
            call(weights[number % len(weights)])

    work()
    replay, times = CudaCapture(weights[0][0].device)(work), []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / launches)
    return min(times)


def fastest(own: Sequence[Product], rows: int, device: torch.device) -> list[tuple[float, Any]]:
    """The fastest cuts of one kind, by the sum over its products, with that sum.

    Cuts that do not compile are left out.
    """
    from headstart.heads.core import product_kernels as kernels

    data, found = [(each, each.weights(device)) for each in own], []
    table = kernels._CUTS[own[0].kind]
    for cut in cuts(own[0].kind, rows):
        total = 0.0
        with mock.patch.dict(kernels._CUTS, {own[0].kind: {**table, rows: cut}}):
            try:
                for each, weights in data:
                    states = torch.randn(rows, each.width, device=device).bfloat16()
                    total += microseconds(lambda w, x=states, e=each: e.ours(x, w), weights)
            except Exception as error:  # compilers raise what they like
                print(f"{cut}: {type(error).__name__}", file=sys.stderr)
                continue
        found.append((total, cut))
    return sorted(found, key=lambda each: each[0])[:_FASTEST]


@torch.no_grad()
def _run(chosen: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise UsageError("no GPU was found; its products are what is timed.")
    device = torch.device("cuda", torch.cuda.current_device())
    for each in PRODUCTS:
        weights = each.weights(device)
        for rows in chosen.rows:
            states = torch.randn(rows, each.width, device=device).bfloat16()
            ours = microseconds(lambda w, x=states, e=each: e.ours(x, w), weights)
            theirs = microseconds(lambda w, x=states: [linear(x, part) for part in w], weights)
            print(f"{each.name}, {rows} rows: {ours:.1f} µs, torch {theirs:.1f} µs", flush=True)
        del weights
    for kind, rows in product(dict.fromkeys(e.kind for e in PRODUCTS), _UP_TO):
        if chosen.cuts:
            found = fastest([e for e in PRODUCTS if e.kind == kind], rows, device)
            for total, cut in found:
                print(f"{kind}, up to {rows} rows: {total:.1f} µs with {cut}", flush=True)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Time, and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.products", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--cuts", action="store_true", help="time ways to cut the work, too")
    return exit_status("benchmarks.gpu.products", lambda: _run(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
