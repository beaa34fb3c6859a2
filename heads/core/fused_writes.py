"""The rotary embedding together with the write of keys and values that follows it: one launch.

A model of transformers computes queries, keys and values, turns the first two, and hands the last
two to the cache. When they are turned it is known which layer's values were computed last and where
the cache will put them, so the kernel that turns them may write them there too. The cache then
writes nothing, if it is given those very tensors for that very layer, and else what it is given,
over them. A layer does so from its second forward on, once the first has shown that it hands on
what it has computed: until then nothing is written beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .fused_products import has_kernels


def kernels_for(tensor: Tensor) -> Any:
    """The kernels for a tensor; None where torch's own operators are used."""
    if not has_kernels(tensor):
        return None
    from . import fused_kernels

    return fused_kernels


@torch.library.custom_op("headstart::rotate", mutates_args=())
def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The rotary embedding of query [B, Hq, N, D] and key [B, H, N, D] by cos and sin [B, N, D]."""
    if (kernels := kernels_for(query)) is not None:
        return kernels.rotate(query, key, cos, sin)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(states: Tensor) -> Tensor:
        first, second = states.chunk(2, -1)
        return states * cos + torch.cat((-second, first), -1) * sin

    return turned(query), turned(key)


@torch.library.custom_op("headstart::write", mutates_args=("keys", "values"))
def write(keys: Tensor, values: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Write key and value [B, H, N, D] to rows `slots` [B * N] of keys and values [B * S, H, D]."""
    if (kernels := kernels_for(key)) is not None:
        kernels.write(keys, values, slots, key, value)
        return
    keys.index_copy_(0, slots, key.transpose(1, 2).flatten(0, 1))
    values.index_copy_(0, slots, value.transpose(1, 2).flatten(0, 1))


@torch.library.custom_op("headstart::rotate_and_write", mutates_args=("keys", "values"))
def rotate_and_write(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    value: Tensor,
) -> tuple[Tensor, Tensor]:
    """What `rotate` gives, of which the key is written as by `write`, with the value."""
    if (kernels := kernels_for(query)) is not None:
        return kernels.rotate(query, key, cos, sin, (keys, values, slots, value))
    found = rotate(query, key, cos, sin)
    write(keys, values, slots, found[1], value)
    return found


@dataclass(slots=True)
class AttentionLayer:
    """One layer of attention: its number, and whether it is known to hand on what it computed."""

    number: int | None
    hands_on: bool = False


class Writes:
    """What one forward of a thread is about to write, from its rotary embedding to its cache."""

    def __init__(self) -> None:
        self.cache: Any = None  # whose slots were set
        self._values: tuple[AttentionLayer, Tensor] | None = None  # computed last, [B, N, H * D]
        self._expected: tuple[AttentionLayer, list[Tensor], list[int], bool] | None = None

    def computed(self, layer: AttentionLayer, values: Tensor) -> None:
        """Note what a layer's projection made, whose rotary embedding comes next."""
        self._values, self._expected = (layer, values), None

    def turn(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        """`rotate`, and the write that follows it where that is known; None where nothing is."""
        found, self._values = self._values, None
        if found is None or self.cache is None or found[0].number is None:
            return None
        layer, values = found
        place = self.cache.place_of(layer.number, key, values)
        if place is None:
            return None
        value = values.unflatten(-1, place[1].shape[1:]).transpose(1, 2)  # [B, H, N, D]
        if early := layer.hands_on:
            turned = rotate_and_write(query, key, cos, sin, *place, value)
        else:
            turned = rotate(query, key, cos, sin)
        given = [turned[1], value]
        self._expected = layer, given, [each._version for each in given], early
        return turned

    def are_done(self, number: int, *given: Tensor) -> bool:
        """Whether the key and value that a layer gives its cache are written there."""
        found, self._expected = self._expected, None
        if found is None:
            return False
        layer, expected, versions, early = found
        same = layer.number == number and all(
            one.data_ptr() == other.data_ptr()
            and one.shape == other.shape
            and one.stride() == other.stride()
            and one._version == version
            for one, other, version in zip(given, expected, versions, strict=True)
        )
        layer.hands_on = same
        return same and early
