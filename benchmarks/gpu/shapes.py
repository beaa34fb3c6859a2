"""Models of known shapes with random weights, made where they run: they cost what real ones cost.

What a forward costs depends on shapes and dtype alone, so costs can be measured without a
checkpoint. Acceptance cannot: what these models write has no meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from headstart.heads import FAMILIES, Drafter, DrafterConfig, family


@dataclass(frozen=True)
class Shape:
    """A Llama's shape; the output layer has weights of its own, unless they are `tied`."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    tied: bool = False


SHAPES = {
    "1b": Shape(2048, 16, 32, 8, 8192, 128_256, tied=True),  # Llama 3.2 1B
    "8b": Shape(4096, 32, 32, 8, 14_336, 128_256),  # Llama 3.1 8B
    "toy": Shape(64, 2, 4, 2, 128, 512),
}

_POSITIONS = 1 << 17


def random_target(shape: Shape, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A target of that shape, in eval mode, whose weights are made on `device` in `dtype`."""
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=_POSITIONS,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with _made_on(device, dtype):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def random_drafter(name: str, target: PreTrainedModel) -> Drafter:
    """A drafter of that family beside a target, on its device and in its dtype.

    A trimmed vocabulary never has more than a quarter of the target's. Weights that start as zeros
    are drawn too: products of zeros may run faster than others. One that is made of texts is made
    of a million random tokens.
    """
    kind = family(name)
    assert kind.config_class is not None and issubclass(kind.config_class, DrafterConfig)
    options = dict(FAMILIES[name].large)
    if "draft_vocab_size" in options:
        most = target.config.get_text_config(decoder=True).vocab_size // 4
        options["draft_vocab_size"] = min(options["draft_vocab_size"], most)
    config = kind.config_class.for_target(target, **options)
    with _made_on(target.device, target.dtype):
        drafter = kind(config).to(target.device, target.dtype)  # type: ignore[arg-type]
    with torch.no_grad():
        for weights in drafter.parameters():
            if not weights.any():
                weights.normal_(std=0.02)
    if drafter.collects:
        text = torch.randint(config.vocab_size, (1000, 1000))
        drafter.collect((row, torch.ones_like(row).bool()) for row in text)
    return drafter.eval().bind(target)


def read_bytes(model: torch.nn.Module) -> int:
    """Bytes of weights that a forward of one token reads: all but an embedding table of its own."""
    weights = {id(p): p for p in model.parameters()}
    if isinstance(model, PreTrainedModel) and model.get_output_embeddings() is not None:
        table: Any = model.get_input_embeddings().weight
        output: Any = model.get_output_embeddings()
        if table is not output.weight:
            weights.pop(id(table), None)
    return sum(p.numel() * p.element_size() for p in weights.values())


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of all weights."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


@contextmanager
def _made_on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """What is made inside is made on a device, in a dtype: never in float32 on the host first."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)
