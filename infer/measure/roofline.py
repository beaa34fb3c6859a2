"""The least time that a round can take: one read of the weights and of the live cache.

Decoding few rows does so little with each weight that memory is the limit. What a round must read,
divided by how fast this machine reads, bounds its time from below.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headstart.heads import SlabCache
from headstart.heads.core import output_layer

from .timing import Call, interleaved

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


def round_bytes(model: PreTrainedModel, rows: int) -> int:
    """Bytes of weights that a forward over so many rows must read.

    All weights once, but of the embedding, where it is not the output layer too, a line a row.
    """
    table: Tensor = cast(nn.Embedding, model.get_input_embeddings()).weight
    seen: dict[int, Tensor] = {id(each): each for each in model.parameters() if each is not table}
    seen[id(output_layer(model).weight)] = output_layer(model).weight
    lines = 0 if id(table) in seen else rows * table[0].nbytes
    return lines + sum(each.nbytes for each in seen.values())


def cache_bytes(cache: SlabCache, length: int) -> int:
    """Bytes of keys and values that a forward after `length` tokens a row must read."""
    values = 0
    for shape in cache.shapes:
        per_token = shape.key[0] * shape.key[1] + shape.value[0] * shape.value[1]
        values += cache.batch * length * per_token * shape.dtype.itemsize
    return values


def read_bandwidth(device: torch.device, megabytes: int = 1024) -> float:
    """Bytes a second at which a device reads its memory, by the fastest of several kernels.

    Args:
        megabytes: MiB that each of them reads: much more than a processor caches.
    """
    whole = torch.ones(megabytes << 18, dtype=torch.float32, device=device)
    half = whole.view(torch.bfloat16)
    line = half[: 1 << 13]
    table = half.view(-1, line.numel())

    def parts(of: Tensor) -> Tensor:
        return torch.stack([part.sum() for part in of.split(1 << 22)])

    kernels: dict[str, Call] = {
        "sum": whole.sum,
        "largest": whole.amax,
        "sum of integers": whole.view(torch.int32).sum,
        "dot": lambda: torch.dot(whole, whole),
        "product": lambda: table @ line,
        "sums of parts": lambda: parts(whole),
    }
    # `dot` reads its argument twice, from memory once.
    taken = interleaved(kernels, device, _TURNS, 1)
    return whole.nbytes / (min(min(each) for each in taken.values()) * 1e-3)
