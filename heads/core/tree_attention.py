"""Tree attention: the prefix without a mask, the tree with its ancestors, merged by log-sum-exp.

All nodes of a tree see the prefix, up to a length that device memory holds; only among themselves
do they need a mask. So in place of an additive mask over all slots, [B, 1, N, S], each node has its
line of `pack_tree`. Softmax over both parts is the softmax of each, weighted by its share of
exp(log-sum-exp) (Milakov and Gimelshein 2018, arXiv 1805.02867), so the parts can be computed
apart, and the prefix can be split further.
"""

import importlib.util
from functools import cache

import torch
from torch import Tensor

_KERNEL_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_KERNEL_SIZE = 256


def pack_tree(
    lengths: Tensor, positions: Tensor, ancestors: Tensor, window: int | None = None
) -> Tensor:
    """What each node sees, in the place of an additive mask; arguments as for `tree_mask`.

    Returns:
        [B, 1, G, 2 + G] int32: the first slot of the prefix that the node sees, the prefix's end,
        and 1 for each node that it sees.

    >>> ancestors = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]).bool()
    >>> pack_tree(torch.tensor([3]), torch.tensor([[3, 4, 4]]), ancestors, window=3)[0, 0].tolist()
    [[1, 3, 1, 0, 0], [2, 3, 1, 1, 0], [2, 3, 1, 0, 1]]
    """
    end = lengths.unsqueeze(1).expand_as(positions)
    first = torch.zeros_like(positions)
    if window is not None:
        oldest = positions - (window - 1)  # [B, G]
        first = oldest.clamp(min=0)
        ancestors = ancestors & (positions.unsqueeze(1) >= oldest.unsqueeze(-1))
    packed = torch.cat([torch.stack([first, end], -1), ancestors], -1)  # [B, G, 2 + G]
    return packed.int().unsqueeze(1)


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: Tensor,
    scaling: float,
    softcap: float | None = None,
) -> Tensor:
    """Attention of tree nodes to the cached prefix and to their ancestors.

    The kernel where there is one, `plain_attention` elsewhere. Grouped queries share their keys and
    values, which are never repeated.

    Args:
        query: [B, Hq, N, D], the last N of G nodes.
        key: [B, Hkv, S, D], slots of the cache, of which the tree takes G after the prefix; value:
            [B, Hkv, S, Dv]. Hkv divides Hq.
        packed: [B, 1, N, 2 + G] int32, see `pack_tree`.
        scaling: what the scores are multiplied by.
        softcap: c of c · tanh(score / c), which softmax then takes; None for the score itself.

    Returns:
        [B, N, Hq, Dv] in the query's dtype.
    """
    attend = plain_attention
    if no_kernel(query.device, query.dtype, max(query.shape[-1], value.shape[-1])) is None:
        from .kernels import split_attention as attend
    return attend(query, key, value, packed, scaling, softcap)


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: Tensor,
    scaling: float,
    softcap: float | None = None,
    block: int = 1024,
) -> Tensor:
    """`tree_attention` in torch's own operators, by blocks of slots, at least in float32."""
    batch, query_heads, nodes, size = query.shape
    heads, tree = key.shape[1], packed.shape[-1] - 2
    wide = torch.promote_types(query.dtype, torch.float32)
    rows = (query.to(wide) * scaling).reshape(batch, heads, -1, size)  # [B, Hkv, groups·N, D]

    def part(keys: Tensor, values: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp over some slots; seen is [B, 1, N, slots]."""
        scores = rows @ keys.to(wide).transpose(2, 3)  # [B, Hkv, groups·N, slots]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        hidden = ~seen.repeat(1, 1, query_heads // heads, 1)
        scores = scores.masked_fill(hidden, float("-inf"))
        # Finite where nothing is seen, so that the weights are 0 there, not NaN.
        total = scores.logsumexp(-1, keepdim=True).clamp(min=torch.finfo(wide).min)
        return (scores - total).exp() @ values.to(wide), total

    first, end = packed[..., :1], packed[..., 1:2]  # [B, 1, N, 1]
    slots = torch.arange(key.shape[2], device=query.device)
    own = (end[:, :, :1] + slots[:tree, None]).long()  # [B, 1, G, 1]
    output, total = part(
        key.gather(2, own.expand(-1, heads, -1, size)),
        value.gather(2, own.expand(-1, heads, -1, value.shape[-1])),
        packed[..., 2:] != 0,
    )
    for start in range(0, key.shape[2] - tree, block):
        now = slice(start, min(start + block, key.shape[2] - tree))
        seen = (slots[now] >= first) & (slots[now] < end)
        other, share = part(key[:, :, now], value[:, :, now], seen)
        both = torch.logaddexp(total, share)
        output = output * (total - both).exp() + other * (share - both).exp()
        total = both
    output = output.view(batch, query_heads, nodes, -1)
    return output.transpose(1, 2).contiguous().to(query.dtype)


@cache
def no_kernel(
    device: torch.device, dtype: torch.dtype = torch.float32, size: int = 0
) -> str | None:
    """Why no Triton kernel runs there; None where one does.

    Args:
        dtype, size: the keys' and the larger head dimension, for the kernel of attention.
    """
    if device.type != "cuda":
        return f"its kernel runs on CUDA, and the keys are on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "its kernel needs triton, which is not installed"
    if dtype not in _KERNEL_TYPES:
        return f"its kernel knows no {dtype}"
    if size > _KERNEL_SIZE:
        return f"its kernel knows head dimensions to {_KERNEL_SIZE}, found {size}"
    return None
