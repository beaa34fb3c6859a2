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
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headstart.heads.core import ancestor_mask, in_steps, tree_mask
from headstart.heads.core.tree_attention import pack_tree, plain_attention
from headstart.heads.core.triton_support import no_kernel

Run = Callable[[], Tensor]

NODES = (1, 16, 32, 64, 128)
CONTEXTS = (512, 2048, 8192, 32768)
GROUPS = (1, 4, 8)
_FLUSH = 256 << 20  # bytes, more than any GPU's L2 cache
_COPIED = 1 << 30


class Unavailable(Exception):
    """This way cannot run here; the message says why."""


@dataclass(frozen=True)
class Shape:
    """One layer: rows, heads of keys, queries that share one, head dimension, tree and prefix."""

    rows: int
    heads: int
    groups: int
    size: int
    nodes: int
    context: int


@dataclass
class Layer:
    """Its tensors: query [B, Hq, N, D]; key and value [B, Hkv, S, D], laid out as a slab does."""

    shape: Shape
    query: Tensor
    key: Tensor
    value: Tensor
    lengths: Tensor
    ancestors: Tensor
    packed: Tensor
    mask: Tensor

    @classmethod
    def draw(cls, shape: Shape, dtype: torch.dtype, device: torch.device) -> Layer:
        """Normal numbers, and a random tree."""
        slots = in_steps(shape.context + shape.nodes)

        def normal(tokens: int, heads: int) -> Tensor:
            drawn = torch.randn(shape.rows, tokens, heads, shape.size, dtype=dtype, device=device)
            return drawn.transpose(1, 2)

        lengths = torch.full((shape.rows,), shape.context, device=device)
        chance = torch.rand(shape.rows, shape.nodes, device=device)
        parents = (chance * torch.arange(shape.nodes, device=device)).long()
        parents[:, 0] = -1
        ancestors = ancestor_mask(parents)
        positions = lengths.unsqueeze(1) + ancestors.sum(-1) - 1
        return cls(
            shape,
            normal(shape.nodes, shape.heads * shape.groups),
            normal(slots, shape.heads),
            normal(slots, shape.heads),
            lengths,
            ancestors,
            pack_tree(lengths, positions, ancestors),
            tree_mask(lengths, positions, ancestors, slots, dtype),
        )

    @property
    def scaling(self) -> float:
        return self.shape.size**-0.5

    @property
    def floor(self) -> int:
        """Bytes that no way can spare: live keys and values, queries and output, once."""
        shape = self.shape
        live = 2 * shape.heads * (shape.context + shape.nodes)
        own = 2 * shape.heads * shape.groups * shape.nodes
        return shape.rows * (live + own) * shape.size * self.query.element_size()


def sdpa(layer: Layer) -> Run:
    """As transformers runs it: keys and values repeated, under an additive mask."""

    def run() -> Tensor:
        key, value = (t.repeat_interleave(layer.shape.groups, 1) for t in (layer.key, layer.value))
        out = scaled_dot_product_attention(layer.query, key, value, layer.mask)
        return out.transpose(1, 2)

    return run


def sdpa_grouped(layer: Layer) -> Run:
    """The same with torch's own handling of groups."""

    def run() -> Tensor:
        out = scaled_dot_product_attention(
            layer.query, layer.key, layer.value, layer.mask, enable_gqa=True
        )
        return out.transpose(1, 2)

    return run


def flex(layer: Layer) -> Run:
    """FlexAttention, compiled on CUDA, with a block mask made beforehand."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    shape, device = layer.shape, layer.query.device
    lengths, ancestors = layer.lengths, layer.ancestors

    def seen(row: Tensor, head: Tensor, node: Tensor, slot: Tensor) -> Tensor:
        other = slot - lengths[row]
        own = ancestors[row, node, other.clamp(0, shape.nodes - 1)]
        return (other < 0) | ((other < shape.nodes) & own)

    slots = layer.key.shape[2]
    mask = create_block_mask(seen, shape.rows, None, shape.nodes, slots, device=str(device))
    attend: Any = flex_attention
    options: dict[str, Any] = {}
    if device.type == "cuda":
        attend = torch.compile(flex_attention, dynamic=False)
        # Without it, groups that fill no power of two of rows are refused.
        options = {"kernel_options": {"BLOCK_M": 64, "BLOCK_N": 64}}

    def run() -> Tensor:
        out = attend(
            layer.query, layer.key, layer.value, block_mask=mask, enable_gqa=True, **options
        )
        return out.transpose(1, 2)

    return run


def varlen(layer: Layer) -> Run:
    """torch's varlen_attn over the prefix, the tree in plain operators, merged by log-sum-exp."""
    if find_spec("torch.nn.attention.varlen") is None or layer.query.device.type != "cuda":
        raise Unavailable("varlen_attn is of torch 2.13 and later, on CUDA")
    from torch.nn.attention import varlen as module

    shape, query = layer.shape, layer.query
    request: Any = getattr(module, "AuxRequest", None)
    if request is None:
        raise Unavailable("this torch's varlen_attn gives no log-sum-exp")
    device, slots = query.device, layer.key.shape[2]
    each_query = torch.arange(shape.rows + 1, dtype=torch.int32, device=device) * shape.nodes
    each_key = torch.arange(shape.rows + 1, dtype=torch.int32, device=device) * slots
    used = layer.lengths.int()
    flat = [t.transpose(1, 2).flatten(0, 1) for t in (query, layer.key, layer.value)]
    own = layer.lengths.view(-1, 1) + torch.arange(shape.nodes, device=device)  # [B, N]
    own = own[:, None, :, None].expand(-1, shape.heads, -1, shape.size)
    hidden = ~layer.ancestors.repeat(1, shape.groups, 1).unsqueeze(1)  # [B, 1, groups·N, N]
    attend: Any = module.varlen_attn

    def run() -> Tensor:
        prefix, total = attend(
            *flat,
            each_query,
            each_key,
            shape.nodes,
            slots,
            return_aux=request(lse=True),
            enable_gqa=True,
            seqused_k=used,
            scale=layer.scaling,
        )
        rows = query.reshape(shape.rows, shape.heads, -1, shape.size)
        scores = (rows @ layer.key.gather(2, own).transpose(2, 3)).float() * layer.scaling
        scores = scores.masked_fill(hidden, float("-inf"))
        share = scores.logsumexp(-1)  # [B, Hkv, groups·N]
        weights = (scores - share.unsqueeze(-1)).exp().to(query.dtype)
        tree = (weights @ layer.value.gather(2, own)).view_as(query).transpose(1, 2)
        share = share.view(shape.rows, -1, shape.nodes).transpose(1, 2)  # [B, N, Hq]
        weight = torch.sigmoid(share - total.view_as(share)).unsqueeze(-1)
        return torch.lerp(prefix.view_as(tree).float(), tree.float(), weight).to(query.dtype)

    return run


def plain(layer: Layer) -> Run:
    """The definition, in torch's own operators."""
    return lambda: plain_attention(layer.query, layer.key, layer.value, layer.packed, layer.scaling)


def kernel(layer: Layer, **options: Any) -> Run:
    """The Triton kernel."""
    reason = no_kernel(layer.query.device, layer.query.dtype, layer.shape.size)
    if reason is not None:
        raise Unavailable(reason)
    from headstart.heads.core.attention_kernel import split_attention

    tensors = layer.query, layer.key, layer.value, layer.packed
    return lambda: split_attention(*tensors, layer.scaling, **options)


WAYS: dict[str, Callable[[Layer], Run]] = {
    "sdpa": sdpa,
    "sdpa grouped": sdpa_grouped,
    "flex": flex,
    "varlen": varlen,
    "plain": plain,
    "kernel": kernel,
}


def tiles() -> dict[str, Callable[[Layer], Run]]:
    """The kernel cut in other ways, by name."""
    from headstart.heads.core.attention_kernel import Tile

    def cut(tile: Tile, splits: int) -> Callable[[Layer], Run]:
        return lambda layer: kernel(layer, tile=tile, splits=splits)

    sizes = itertools.product((16, 32, 64, 128), (32, 64, 128), (4, 8), (2, 3), (2, 4, 8, 16, 32))
    return {
        f"kernel {rows}×{slots}, {warps} warps, {stages} stages, {splits} splits": cut(
            Tile(rows, slots, warps, stages), splits
        )
        for rows, slots, warps, stages, splits in sizes
    }


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
    layer = Layer.draw(shape, dtype, device)
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
            captured = _capture(run) if device.type == "cuda" else None
        except Exception as error:  # compilers and kernels raise what they like
            one.reason = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            continue
        one.captured = captured is not None
        ready[name] = (one, captured or run, [])
    flush = torch.empty(_FLUSH if device.type == "cuda" else 0, dtype=torch.uint8, device=device)
    for _ in range(repeats):
        for _, run, times in ready.values():
            flush.zero_()
            times.append(_milliseconds(run, device))
    for one, _, times in ready.values():
        one.milliseconds = statistics.median(times)
        one.fraction = layer.floor / (one.milliseconds / 1e3) / bandwidth
    return found


def _capture(run: Run) -> Callable[[], Any] | None:
    """The way as a CUDA graph; None where it cannot be one."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay


def _milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def measured_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of copies on the device; the best of ten."""
    size = _COPIED if device.type == "cuda" else _COPIED // 16
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    best = min(_milliseconds(lambda: target.copy_(source), device) for _ in range(10))
    return 2 * size / (best / 1e3)


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
