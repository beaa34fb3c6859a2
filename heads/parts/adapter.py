"""A LoRA adapter in the target, trained together with a drafter (peft; LoRA: arXiv 2106.09685).

peft wraps layers inside the target, which stays the same model object and decodes like any other.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..core import (
    ArtifactError,
    OptionError,
    device_of,
    in_parts,
    offloaded,
    output_layer,
    weight_of,
)
from ..declared.adapter import ADAPTER, ADAPTER_WEIGHTS
from .adapted_layers import chosen_layers, left_out, linear_layers


class Adapter:
    """Low-rank changes of a target's linear layers: W + (alpha / rank) · B A, with B zero at first.

    Args:
        modules: names of layers, such as `q_proj`; empty for all linear ones but the output layer,
            recurrent layers' included, as far as peft adapts them.
    """

    def __init__(self, rank: int, alpha: float, dropout: float, modules: Sequence[str]):
        self._lora: dict[str, Any] = {
            "r": rank, "lora_alpha": alpha, "lora_dropout": dropout,
            "task_type": "CAUSAL_LM",
        }  # fmt: skip
        self._modules = modules
        self._wrapped: Any = None  # peft's model around the target
        self._trainable: list[nn.Parameter] = []  # those of the target that peft has frozen

    @property
    def attached(self) -> bool:
        """Whether it is in a target now."""
        return self._wrapped is not None

    def attach(self, target: PreTrainedModel) -> None:
        """Put a fresh adapter into a target, whose output does not change yet.

        The target's own parameters are frozen until the adapter is detached or merged.

        Raises:
            OptionError: the target has no such layers, or `modules` names experts or a tied output
                layer.
        """
        import peft  # slow to import, and not needed by other drafters

        assert not self.attached
        if in_parts(target):
            raise OptionError(
                "the target's layers are divided among processes, and this drafter adapts them; "
                "write the adapted target as a model of its own with headstart merge."
            )
        self._trainable = [p for p in target.parameters() if p.requires_grad]
        known, chosen = linear_layers(target), chosen_layers(target, self._modules)
        config = peft.LoraConfig(**self._lora, **chosen)
        try:
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                torch.manual_seed(0)  # every process starts from the same factors
                warnings.simplefilter("ignore")  # about layers that peft transposes by itself
                self._wrapped = peft.get_peft_model(target, config)
                self._init_offloaded()
        except ValueError as error:
            reason = " ".join(str(error).split())[:160]
            raise OptionError(
                f"drafter.modules cannot be adapted ({reason}); expected some of the target's "
                f"linear layers, {', '.join(known)}, or none for all of them."
            ) from error
        self.train(False)
        embedding: Any = target.get_input_embeddings()
        layer: Any = output_layer(target)
        if hasattr(layer, "get_base_layer") and layer.weight is embedding.weight:
            self.detach()
            raise OptionError(
                "drafter.modules names the output layer, which this target ties to its embedding; "
                "leave it out."
            )

    def left_out(self, target: PreTrainedModel) -> str:
        """What it leaves out of a target unasked, in a sentence; empty if nothing."""
        return "" if self._modules else left_out(target)

    def disabled(self) -> AbstractContextManager[None]:
        """While this context lasts, the target computes without the adapter; it may be nested."""
        return self._wrapped.disable_adapter()

    def parameters(self) -> list[nn.Parameter]:
        """The factors A and B of every layer; empty if it is not attached."""
        named = self._wrapped.named_parameters() if self.attached else ()
        return [p for name, p in named if "lora_" in name]

    def factors(self) -> list[nn.Module]:
        """The modules that hold the factors; empty if it is not attached."""
        return [part for layer in self._layers().values() for part in (layer.lora_A, layer.lora_B)]

    def train(self, mode: bool = True) -> None:
        """Switch the adapter's dropout; the target's own stays off."""
        for layer in self._layers().values():
            layer.lora_dropout.train(mode)

    def digest(self) -> str:
        """sha256 of some rows of the base's weights that it adapts, rounded to bfloat16.

        It differs for a base that an adapter was merged into, which changes nearly every row. Empty
        for quantized layers, whose rows are not comparable.
        """
        found = hashlib.sha256()
        for name, layer in self._layers().items():
            weight = weight_of(layer.get_base_layer())
            if not weight.is_floating_point():
                return ""
            rows = weight.detach()[[0, -1]].to("cpu", torch.bfloat16).contiguous()
            found.update(f"{name}{tuple(weight.shape)}".encode())
            found.update(rows.view(torch.int16).numpy().tobytes())
        return found.hexdigest()

    def save(self, folder: Path) -> None:
        """Write `adapter/` into a folder, as peft saves it, in safetensors."""
        self._wrapped.save_pretrained(
            folder / ADAPTER, safe_serialization=True, save_embedding_layers=False
        )
        (folder / ADAPTER / "README.md").unlink(missing_ok=True)  # peft's template

    def load(self, folder: Path) -> None:
        """Read the weights of a folder's `adapter/`; the drafter's config describes it, not peft's.

        Raises:
            ArtifactError: they are missing, damaged, or of other layers or another rank.
        """
        import peft

        path = folder / ADAPTER_WEIGHTS
        try:
            weights = safetensors.torch.load_file(path)
        except (OSError, SafetensorError) as error:
            raise ArtifactError(
                f"{path} is missing or damaged, and the drafter only fits the adapted target; "
                "restore the file or train again."
            ) from error
        own = peft.get_peft_model_state_dict(self._wrapped, save_embedding_layers=False)
        expected, found = ({(name, some[name].shape) for name in some} for some in (own, weights))
        if wrong := sorted(name for name, _ in expected ^ found):
            raise ArtifactError(
                f"{path} does not fit the drafter's config or this target: {wrong[0]} is missing, "
                "unknown or of another shape; restore both files, and load the right target."
            )
        # One by one: modules that are sharded do not take a dict of whole weights.
        for name, factor in self._wrapped.named_parameters():
            if "lora_" in name:
                with torch.no_grad():
                    factor.copy_(weights[name.replace(".default.", ".")])

    def merged_state(self) -> dict[str, Tensor]:
        """All weights of the target with the adapter's change added, under their own names."""
        changes = {
            f"{name}.weight": layer.get_delta_weight("default")
            for name, layer in self._layers().items()
        }
        found = {}
        for key, tensor in self._wrapped.base_model.model.state_dict().items():
            if ".lora_" not in key:
                name = key.replace(".base_layer.", ".")
                found[name] = tensor + changes[name] if name in changes else tensor
        return found

    def detach(self) -> None:
        """Take the adapter out of the target, which is then bit for bit what it was before."""
        self._remove(self._wrapped.unload)

    def merge(self) -> None:
        """Add the adapter's change to the target's own weights, and take the adapter out.

        It stays attached where a weight is quantized, since that would be rounded again, or
        offloaded, since files of the target are not written to.
        """
        plain = all(w.get_base_layer().weight.is_floating_point() for w in self._layers().values())
        if plain and not offloaded(self._wrapped):
            self._remove(self._wrapped.merge_and_unload)

    def _remove(self, unload: Callable[[], Any]) -> None:
        unload()
        for parameter in self._trainable:
            parameter.requires_grad_(True)
        self._wrapped, self._trainable = None, []

    def _init_offloaded(self) -> None:
        """Initialise factors of offloaded layers, which peft leaves without data as well."""
        for layer in self._layers().values():
            if layer.get_base_layer().weight.is_meta:
                place = device_of(layer.get_base_layer())
                for part in (layer.lora_A, layer.lora_B):
                    part.to_empty(device=place)
                for name in layer.lora_A:
                    layer.reset_lora_parameters(name, True)

    def _layers(self) -> dict[str, Any]:
        """The target's adapted layers, by name."""
        modules = self._wrapped.base_model.model.named_modules() if self.attached else ()
        return {name: module for name, module in modules if hasattr(module, "lora_dropout")}
