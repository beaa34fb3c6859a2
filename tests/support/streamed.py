"""The tiny models with accelerate's hooks: their weights streamed in for every forward."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import torch
from accelerate.utils.offload import OffloadedWeightsLoader
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.tiny import tiny

PLACES = ("cpu", "disk", "map")
"""In memory; in a folder of accelerate's; and half of it, read from the model's own safetensors."""
CPU = torch.device("cpu")


def streamed(model: PreTrainedModel, place: str, folder: Path) -> Any:
    """A copy of a model, its weights in one of `PLACES`, or in memory and a folder: `both`."""
    count = model.config.num_hidden_layers
    layers = {f"model.layers.{n}": "disk" if n % 2 else "cpu" for n in range(count)}
    if place == "both":
        rest = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm"), "cpu")
        # As `"cpu"` the main device would keep what is in memory; as a device it fetches that too.
        return accelerate.dispatch_model(
            copy.deepcopy(model), {**layers, **rest, "lm_head": "disk"}, CPU,
            offload_dir=folder / "offloaded",
        )  # fmt: skip
    if place == "cpu":
        return accelerate.cpu_offload(copy.deepcopy(model), CPU)
    if place == "disk":
        return accelerate.disk_offload(copy.deepcopy(model), folder / "offloaded", CPU)
    model.save_pretrained(folder / "model")
    rest = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "disk"}
    return AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=model.dtype, device_map={**layers, **rest, "lm_head": "disk"}
    ).eval()


def streamed_tiny(place: str, folder: Path, name: str = "llama") -> Any:
    return streamed(tiny(name), place, folder)


def deep() -> Any:
    """A Llama as `tiny`, of five layers."""
    return tiny("llama", num_hidden_layers=5)


@contextmanager
def fetched() -> Iterator[list[str]]:
    """The names of weights that accelerate reads from a disk while this lasts."""
    keys, true = list[str](), OffloadedWeightsLoader.__getitem__

    def noted(self: Any, key: str) -> Any:
        if key not in self.state_dict:
            keys.append(key)
        return true(self, key)

    with mock.patch.object(OffloadedWeightsLoader, "__getitem__", noted):
        yield keys
