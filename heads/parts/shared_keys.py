"""Keys and values of a Gemma 4 target, computed by its own layers from what enters them."""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.gemma4.modeling_gemma4 import apply_rotary_pos_emb

from ..core import OptionError, decoder_layers, decoder_of, device_of
from ..core.layer_sizes import layer_configs


def storing_layers(target: PreTrainedModel) -> dict[str, int]:
    """By type of attention the number of the last layer that computes keys and values itself.

    Those that come after it in the target, and the layers of its assistant, read these.

    Raises:
        OptionError: the target is none of Gemma 4.
    """
    text: Any = target.config.get_text_config(decoder=True)
    if not str(text.model_type).startswith("gemma4"):
        raise OptionError(
            f"the target is a {text.model_type}, and a gemma4_assistant reads keys and values as "
            "Gemma 4 has them; load the Gemma 4 that it was trained for."
        )
    own = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", 0) or 0)
    return {kind: number for number, kind in enumerate(text.layer_types[:own])}


def head_sizes(target: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """By type of attention how many heads these keys and values have, and their size."""
    text: Any = target.config.get_text_config(decoder=True)
    layers = {kind: layer_configs(text)[n] for kind, n in storing_layers(target).items()}
    return {kind: (one.num_key_value_heads, one.head_dim) for kind, one in layers.items()}


class SharedKeys:
    """The keys and values of one of these layers; what it calls is the target's."""

    def __init__(self, target: PreTrainedModel, kind: str):
        layer: Any = decoder_layers(target)[storing_layers(target)[kind]]
        decoder: Any = decoder_of(target)
        self.kind, self.norm, self.attention = kind, layer.input_layernorm, layer.self_attn
        self.rotary = decoder.rotary_emb

    @property
    def modules(self) -> list[nn.Module]:
        """What has weights."""
        own = self.attention
        parts = (self.norm, own.k_proj, own.v_proj, own.k_norm, own.v_norm)
        return [part for part in parts if part is not None]

    def __call__(self, entering: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, T, d] of the layer's input [B, T, D] at positions [B, T]."""
        own = self.attention
        hidden = self.norm(entering.to(device_of(own.k_proj)))
        split = (*hidden.shape[:-1], -1, own.head_dim)
        keys = own.k_proj(hidden).view(split)
        values = keys if own.v_proj is None else own.v_proj(hidden).view(split)
        keys = apply_rotary_pos_emb(
            own.k_norm(keys), *self.angles(hidden, positions), unsqueeze_dim=2
        )
        return keys.transpose(1, 2), own.v_norm(values).transpose(1, 2)

    def angles(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, T, d] of positions [B, T], on the device and in the dtype of
        `like`."""
        return self.rotary(like, positions.to(like.device), self.kind)
