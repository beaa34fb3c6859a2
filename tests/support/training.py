"""Drafters as a recipe makes them, and a validation that measures nothing."""

from typing import Any

import torch

from headstart.heads import TrainableDrafter
from headstart.train.data.training_rows import Rows
from headstart.train.drafter_stage import make_drafter
from headstart.train.recipe import parse_recipe
from tests.support.counting import counting_rows


def rows(count: int = 10, length: int = 12) -> Rows:
    lengths = torch.full((count,), length).int()
    return Rows(counting_rows(count, length).int(), lengths, torch.full_like(lengths, 2))


IDLE = {"tau": 1.0, "acceptance_by_depth": [], "tree": []}


def drafter_of(target: Any, family: str, **options: Any) -> TrainableDrafter:
    recipe = {"name": "r", "target": {"model": "m"}, "drafter": {"family": family, **options}}
    drafter = make_drafter(parse_recipe(recipe), target, rows())
    assert isinstance(drafter, TrainableDrafter)
    return drafter
