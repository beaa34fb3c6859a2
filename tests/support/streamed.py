"""The tiny models with accelerate's hooks: their weights streamed in for every forward."""

import copy
from pathlib import Path
from typing import Any

import accelerate
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.tiny import tiny

PLACES = ("cpu", "disk", "map")
"""In memory; in a folder of accelerate's; and half of it, read from the model's own safetensors."""
CPU = torch.device("cpu")


def streamed(model: PreTrainedModel, place: str, folder: Path) -> Any:
    """A copy of a model, its weights in one of `PLACES`."""
    if place == "cpu":
        return accelerate.cpu_offload(copy.deepcopy(model), CPU)
    if place == "disk":
        return accelerate.disk_offload(copy.deepcopy(model), folder / "offloaded", CPU)
    model.save_pretrained(folder / "model")
    layers = {"model.layers.0": "cpu", "model.layers.1": "disk"}
    rest = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "disk"}
    return AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=model.dtype, device_map={**layers, **rest, "lm_head": "disk"}
    ).eval()


def streamed_tiny(place: str, folder: Path, name: str = "llama") -> Any:
    return streamed(tiny(name), place, folder)
