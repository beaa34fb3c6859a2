"""The section of a recipe for a target that is trained with it."""

from dataclasses import dataclass

from huggingface_hub.dataclasses import strict

from .fields import number, positive


@strict
@dataclass
class Scratch:
    """A small Llama trained from random weights, for runs without a model hub."""

    vocab_size: int = number(1024, ge=257)  # 256 bytes and the end-of-text token
    hidden_size: int = positive(128)  # D
    layers: int = number(12, ge=1, le=1024)  # of the decoder
    heads: int = positive(2)  # of attention
    intermediate_size: int = positive(384)  # of the MLP
    context: int = positive(1024)  # tokens of a text, at most
    sequence_length: int = positive(128)  # tokens a training row
    batch_size: int = positive(8)  # rows a step
    muon_lr: float = positive(16e-3)  # learning rate of the layers' matrices
    adamw_lr: float = positive(4e-3)  # learning rate of the other weights
    warmup_ratio: float = number(0.05, ge=0, lt=1)  # share of its training
    # of its training, which goes on up to twice as long until min_tokens are learnt
    max_seconds: float | None = positive(80.0)
    max_tokens: int | None = positive(None)  # of its training
    min_tokens: int | None = positive(None)  # see max_seconds
    # nats a token; a run whose training loss ends above says so
    expected_loss: float | None = positive(None)
