"""Bases of drafters: with a trimmed vocabulary, and with the target's embedding as an input."""

from collections.abc import Callable
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..checkpoint import Found
from ..core import (
    OptionError,
    OutputLayer,
    device_of,
    logit_factor,
    offloaded,
    output_layer,
    output_rows,
    weight_of,
)
from ..drafter import DrafterConfig, Step
from ..trainable import DraftLogits, TrainableDrafter


def most_frequent(counts: Tensor, size: int) -> Tensor:
    """The ids of the `size` tokens of the highest counts [V], ascending: [size].

    Of equally frequent ones the lower ids are taken, which in most tokenizers are of commoner text.

    >>> most_frequent(torch.tensor([1, 7, 0, 1, 0]), 3).tolist()
    [0, 1, 3]
    """
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


class TrimmedVocabulary(TrainableDrafter):
    """A drafter that knows the `draft_vocab_size` most frequent tokens, or all where that is 0.

    Attributes:
        vocabulary: [Vd] int64 target ids, ascending; there only where it is trimmed.
    """

    config: Any
    vocabulary: Tensor
    _factor: float = 1.0  # of the target's logits, over what its output layer returns

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        if self.config.draft_vocab_size:
            self.register_buffer("vocabulary", torch.arange(self.config.draft_vocab_size))

    def _init_weights(self, module: nn.Module) -> None:
        if module is self and self.config.draft_vocab_size:
            self.vocabulary.copy_(torch.arange(len(self.vocabulary)))

    @property
    def draft_vocabulary(self) -> Tensor | None:
        return self.vocabulary if self.config.draft_vocab_size else None

    def own_rows(self, size: int) -> int:
        """How many rows the output layers have together that one product needs, for a trimmed
        vocabulary of `size` tokens."""
        return size

    def shared_modules(self, target: PreTrainedModel) -> list[nn.Module]:
        return [output_layer(target)] if self.config.output == "shared" else []

    def bind(self, target: PreTrainedModel) -> Self:
        super().bind(target)
        self._factor = logit_factor(target)
        return self

    def target_logits(self, states: Tensor) -> Tensor:
        """States [..., D] through the target's output layer, with its factor and without its cap:
        [..., V]."""
        return OutputLayer(self.target).raw(self._scaled(states))

    def _scaled(self, states: Tensor) -> Tensor:
        return states if self._factor == 1 else states * self._factor

    def draft_logits(self, depth: int) -> Callable[[Tensor], Tensor]:
        return self.target_logits

    def draft_output(self, depth: int) -> DraftLogits:
        if self.config.output != "shared":
            return super().draft_output(depth)
        layer = output_layer(self.target)
        if type(layer) is nn.Linear and not offloaded(layer):
            body = None if self._factor == 1 else self._scaled
            return DraftLogits(body, weight=layer.weight, bias=layer.bias)
        return DraftLogits(lambda s: self.target_logits(s).to(s.device), (layer,))

    def propose(self, states: Tensor, depth: int = 1) -> Step:
        """The proposals of nodes at a depth, from their states [B, W, D']."""
        return Step(self.draft_logits(depth)(states), self.draft_vocabulary)

    @torch.no_grad()
    def rows_to_start_from(self, token_counts: Tensor | None) -> Tensor:
        """Choose the vocabulary by counts [V]: weights [Vd, D] that give the target's own logits of
        its tokens.

        Raises:
            OptionError: it is trimmed, and there are no counts.
        """
        rows = self._scaled(weight_of(output_layer(self.target)))  # [V, D]
        if not self.config.draft_vocab_size:
            return rows
        if token_counts is None:
            raise OptionError(
                "a trimmed vocabulary needs the corpus' token counts, found none; pass "
                "token_counts."
            )
        self.vocabulary.copy_(most_frequent(token_counts, len(self.vocabulary)))
        return rows[self.vocabulary.to(rows.device)]


class OneOutputLayer(TrimmedVocabulary):
    """A drafter whose states are read at every depth by the target's output layer where that is
    shared, else by `lm_head`."""

    lm_head: nn.Linear

    def draft_logits(self, depth: int) -> Callable[[Tensor], Tensor]:
        return self.target_logits if self.config.output == "shared" else self.lm_head

    def draft_output(self, depth: int) -> DraftLogits:
        shared = self.config.output == "shared"
        return super().draft_output(depth) if shared else DraftLogits(weight=self.lm_head.weight)


def _alike(one: Tensor | None, other: Tensor) -> bool:
    """Whether two weights are the same, one of them perhaps rounded to the other's dtype."""
    if one is None or one.shape != other.shape:
        return False
    other = other.to(one.device)
    return torch.equal(one.to(other.dtype), other) or torch.equal(one, other.to(one.dtype))


def has_norm(embedding: nn.Module) -> bool:
    """Whether a target norms its embeddings in their own module, as Muse Glimmer does."""
    return hasattr(embedding, "embed_norm")


class TokenConditioned(TrimmedVocabulary):
    """A drafter that reads the drafted tokens, by the target's embedding, beside its feature.

    Attributes:
        embed_tokens: embeddings of its own; there only where the config says so.
    """

    _reads_table = False
    """Whether it reads the target's embeddings without a norm that is part of their module."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        if self._own_embedding:
            rows = self.config.vocab_size
            self.embed_tokens = nn.Embedding(rows, self._embedding_size).requires_grad_(False)

    @classmethod
    def completed(cls, found: Found, target: PreTrainedModel) -> Found:
        """Leave out embeddings, and an output layer, that are the target's own; for a trimmed
        vocabulary without an output layer, take the rows of the target's."""
        known, tensors = super().completed(found, target)
        for field, name, layer in (
            ("embedding", "embed_tokens.weight", target.get_input_embeddings()),
            ("output", "lm_head.weight", output_layer(target)),
        ):
            if known.get(field) == "own" and _alike(tensors.get(name), weight_of(layer)):
                known = {key: value for key, value in known.items() if key != field}
                tensors = {key: value for key, value in tensors.items() if key != name}
        ids = tensors.get("vocabulary")
        if ids is not None and "lm_head.weight" not in tensors:
            whole = output_rows(target)
            dtype = next(each.dtype for each in tensors.values() if each.is_floating_point())
            rows = whole[ids.to(whole.device)].to("cpu", dtype)
            tensors = tensors | {"lm_head.weight": rows.clone()}
        return known, tensors

    @property
    def _own_embedding(self) -> bool:
        return getattr(self.config, "embedding", "shared") == "own"

    @property
    def _embedding(self) -> Any:
        return self.embed_tokens if self._own_embedding else self.target.get_input_embeddings()

    @property
    def _embedding_size(self) -> int:
        """D, the width that the drafter needs of embeddings."""
        return self.config.hidden_size

    def bind(self, target: PreTrainedModel) -> Self:
        width = cast(nn.Embedding, target.get_input_embeddings()).embedding_dim
        if not self._own_embedding and width != self._embedding_size:
            family = self.config.family_name()
            raise OptionError(
                f"the target's embedding is {width} wide and its hidden state "
                f"{self._embedding_size}; {family} needs them alike: use another drafter."
            )
        return super().bind(target)

    def shared_modules(self, target: PreTrainedModel) -> list[nn.Module]:
        shared = super().shared_modules(target)
        return shared if self._own_embedding else [target.get_input_embeddings(), *shared]

    def embed(self, tokens: Tensor) -> Tensor:
        """The embeddings of tokens [...], which are never trained: [..., D]."""
        embedding: Any = self._embedding
        with torch.no_grad():
            if self._reads_table and has_norm(embedding):
                table = weight_of(embedding)
                found = nn.functional.embedding(tokens.to(table.device), table)
            else:
                found = embedding(tokens)
            return found.to(next(self.parameters()))  # its device and dtype

    @torch.no_grad()
    def size_of_embeddings(self) -> Tensor:
        """The root mean square of their entries, a scalar: targets differ widely in it."""
        place = device_of(self._embedding)
        some = torch.arange(min(4096, self.config.vocab_size), device=place)
        return self.embed(some).square().mean().sqrt().clamp(min=1e-6)
