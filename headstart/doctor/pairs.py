"""A target, its drafter and how prompts are rendered; and the same with one thing changed.

What is changed shares its weights with what it was made from, so that trying costs no memory but
where a type is converted.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headstart.heads import Drafter
from headstart.train.data.documents import Document
from headstart.train.data.rendering import ChatRenderer
from headstart.train.data.tokenising import Encoder
from headstart.train.recipe import Chat


@dataclass(frozen=True)
class Rendering:
    """How prompts become token ids.

    Attributes:
        how: `auto` or `plain`, see `ChatRenderer`.
        template: in place of the tokenizer's own.
        as_chats: whether a text is taken as a user's message.
        last: only so many tokens of a prompt, its last ones; None for all.
    """

    how: str = "auto"
    template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    as_chats: bool = False
    last: int | None = None

    def ids(self, tokenizer: PreTrainedTokenizerBase, document: Document) -> Tensor:
        """The token ids of a prompt.  # [P]"""
        messages = document.messages
        if messages is None and self.as_chats:
            messages = [{"role": "user", "content": document.text}]
        if messages is None:
            ids = Encoder(tokenizer)([(document.text, True)])[0].tolist()
        else:
            if self.template is not None:
                tokenizer = copy.copy(tokenizer)
                tokenizer.chat_template = self.template
            chat = Chat(system=self.system, template_kwargs=dict(self.template_kwargs))
            renderer = ChatRenderer(tokenizer, chat, self.how)
            ids = renderer.prompt(messages, document.tools)
        return torch.tensor(ids, dtype=torch.long)[-self.last if self.last else None :]


@dataclass(frozen=True)
class Pair:
    """What decodes: a target, a drafter bound to it, and how the prompts are rendered."""

    target: PreTrainedModel
    drafter: Drafter
    tokenizer: PreTrainedTokenizerBase
    rendering: Rendering = field(default_factory=Rendering)

    def rendered(self, **changes: Any) -> Pair:
        return replace(self, rendering=replace(self.rendering, **changes))

    def with_target(self, target: PreTrainedModel) -> Pair:
        """The same drafter on another target of the same sizes."""
        return replace(self, target=target, drafter=copy.copy(self.drafter).bind(target))

    def with_target_config(self, changes: Mapping[str, Any]) -> Pair:
        """The target with other settings of its text config, and the same weights."""
        model: Any = self.target
        config = copy.deepcopy(model.config)
        for name, value in changes.items():
            setattr(config.get_text_config(decoder=True), name, value)
        return self.with_target(_shared(model, type(model), config, model.state_dict()))

    def with_target_dtype(self, dtype: torch.dtype) -> Pair:
        model: Any = self.target
        state = {name: _cast(tensor, dtype) for name, tensor in model.state_dict().items()}
        return self.with_target(_shared(model, type(model), model.config, state))

    def with_drafter(
        self,
        changes: Mapping[str, Any] | None = None,
        vocabulary: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Pair:
        """The drafter with other settings of its config, another vocabulary, or in another type."""
        drafter: Any = self.drafter
        config = copy.deepcopy(drafter.config)
        for name, value in (changes or {}).items():
            setattr(config, name, value)
        state = drafter.state_dict()
        if vocabulary is not None:
            state["vocabulary"] = vocabulary.to(state["vocabulary"].device)
        if dtype is not None:
            state = {name: _cast(tensor, dtype) for name, tensor in state.items()}
        made = _shared(drafter, type(drafter), config, state)
        return replace(self, drafter=made.bind(self.target))


def _shared(model: Any, kind: Any, config: Any, state: dict[str, Tensor]) -> Any:
    """A model of another config around tensors that exist."""
    with init_empty_weights(include_buffers=False):
        made = kind(config)
    made.load_state_dict(state, assign=True)
    return made.to(model.device).eval()


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
