"""Small training runs: drafters as a recipe makes them, their trainers, and runs cut in two."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headstart.heads import Drafter, TrainableDrafter
from headstart.train.data.training_rows import Row, Rows
from headstart.train.drafter_stage import make_drafter
from headstart.train.fit.arguments import training_arguments
from headstart.train.fit.joint import training_classes
from headstart.train.fit.trainer import DrafterTrainer
from headstart.train.processes.agreement import wait_for_all
from headstart.train.recipe import Train, parse_recipe
from tests.support.counting import counting_rows

IDLE = {"tau": 1.0, "acceptance_by_depth": [], "tree": []}
"""What a validation that measures nothing returns."""

Validate = Callable[[Drafter], dict[str, Any]]


def rows(count: int = 10, length: int = 12, supervised: Any = None) -> Rows:
    """Rows that count; `supervised` [count, length] bool, by default all after two tokens."""
    taught = [np.arange(length) >= 2] * count if supervised is None else supervised
    tokens = counting_rows(count, length).int().numpy()
    texts = zip(range(count), tokens, np.array(taught), strict=True)
    return Rows.of(Row(str(number), *text) for number, *text in texts)


@dataclass
class Columns:
    """Rows beside each other, padded with 0."""

    tokens: Tensor  # [n, T] int32
    lengths: Tensor  # [n]
    prompt_lengths: Tensor  # [n], the tokens before the first that is supervised
    supervised: Tensor  # [n, T] bool


def columns(rows: Rows | Sequence[Row]) -> Columns:
    found = [rows.row(i) for i in range(len(rows))] if isinstance(rows, Rows) else rows
    tokens = pad_sequence([torch.tensor(row.tokens) for row in found], batch_first=True)
    supervised = pad_sequence([torch.tensor(row.supervised) for row in found], batch_first=True)
    lengths = torch.tensor([len(row.tokens) for row in found])
    return Columns(tokens, lengths, supervised.byte().argmax(1), supervised)


def drafter_of(target: Any, family: str, **options: Any) -> TrainableDrafter:
    recipe = {"name": "r", "target": {"model": "m"}, "drafter": {"family": family, **options}}
    drafter = make_drafter(parse_recipe(recipe), target, rows())
    assert isinstance(drafter, TrainableDrafter)
    return drafter


def trainer_of(
    drafter: TrainableDrafter,
    folder: Path,
    spec: Train,
    validate: Validate,
    data: Rows | None = None,
    evaluation: dict[str, Any] | None = None,
    **arguments: Any,
) -> DrafterTrainer:
    """The trainer that a recipe's run would use, by default on `rows()`."""
    module_class, trainer_class = training_classes(drafter)
    module = module_class(drafter.target, drafter, spec.head_decay, spec.loss)
    args = training_arguments(spec, folder, seed=3, **arguments)
    return trainer_class(
        module, args, data or rows(), spec, validate, progress=False, evaluation=evaluation
    )


class Killed(Exception):
    """Ends a training run."""


def killed_and_resumed(
    trainer: Callable[[Path, Validate], DrafterTrainer], validate: Validate, root: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The reports of a run in `root/whole`, and of one in `root/cut` that is resumed.

    The latter was ended at its third validation, when it had two checkpoints.
    """
    whole = trainer(root / "whole", validate).fit()
    wait_for_all()
    calls = []

    def die_in_the_third(drafter: Drafter) -> dict[str, Any]:
        calls.append(len(calls))
        if len(calls) == 3:
            raise Killed
        return validate(drafter)

    with pytest.raises(Killed):
        trainer(root / "cut", die_in_the_third).fit()
    wait_for_all()  # where there are several processes: what one of them writes is there
    names = [path.name for path in (root / "cut").iterdir()]
    assert "checkpoint-8" in names and "checkpoint-12" not in names
    torch.manual_seed(99)  # nothing may depend on what the new process happens to draw
    return whole, trainer(root / "cut", validate).fit()


def check_same_checkpoints(root: Path, *files: str) -> None:
    """Files of the last checkpoint are bit for bit the same in `root/whole` and `root/cut`."""
    for file in files:
        one, two = (tensors(root / run / "checkpoint-12" / file) for run in ("whole", "cut"))
        assert one.keys() == two.keys()
        assert all(torch.equal(tensor, two[name]) for name, tensor in one.items()), file


def tensors(path: Path) -> dict[str, Tensor]:
    """Those of a file of weights, or of an optimizer's state."""
    if path.suffix == ".safetensors":
        return load_file(path)
    states = torch.load(path, weights_only=True)["state"]
    return {f"{key} {name}": value for key, s in states.items() for name, value in s.items()}
