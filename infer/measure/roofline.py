"""The least time that a round can take: one read of the weights and of the live cache.

Decoding few rows does so little with each weight that memory is the limit. What a round must read,
divided by how fast this machine reads, bounds its time from below.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headstart.heads.core import OnlyPacked, output_layer, use_huge_pages

from ..speculator import Speculator
from .timing import Call, interleaved, medians

_TURNS = 5


class Roofline(NamedTuple):
    """How a round's time compares with one read of what it needs."""

    weights: int  # bytes
    cache: int  # bytes
    bytes_per_s: float  # that this machine reads

    @property
    def ms(self) -> float:
        """The least milliseconds of a round."""
        return 1e3 * (self.weights + self.cache) / self.bytes_per_s

    def share(self, ms: float) -> float:
        """The share of the limit that a round of so many milliseconds reaches, 1 at most."""
        return self.ms / ms


def weight_bytes(module: nn.Module) -> dict[int, int]:
    """Bytes of each weight of a module, those that are held packed alone included, by its id."""
    found = {id(each): each.nbytes for each in module.parameters()}
    packed = (part for part in module.modules() if isinstance(part, OnlyPacked))
    return found | {id(part): part.nbytes for part in packed}


def round_bytes(model: PreTrainedModel, rows: int) -> int:
    """Bytes of weights that a forward over so many rows must read.

    All weights once, but of the embedding, where it is not the output layer too, a line a row.
    """
    table: Tensor = cast(nn.Embedding, model.get_input_embeddings()).weight
    weights, output = weight_bytes(model), output_layer(model)
    if isinstance(output, OnlyPacked) or output.weight is not table:
        weights[id(table)] = rows * table[0].nbytes
    return sum(weights.values())


def reading_kernels(device: torch.device, megabytes: int = 1024) -> tuple[int, dict[str, Call]]:
    """Several ways to read a device's memory once, and how many bytes each of them reads.

    Args:
        megabytes: MiB of them: much more than a processor caches.
    """
    whole = torch.ones(megabytes << 18, dtype=torch.float32, device=device)
    if device.type == "cpu":
        use_huge_pages([whole])
    half = whole.view(torch.bfloat16)
    line = half[: 1 << 13]
    table = half.view(-1, line.numel())

    def parts(of: Tensor) -> Tensor:
        return torch.stack([part.sum() for part in of.split(1 << 22)])

    return whole.nbytes, {
        "sum": whole.sum,
        "largest": whole.amax,
        "sum of integers": whole.view(torch.int32).sum,
        "dot": lambda: torch.dot(whole, whole),  # reads its argument twice, from memory once
        "product": lambda: table @ line,
        "sums of parts": lambda: parts(whole),
    }


def read_bandwidth(device: torch.device, megabytes: int = 1024) -> float:
    """Bytes a second at which a device reads its memory: the fastest kernel's, a median.

    Decoding is measured by medians too. Where others use the memory as well, the fastest reading of
    all is of a moment that no round is as lucky to meet.
    """
    size, kernels = reading_kernels(device, megabytes)
    taken = medians(interleaved(kernels, device, _TURNS, 1))
    return size / (min(taken.values()) * 1e-3)


def against_the_limit(
    speculator: Speculator, report: dict[str, Any], length: int, bytes_per_s: float
) -> dict[str, Any]:
    """What a way's rounds must read, the least time for that, and where the rest of it goes.

    Args:
        report: of `way_report`.
        length: cached tokens of a row, in the middle of its text.
        bytes_per_s: see `read_bandwidth`.

    Returns:
        `read_gb_per_s`; `weights_mb` and `cache_mb` of the target, `drafter_mb` read once a round;
        `limit_ms` for all of it, and `share`, that of a round; `plain_limit_ms` and `plain_share`
        without the drafter; and `parts_ms`: target, drafter and loop, where they were measured.
    """
    target, batch = speculator.target, report["batch_size"]
    tree = speculator.tree_of(batch, report["temperature"])
    weights = round_bytes(target.model, batch * tree.nodes)
    cache = target.cache.bytes_of(batch, length)
    drafters = speculator.drafters.drafters if tree.nodes > 1 else []
    own = {k: v for each in drafters for k, v in weight_bytes(each).items()}
    drafter = sum(own.values())
    plain = Roofline(round_bytes(target.model, batch), cache, bytes_per_s)
    limit = Roofline(weights + drafter, cache, bytes_per_s)
    parts = report["round_parts_ms"]
    names = {"target": "verify", "drafter": "draft", "loop": "loop"}
    return {
        "read_gb_per_s": bytes_per_s / 1e9,
        "weights_mb": weights / 1e6,
        "cache_mb": cache / 1e6,
        "drafter_mb": drafter / 1e6,
        "limit_ms": limit.ms,
        "share": limit.share(report["ms_per_round"]),
        "plain_limit_ms": plain.ms,
        "plain_share": plain.share(report["plain_ms_per_token"] * batch),
        "parts_ms": {name: parts[key] for name, key in names.items() if key in parts},
    }


def said_of_limit(report: dict[str, Any]) -> str:
    """The same as a sentence or two."""
    found, ms = report["roofline"], report["ms_per_round"]
    reads = f"{found['weights_mb']:.0f} MB of weights, {found['cache_mb']:.1f} MB of cache"
    if found["drafter_mb"]:
        reads += f" and {found['drafter_mb']:.0f} MB of the drafter's weights"
    parts = ", ".join(f"{name} {part:.2f} ms" for name, part in found["parts_ms"].items())
    return (
        f"{report['way']}, {report['threads']} threads: this machine reads "
        f"{found['read_gb_per_s']:.1f} GB a second. A round must read {reads}, which takes "
        f"{found['limit_ms']:.2f} ms; it takes {ms:.2f} ms, so it reaches {found['share']:.0%} of "
        f"the limit{f' ({parts})' if parts else ''}. Plain decoding reaches "
        f"{found['plain_share']:.0%}."
    )
