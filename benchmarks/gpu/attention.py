"""What tree attention costs on a device, beside the other ways to attend to a tree.

    python -m benchmarks.gpu.attention [--device cuda] [--json FILE] [--tune]

One layer's attention, whose keys and values are not in the GPU's cache, as when a model's weights
have passed between two of its layers. What a round prepares once for all layers (masks, packed
trees) is not counted. On CUDA each way is captured as a graph where it can be, so that the host's
time to launch it is not counted either; medians over interleaved repeats.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from headstart.infer.capture import Capture, Captured, capture_on
from headstart.infer.measure.timing import Stopwatch, medians, take_turns

from .attention_ways import WAYS, Layer, Run, Shape, plain, tiles
from .bandwidth import copy_bandwidth

NODES = (1, 16, 32, 64, 128)
CONTEXTS = (512, 2048, 8192, 32768)
GROUPS = (1, 4, 8)
_FLUSH = 256 << 20  # bytes, more than any GPU's L2 cache
_COPIED = {"cuda": 1024, "cpu": 64}  # MiB


@dataclass
class Measured:
    """One way at one shape.

    Attributes:
        milliseconds: the median, None where the way cannot run; `reason` then says why.
        fraction: the floor's bytes in that time, of the device's bandwidth.
        difference: the largest from the plain form.
        captured: whether a CUDA graph was timed.
    """

    shape: Shape
    way: str
    milliseconds: float | None = None
    fraction: float | None = None
    difference: float | None = None
    captured: bool = False
    reason: str | None = None


@torch.no_grad()
def measure(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    bandwidth: float,
    ways: dict[str, Callable[[Layer], Run]] | None = None,
    repeats: int = 30,
) -> list[Measured]:
    """Time each way at one shape.

    Args:
        bandwidth: bytes a second, see `measured_bandwidth`.
    """
    layer, capture = Layer.draw(shape, dtype, device), capture_on(device)
    expected = plain(layer)().float()
    found, ready = [], {}
    for name, way in (WAYS if ways is None else ways).items():
        one = Measured(shape, name)
        found.append(one)
        try:
            run = way(layer)
            for _ in range(2):
                run()  # compiles
            out = run()
            one.difference = (out.float() - expected).abs().max().item()
            captured = None if capture is None else _captured(capture, run)
        except Exception as error:  # compilers and kernels raise what they like
            one.reason = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            continue
        one.captured = captured is not None
        ready[name] = (one, captured or run)
    flush = torch.empty(_FLUSH if device.type == "cuda" else 0, dtype=torch.uint8, device=device)
    watch = Stopwatch(device)

    def timed(run: Callable[[], Any]) -> float:
        flush.zero_()
        return watch.time(run)

    runs = {name: lambda _, run=run: timed(run) for name, (_, run) in ready.items()}
    for name, milliseconds in medians(take_turns(runs, range(repeats))).items():
        one = ready[name][0]
        one.milliseconds = milliseconds
        one.fraction = layer.floor / (milliseconds / 1e3) / bandwidth
    return found


def _captured(capture: Capture, run: Run) -> Callable[[], Any] | None:
    """The way as a graph, with all that it reads; None where it cannot be one."""
    try:
        return Captured.by(capture, run)
    except RuntimeError:
        return None


def measured_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of copies on the device."""
    return 1e9 * copy_bandwidth(device, [_COPIED[device.type]], 10)["gb_per_s"]


def table(measured: Sequence[Measured]) -> str:
    """Lines to read: a shape, and each way's time and share of the bandwidth."""
    lines = []
    for shape, group in itertools.groupby(measured, key=lambda one: one.shape):
        lines.append(", ".join(f"{f.name} {getattr(shape, f.name)}" for f in fields(shape)))
        for one in group:
            if one.milliseconds is None or one.fraction is None:
                lines.append(f"  {one.way:14} -  {one.reason}")
                continue
            lines.append(
                f"  {one.way:14} {one.milliseconds:9.4f} ms  {one.fraction:6.1%} of the bandwidth"
                f"  off by {one.difference:.1e}{'' if one.captured else '  (not captured)'}"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "float16", "bfloat16"])
    for name, default in (("nodes", NODES), ("contexts", CONTEXTS), ("groups", GROUPS)):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=default)
    for name, default in (("rows", 1), ("heads", 8), ("size", 128), ("repeats", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path, help="write the document there")
    parser.add_argument("--tune", action="store_true", help="time other cuts of the kernel too")
    chosen = parser.parse_args(arguments)
    device, dtype = torch.device(chosen.device), getattr(torch, chosen.dtype)
    bandwidth = measured_bandwidth(device)
    ways = {**WAYS, **tiles()} if chosen.tune else WAYS
    document: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "dtype": chosen.dtype,
        "bandwidth": bandwidth,
        "measured": [],
    }
    print(f"{document['device']}: copies move {bandwidth / 1e9:.0f} GB/s", flush=True)
    for groups, context, nodes in itertools.product(chosen.groups, chosen.contexts, chosen.nodes):
        shape = Shape(chosen.rows, chosen.heads, groups, chosen.size, nodes, context)
        measured = measure(shape, dtype, device, bandwidth, ways, chosen.repeats)
        print(table(measured), flush=True)
        document["measured"] += [asdict(one) for one in measured]
        if chosen.json:  # after every shape, so that what was measured outlives a fault
            chosen.json.write_text(json.dumps(document, indent=1) + "\n")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
