"""What recurrent layers (linear attention, state spaces, short convolutions) keep of a text.

Attention rolls back by forgetting slots. A recurrent layer has folded all tokens into one state, so
a forward over a token tree leaves the state alone: it notes what each node would add, and `commit`
adds what lies on the accepted path. With S the committed state [H, D1, D2], and c(n) the sum of the
log-decays from the root to node n, both of one layer and row:

    S := S * exp(c(last)) + sum over the path's nodes n of left(n) exp(c(last) - c(n)) right(n)ᵀ

One such sum serves all layers of a kind at once. How nodes read the state is in `tree_scans`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import LinearAttentionCacheLayerMixin

_STATE = -1


@dataclass(frozen=True)
class RecurrentShape:
    """What one recurrent layer keeps of a row.

    Attributes:
        windows: (channels, width) of each causal convolution, which keeps `width` - 1 inputs.
        state: (H, D1, D2), which may be more or less in number; None without a state.
    """

    device: torch.device
    dtype: torch.dtype
    windows: tuple[tuple[int, int], ...]
    state: tuple[int, ...] | None = None
    state_dtype: torch.dtype = torch.float32

    @property
    def bytes_of_row(self) -> int:
        """The memory that one row takes."""
        inputs = sum(channels * (width - 1) for channels, width in self.windows)
        state = 0 if self.state is None else math.prod(self.state) * self.state_dtype.itemsize
        return inputs * self.dtype.itemsize + state


class Updates(NamedTuple):
    """What the nodes of a tree would add to a layer's state, see above.

    Attributes:
        left: [B, H, G, D1]; right: [B, H, G, D2].
        g: [B, H, G, D1] or [B, H, G, 1], each node's log-decay.
        decay: c(n), its sum along the path to each node.
    """

    left: Tensor
    right: Tensor
    g: Tensor
    decay: Tensor


@dataclass
class TreeRun:
    """What a forward runs over, as recurrent layers need it: the last N of G nodes of a tree.

    Attributes:
        parents: [B, G] int64; below 0 where a node follows what was committed.
        ancestors: [B, G, G] bool, a node's own entry included.
        first: G - N, the nodes that ran before.
        levels: a bound on how many of a node's ancestors are among the N, on the host.
    """

    parents: Tensor
    ancestors: Tensor
    first: int = 0
    levels: int = 0
    _windows: dict[int, Tensor] = field(default_factory=dict)

    def windows(self, width: int) -> Tensor:
        """The inputs that a convolution reads at each node, [B, G, W] columns, the node's last.

        Column c < W - 1 is what was kept, the newest last; column W - 1 + n is node n.

        >>> from headstart.heads.core import ancestor_mask
        >>> parents = torch.tensor([[-1, 0, 0]])
        >>> TreeRun(parents, ancestor_mask(parents)).windows(3)[0].tolist()
        [[0, 1, 2], [1, 2, 3], [1, 2, 4]]
        """
        if width not in self._windows:
            parents = self.parents.clamp(min=-1)  # [B, G]
            kept = torch.arange(-1, width - 2, device=parents.device).expand(len(parents), -1)
            before = torch.cat([kept, parents + width - 1], 1).clamp(min=0)  # [B, W - 1 + G]
            nodes = torch.arange(parents.shape[1], device=parents.device) + width - 1
            columns = [nodes.expand_as(parents)]
            for _ in range(width - 1):
                columns.append(before.gather(1, columns[-1]))
            self._windows[width] = torch.stack(columns[::-1], -1)
        return self._windows[width]


def parents_of(ancestors: Tensor, depth: Tensor) -> Tensor:
    """The parent of each node [B, G], -1 for those without, from `ancestors` [B, G, G] and depths.

    >>> from headstart.heads.core import ancestor_mask
    >>> parents_of(ancestor_mask(torch.tensor([[-1, 0, 0, 2]])), torch.tensor([[4, 5, 5, 6]]))
    tensor([[-1,  0,  0,  2]])
    """
    above = ancestors & (depth.unsqueeze(1) == depth.unsqueeze(2) - 1)  # [B, G, G]
    return torch.where(above.any(-1), above.byte().argmax(-1), -1)


class RecurrentLayer(LinearAttentionCacheLayerMixin):
    """What a model's recurrent layer asks of its cache; the tensors are the owner's.

    Attributes:
        updates: what the G nodes of the last tree would add to the state; inputs: of each
            convolution, [B, C, W - 1 + G], those kept and the nodes'.
    """

    owner: RecurrentStates

    def __init__(self, shape: RecurrentShape):
        LinearAttentionCacheLayerMixin.__init__(self, len(shape.windows))
        self.shape = shape
        self.record_past = True  # so that single tokens, too, go through `update_conv_state`
        self.inputs: dict[int, Tensor] = {}
        self.updates: Updates | None = None

    def lazy_initialization(self, *args: Any, **options: Any) -> None:
        pass

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        """Take a convolution's new inputs [B, C, N]; returns what it is to read."""
        kept: Any = self.conv_states[state_idx]  # [B, C, W - 1]
        if (tree := self.owner.tree) is not None:
            before = self.inputs[state_idx] if tree.first else kept
            both = torch.cat([before, conv_states.to(kept.dtype)], -1)
            self.inputs[state_idx] = both
            return both
        counts, width = self.owner.counts, kept.shape[-1]
        if counts is None:
            newest = conv_states[..., -width:]
            kept.copy_(F.pad(newest, (width - newest.shape[-1], 0)))
        else:
            last = torch.arange(-width, 0, device=kept.device)
            places = counts.to(kept.device).unsqueeze(1) + last  # [B, W - 1]
            index = places.clamp(min=0).unsqueeze(1).expand(-1, conv_states.shape[1], -1)
            kept.copy_(conv_states.gather(2, index) * (places >= 0).unsqueeze(1))
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Take the state after a prompt; of a tree nothing is taken before it is committed."""
        state: Any = self.recurrent_states[state_idx]
        if self.owner.tree is None:
            state.copy_(recurrent_states)
        return state

    def real(self, length: int, device: torch.device) -> Tensor | None:
        """[B, T] bool, which of the prompts' T columns hold tokens; None when all do."""
        counts = self.owner.counts
        if counts is None:
            return None
        return torch.arange(length, device=device) < counts.to(device).unsqueeze(1)


class RecurrentStates:
    """What all recurrent layers of a model keep, for B rows.

    Attributes:
        layers: by their number in the model.
        tree: what the next forward runs over; None for prompts.
        counts: [B] tokens of each prompt; None where all columns hold tokens.
    """

    def __init__(self, layers: dict[int, RecurrentLayer]):
        self.layers = layers
        self._alike: dict[RecurrentShape, list[RecurrentLayer]] = {}
        for layer in layers.values():
            layer.owner = self
            self._alike.setdefault(layer.shape, []).append(layer)
        # By shape and the number of a convolution, or `_STATE`: flat, as large as most rows took,
        # and its part of now, [L, B, …].
        self._memory: dict[tuple[RecurrentShape, int], Tensor] = {}
        self._slabs: dict[tuple[RecurrentShape, int], Tensor] = {}
        self.tree: TreeRun | None = None
        self.counts: Tensor | None = None
        self.made = 0  # memories so far

    @property
    def bytes_of_row(self) -> int:
        """The memory that one row takes."""
        return sum(layer.shape.bytes_of_row for layer in self.layers.values())

    def resize(self, batch: int) -> None:
        """Have states of `batch` rows that have read nothing."""
        for shape, layers in self._alike.items():
            for index, (channels, width) in enumerate(shape.windows):
                size = (len(layers), batch, channels, width - 1)
                kept = self._slab((shape, index), size, shape.dtype)
                for layer, part in zip(layers, kept, strict=True):
                    layer.conv_states[index] = part
            if shape.state is not None:
                size = (len(layers), batch, *shape.state)
                for layer, part in zip(
                    layers, self._slab((shape, _STATE), size, shape.state_dtype), strict=True
                ):
                    layer.recurrent_states[0] = part
        self.clear()

    def _slab(
        self, key: tuple[RecurrentShape, int], size: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """What layers that are alike keep, [L, B, …], in the memory that all batch sizes share."""
        count, memory = math.prod(size), self._memory.get(key)
        if memory is None or len(memory) < count:
            memory = torch.empty(count, dtype=dtype, device=key[0].device)
            self._memory[key], self.made = memory, self.made + 1
        self._slabs[key] = memory[:count].view(size)
        return self._slabs[key]

    def release(self) -> None:
        """Give the memory back; there is none until `resize` takes some again."""
        self._memory, self._slabs = {}, {}
        for layer in self.layers.values():
            layer.conv_states = dict.fromkeys(layer.conv_states)
            layer.recurrent_states = dict.fromkeys(layer.recurrent_states)
        self.run_prompts()  # nor is anything of a tree held

    def clear(self) -> None:
        """Forget all texts."""
        for slab in self._slabs.values():
            slab.zero_()
        self.run_prompts()

    def run_prompts(self, counts: Sequence[int] | Tensor | None = None) -> None:
        """Let the next forward run prompts, of `counts` [B] tokens; all columns when None."""
        if counts is not None and not isinstance(counts, Tensor):
            device = next(iter(self.layers.values())).shape.device
            counts = torch.tensor(counts, device=device)
        self.counts = counts
        self._run(None)

    def run_tree(self, tree: TreeRun) -> None:
        """Let the next forward run nodes of a tree, behind those of its nodes that ran before."""
        self._run(tree)

    def _run(self, tree: TreeRun | None) -> None:
        self.tree = tree
        for layer in self.layers.values():
            if tree is None or not tree.first:
                layer.inputs, layer.updates = {}, None
            # By this models choose between a prompt's scan and one that begins at a state.
            layer.has_previous_state = dict.fromkeys(layer.conv_states, tree is not None)

    def commit(self, last: Tensor) -> None:
        """Add the last tree's path to node `last` [B]; nothing where below 0, or after prompts."""
        if self.tree is None:
            return
        for shape, layers in self._alike.items():
            node = last.to(shape.device)
            rows = torch.arange(len(node), device=shape.device)
            for index, (_, width) in enumerate(shape.windows):
                windows = self.tree.windows(width).to(shape.device)
                # The row of node -1: what was kept.
                kept = torch.arange(-1, width - 1, device=shape.device).expand(len(node), 1, -1)
                windows = torch.cat([windows, kept], 1)
                window = windows[rows, node, 1:]  # [B, W - 1]
                both = torch.stack([layer.inputs[index] for layer in layers])  # [L, B, C, …]
                columns = window[None, :, None].expand(*both.shape[:3], -1)
                self._slabs[shape, index].copy_(both.gather(3, columns))
            if shape.state is not None:
                on_path = self.tree.ancestors.to(shape.device)[rows, node]  # [B, G]
                on_path = on_path & (node >= 0).unsqueeze(1)
                updates = [layer.updates for layer in layers if layer.updates is not None]
                added = Updates(*map(torch.stack, zip(*updates, strict=True)))
                add_path(self._slabs[shape, _STATE], added, on_path)

    def adopt(self, other: RecurrentStates, rows: Tensor) -> None:
        """Copy another's rows into `rows` [R] of this."""
        for key, slab in self._slabs.items():
            slab.index_copy_(1, rows.to(slab.device), other._slabs[key])


def add_path(state: Tensor, added: Updates, on_path: Tensor) -> None:
    """Add a path's nodes to states [L, B, H, D1, D2] in place.

    Args:
        added: stacked, [L, B, H, G, …] each.
        on_path: [B, G] bool, the nodes of the path, if any.
    """
    left, right, g, decay = (each.to(state.dtype) for each in added)
    apart = on_path.logical_not()[None, :, None, :, None]
    whole = g.masked_fill(apart, 0).sum(3, keepdim=True)  # [L, B, H, 1, D1]
    since = (whole - decay).masked_fill(apart, -torch.inf).exp()  # [L, B, H, G, D1]
    state.mul_(whole.exp().transpose(-1, -2)).add_((left * since).transpose(-1, -2) @ right)
