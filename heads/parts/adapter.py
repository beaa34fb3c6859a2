"""A LoRA adapter in the target, trained together with a drafter (peft; LoRA: arXiv 2106.09685).

peft wraps layers inside the target, which stays the very model object it was: it decodes, and is
decoded, like any other. Taken out again, the target is what it was before, bit for bit; merged, it
is an ordinary model whose weights have moved.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from ..core import ArtifactError, OptionError, device_of, offloaded, output_layer, weight_of

ADAPTER = "adapter"
ADAPTER_CONFIG = f"{ADAPTER}/adapter_config.json"
ADAPTER_WEIGHTS = f"{ADAPTER}/adapter_model.safetensors"
"""Where an artifact, or a checkpoint, keeps its adapter; the files are peft's own."""

_SEED = 0  # every process, and every run, starts from the same factors


@dataclass(frozen=True)
class Schedule:
    """When target and drafter learn, and how much the drafter's loss may move the target.

    Attributes:
        heads_first: share of the training in which the drafter learns alone.
        weight: λ0, of the drafter's loss beside the target's own, once both learn.
        ramp: `constant`; or `sine`, λ0 sin(πs/2) at share s of the joint stage.
        head_rate: the drafter's learning rate, as a multiple of the adapter's.
    """

    heads_first: float
    weight: float
    ramp: str
    head_rate: float

    def weight_at(self, share: float) -> float | None:
        """λ at a share of the training; None where the drafter learns alone.

        >>> schedule = Schedule(heads_first=0.5, weight=0.2, ramp="sine", head_rate=4.0)
        >>> schedule.weight_at(0.25), schedule.weight_at(0.5), round(schedule.weight_at(1.0), 3)
        (None, 0.0, 0.2)
        """
        if share < self.heads_first:
            return None
        if self.ramp == "constant":
            return self.weight
        stage = (share - self.heads_first) / (1 - self.heads_first)
        return self.weight * math.sin(math.pi / 2 * stage)


class Adapter:
    """Low-rank changes of a target's linear layers: W + (alpha / rank) · B A, with B zero at first.

    Args:
        modules: names of the layers, such as `q_proj`; all linear ones but the output layer where
            empty.
        schedule: how it is trained.
    """

    def __init__(
        self, rank: int, alpha: float, dropout: float, modules: Sequence[str], schedule: Schedule
    ):
        self.rank, self.alpha, self.dropout = rank, alpha, dropout
        self.modules, self.schedule = list(modules), schedule
        self._wrapped: Any = None  # peft's model around the target
        self._trainable: list[nn.Parameter] = []  # what peft has frozen
        self._off = False

    @property
    def attached(self) -> bool:
        """Whether it is in a target now."""
        return self._wrapped is not None

    def attach(self, target: PreTrainedModel) -> None:
        """Put a fresh adapter into a target; what the target says has not changed yet.

        The target's own parameters are frozen until the adapter leaves it.

        Raises:
            OptionError: the target has no such layers, or its output layer, if it is to be adapted,
                is tied to its embedding.
        """
        import peft  # slow to import, and of no use to other drafters

        assert not self.attached
        self._trainable = [p for p in target.parameters() if p.requires_grad]
        config = peft.LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]
            lora_dropout=self.dropout,
            target_modules=self.modules or "all-linear",
            task_type="CAUSAL_LM",
        )
        try:
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                torch.manual_seed(_SEED)
                warnings.simplefilter("ignore")  # of the layers' kinds, which are no news here
                self._wrapped = peft.get_peft_model(target, config)
                self._bring_in()
        except ValueError as error:
            reason = " ".join(str(error).split())[:160]
            raise OptionError(
                f"drafter.modules cannot be adapted ({reason}); expected names of the target's "
                "linear layers, or none for all of them."
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

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """The target without the adapter, for as long as the context lasts."""
        if self._off:  # within another such context
            yield
            return
        self._wrapped.base_model.disable_adapter_layers()
        self._off = True
        try:
            yield
        finally:
            self._wrapped.base_model.enable_adapter_layers()
            self._off = False

    def parameters(self) -> list[nn.Parameter]:
        """The factors A and B of every layer; empty where it is not attached."""
        if not self.attached:
            return []
        return [p for name, p in self._wrapped.named_parameters() if "lora_" in name]

    def train(self, mode: bool = True) -> None:
        """Switch the adapter's own dropout; the target's stays off."""
        for layer in self._layers().values():
            layer.lora_dropout.train(mode)

    def digest(self) -> str:
        """sha256 of rows of the base's layers that the adapter changes, rounded to bfloat16.

        It tells the base from a model that was adapted already; a merge changes nearly every row.
        Empty for quantized layers, whose rows are not comparable.
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
        (folder / ADAPTER / "README.md").unlink(missing_ok=True)  # says nothing of this model

    def load(self, folder: Path) -> None:
        """Take the weights of the `adapter/` in a folder; its config is not read, ours decides.

        Raises:
            ArtifactError: they are missing, damaged, or of other layers or another rank.
        """
        import peft

        path = folder / ADAPTER_WEIGHTS
        try:
            weights = safetensors.torch.load_file(path)
        except (OSError, SafetensorError) as error:
            raise ArtifactError(
                f"{path} is missing or damaged, and the drafter was trained for the target with "
                "it; restore the file or train again."
            ) from error
        own = peft.get_peft_model_state_dict(self._wrapped, save_embedding_layers=False)
        shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        if wrong := sorted(dict(shapes.items() ^ found.items())):
            raise ArtifactError(
                f"{path} does not fit the drafter's config or this target: {wrong[0]} is missing, "
                "unknown or of another shape; restore both files, and load the right target."
            )
        peft.set_peft_model_state_dict(self._wrapped, weights)

    def detach(self) -> None:
        """Take the adapter out of the target, which is then its old self, bit for bit."""
        self._leave(self._wrapped.unload)

    def merge(self) -> None:
        """Make the adapter's change part of the target's own weights.

        Quantized weights would be rounded again, and streamed ones are files that are not ours to
        write: there the adapter stays beside them.
        """
        plain = all(w.get_base_layer().weight.is_floating_point() for w in self._layers().values())
        if plain and not offloaded(self._wrapped):
            self._leave(self._wrapped.merge_and_unload)

    def _bring_in(self) -> None:
        """Give data to factors that peft put beside a streamed weight, which has none itself."""
        for layer in self._layers().values():
            if layer.get_base_layer().weight.is_meta:
                place = device_of(layer.get_base_layer())
                for part in (layer.lora_A, layer.lora_B):
                    part.to_empty(device=place)
                for name in layer.lora_A:
                    layer.reset_lora_parameters(name, True)

    def _leave(self, how: Any) -> None:
        how()
        for parameter in self._trainable:
            parameter.requires_grad_(True)
        self._wrapped, self._trainable = None, []

    def _layers(self) -> dict[str, Any]:
        """The target's adapted layers, by name."""
        if not self.attached:
            return {}
        modules = self._wrapped.base_model.model.named_modules()
        return {name: module for name, module in modules if hasattr(module, "lora_dropout")}
