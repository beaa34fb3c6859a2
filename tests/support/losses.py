"""Just enough of a language model to compute a loss with."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


def embedding_target(width: int = 11, size: int = 6, **more: Any) -> Any:
    """Its features are its embeddings; `kind` is what it does to its logits, scaled or capped."""
    embedding, layer = nn.Embedding(width, size), nn.Linear(size, width, bias=False)
    config = SimpleNamespace(vocab_size=width, hidden_size=size, model_type="tiny", **more)
    config.get_text_config = lambda decoder: config

    class Target(nn.Module):
        body: Any
        last: Any

        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layer = embedding, layer
            self.config, self.device = config, torch.device("cpu")

        def get_input_embeddings(self) -> nn.Module:
            return self.embedding

        def get_output_embeddings(self) -> nn.Module:
            return self.layer

        def get_decoder(self) -> Any:
            return self.body

        def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
            logits = self.layer(self.body(input_ids)[0])
            return SimpleNamespace(logits=self.last(logits))

    made = Target()
    made.body = nn.Sequential(embedding, _Tuple())
    made.last = {"scaled": lambda x: x * 3, "capped": lambda x: torch.tanh(x / 2) * 2}.get(
        more.get("kind", ""), lambda x: x
    )
    return made.requires_grad_(False)


class _Tuple(nn.Module):
    def forward(self, states: Tensor) -> tuple[Tensor]:
        return (states,)
