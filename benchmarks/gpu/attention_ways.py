"""Ways to attend to a tree of tokens behind a prefix: one layer's attention, in each of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headstart.heads.core import ancestor_mask, in_steps, tree_mask
from headstart.heads.core.tree_attention import plain_attention
from headstart.heads.core.tree_lines import pack_tree
from headstart.heads.core.triton_here import no_kernel

Run = Callable[[], Tensor]


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
        torch.compiler.reset()  # after eight shapes it would no longer compile, but run it slowly
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
    from headstart.heads.core.kernels import split_attention

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
    from headstart.heads.core.kernels import Tile

    def cut(tile: Tile, splits: int) -> Callable[[Layer], Run]:
        return lambda layer: kernel(layer, tile=tile, splits=splits)

    sizes = itertools.product((16, 32, 64, 128), (32, 64, 128), (4, 8), (2, 3), (2, 4, 8, 16, 32))
    return {
        f"kernel {rows}×{slots}, {warps} warps, {stages} stages, {splits} splits": cut(
            Tile(rows, slots, warps, stages), splits
        )
        for rows, slots, warps, stages, splits in sizes
    }
