"""A model that writes stories, and openings of stories for it to continue."""

from typing import Any

import torch
from torch import Tensor

import headstart

OPENINGS = (
    "Once upon a time, there was a little girl named Lily. She loved to play with her dog in the "
    "park.",
    "One day, a boy named Tim found a red ball under the big tree.",
    "There was a cat who lived in a small house with an old man.",
    "Tom and Sue were best friends. They liked to run and jump.",
    "A big bear was looking for honey in the forest.",
    "Mia had a new toy car and she wanted to show it to her mom.",
    "The sun was hot and the birds were singing. Ben went to the lake.",
    "Once there was a princess who was very sad because she lost her ring.",
    "Sam saw a frog near the pond. The frog said hello.",
    "Anna and her dad went to the store to buy apples and bread.",
    "In a small town there was a kind baker named Joe.",
    "The little fish wanted to see the world outside the pond.",
)


def story_writer(name: str) -> tuple[Any, list[Tensor]]:
    """A model, which no token ends the texts of, and the tokens [P] of each opening."""
    loaded = headstart.load(name, compile=False)
    model, tokenizer = loaded.model, loaded.tokenizer
    assert tokenizer is not None
    model.generation_config.eos_token_id = None
    return model, [torch.tensor(tokenizer(text)["input_ids"]) for text in OPENINGS]
