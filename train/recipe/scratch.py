"""The section of a recipe for a target that is trained with it."""

from dataclasses import dataclass

from huggingface_hub.dataclasses import strict

from .fields import number, positive


@strict
@dataclass
class Scratch:
    """A small Llama trained from random weights, for runs without a model hub."""

    vocab_size: int = number(1024, ge=257)  # 256 bytes and the end-of-text token
    hidden_size: int = positive(128)
    layers: int = number(12, ge=1, le=1024)
    heads: int = positive(2)
    intermediate_size: int = positive(384)
    context: int = positive(1024)
    sequence_length: int = positive(128)  # tokens a training row
    batch_size: int = positive(8)  # rows a step
    muon_lr: float = positive(16e-3)
    adamw_lr: float = positive(4e-3)
    warmup_ratio: float = number(0.05, ge=0, lt=1)
    max_seconds: float | None = positive(80.0)
    max_tokens: int | None = positive(None)
    min_tokens: int | None = positive(None)  # learnt past max_seconds too, up to twice as long
    # the training loss, nats a token, that is expected of it; a run that ends above says so
    expected_loss: float | None = positive(None)
