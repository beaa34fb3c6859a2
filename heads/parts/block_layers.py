"""What DFlash2 adds to decoder layers: convolutions over a block's places, from first to last.

Before and after its attention, and before and after its MLP, a layer mixes each place of a block
with the one before it (kernel_size 2; more with a larger one):

    mixed_t = Σ_o (base_o + dynamic_t,o) · x_t-o        x before the block's first place is 0

`base` is learned. `dynamic` is a projection of the layer's own normed input at place t, one number
for each group of channels (github.com/z-lab/dflash).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from .own_attention import fit_attention

_BEFORE, _AFTER = 0, 1


class BlockConvolution(nn.Module):
    """Two convolutions around a part of a layer, whose dynamic kernels come from one projection.

    Args:
        size: D; kernel_size: how many places are mixed; group: of how many channels a group is.
        places: W, of a block.
    """

    def __init__(self, size: int, kernel_size: int, group: int, places: int):
        super().__init__()
        self.kernel_size, self.places, self._groups = kernel_size, places, size // group
        self.base_kernel = nn.Parameter(torch.zeros(2, kernel_size, size))
        wide = 2 * kernel_size * self._groups
        self.kernel_projection = nn.Linear(size, wide, bias=False)

    def kernels(self, normed: Tensor) -> Tensor:
        """What is added to `base_kernel`, of a part's input [B, A · W, D]: [B, A · W, 2, o, G]."""
        found = self.kernel_projection(normed)
        return found.unflatten(-1, (2, self.kernel_size, self._groups))

    def mix(self, states: Tensor, dynamic: Tensor, which: int) -> Tensor:
        """One of the two convolutions over the blocks of states [B, A · W, D]."""
        blocks = states.unflatten(1, (-1, self.places))  # [B, A, W, D]
        mixed = torch.zeros_like(states)
        for offset in range(self.kernel_size):
            before = pad(blocks, (0, 0, offset, 0))[:, :, : self.places].flatten(1, 2)
            added = dynamic[..., which, offset, :].unsqueeze(-1)  # [B, A · W, G, 1]
            kernel = self.base_kernel[which, offset].unflatten(-1, (self._groups, -1)) + added
            mixed = mixed + kernel.flatten(-2) * before
        return mixed


class ConvolvedLayer(Qwen3DecoderLayer):
    """A layer of Qwen3 with such convolutions around its attention and its MLP."""

    def __init__(self, config: Any, number: int, kernel_size: int, group: int, places: int):
        super().__init__(config, number)
        fit_attention(self, config)
        sizes = config.hidden_size, kernel_size, group, places
        self.attention_conv, self.mlp_conv = BlockConvolution(*sizes), BlockConvolution(*sizes)

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        dynamic = self.attention_conv.kernels(normed)
        mixed = self.attention_conv.mix(normed, dynamic, _BEFORE)
        attended = self.self_attn(mixed, *args, **options)[0]
        hidden_states = hidden_states + self.attention_conv.mix(attended, dynamic, _AFTER)
        normed = self.post_attention_layernorm(hidden_states)
        dynamic = self.mlp_conv.kernels(normed)
        found = self.mlp(self.mlp_conv.mix(normed, dynamic, _BEFORE))
        return hidden_states + self.mlp_conv.mix(found, dynamic, _AFTER)
