"""What `headstart bench` measures: the options of the command line, or the keys of a YAML file."""

# No `from __future__ import annotations`: `@strict` reads annotations, which must not be strings.
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import as_validated_field, strict

from headstart.terminal import UsageError
from headstart.train.recipe.fields import nearest, positive

AGAINST = ("generate", "assistant", "lookup")
"""Transformers' own ways: plain `generate`, with `assistant_model`, with prompt lookup."""


@as_validated_field
def _against_field(names: list[str]) -> None:
    for name in names:
        if name not in AGAINST:
            near = nearest(name, AGAINST)
            raise ValueError(f"found {name!r}{near}; expected some of {', '.join(AGAINST)}")


@as_validated_field
def _temperatures_field(values: list[int | float]) -> None:
    for value in values:
        if isinstance(value, bool) or not (isfinite(value) and value >= 0):
            raise ValueError(f"found {value!r}, expected finite numbers from 0")


@as_validated_field
def _sizes_field(values: list[int]) -> None:
    for value in values:
        if isinstance(value, bool) or value < 1:
            raise ValueError(f"found {value!r}, expected whole numbers from 1")


@as_validated_field
def _drafters_field(names: list[str | list[str]]) -> None:
    if any(isinstance(name, list) and not name for name in names):
        raise ValueError("found an empty list, expected drafters that decode together")


@strict
@dataclass
class Matrix:
    """A measurement of every drafter with every tree, rule, temperature and batch size.

    Attributes:
        drafters: each a name, or a list of names that decode together.
        trees: for each drafter; its own plan or tree where there is none.
        rules: for temperatures above 0.
        roofline: whether rounds are compared with the least time that reading their weights takes.
        assistant: the `assistant_model`; where it is null, the model of a draft model.
    """

    prompts: str
    target: str | None = None
    drafters: list[str | list[str]] = _drafters_field(default_factory=list)  # noqa: RUF009
    trees: list[str] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    expansion: str | None = None
    temperatures: list[int | float] = _temperatures_field(default_factory=lambda: [0.0])  # noqa: RUF009
    batch_sizes: list[int] = _sizes_field(default_factory=lambda: [1])  # noqa: RUF009
    against: list[str] = _against_field(default_factory=lambda: ["generate"])  # noqa: RUF009
    assistant: str | None = None
    limit: int | None = positive(None)
    prefix_tokens: int | None = positive(None)
    new_tokens: int = positive(128)
    repeats: int = positive(3)
    seed: int = 0
    roofline: bool = False

    def __post_init__(self) -> None:
        for name in ("temperatures", "batch_sizes"):
            if not getattr(self, name):
                raise UsageError(f"{name}: an empty list; leave the key out for its default")

    @property
    def sets(self) -> list[list[str]]:
        """The drafters that decode together, each time."""
        return [[each] if isinstance(each, str) else each for each in self.drafters]


def trees_of(matrix: Matrix, count: int) -> list[str]:
    """The trees that so many drafters grow together: those with a part for each, and `plain`; and
    `adaptive`, which is made of their own."""
    from headstart.infer.trees.shapes import ADAPTIVE
    from headstart.infer.trees.texts import read_tree

    shapes = {tree: read_tree(tree) for tree in matrix.trees}
    parts = {tree: len(getattr(of, "first_nodes", (1,))) for tree, of in shapes.items()}
    return [
        tree
        for tree, of in shapes.items()
        if parts[tree] == max(count, 1) or of.nodes == 1 or (tree == ADAPTIVE and count)
    ]


def check_trees(matrix: Matrix) -> None:
    """Refuse trees that no drafters grow, and drafters without a tree.

    Raises:
        UsageError: one of them.
    """
    grown = set[str]()
    for names in matrix.sets or [[]]:
        own = trees_of(matrix, len(names))
        if matrix.trees and not own:
            example = "+".join(["chain:4"] * len(names))
            trees = ", ".join(matrix.trees)
            if len(names) == 1:
                raise UsageError(
                    f"{names[0]} decodes alone, and no tree of {trees} is for one drafter; give "
                    f"one, such as {example}"
                )
            raise UsageError(
                f"{' and '.join(names)} decode together, and no tree of {trees} has a part for "
                f"each; give one, such as {example}"
            )
        grown |= {*own}
    for tree in matrix.trees:
        if tree not in grown:
            raise UsageError(
                f"tree {tree} has a part for each of several drafters that decode together, and "
                "as many are not given; give them, or leave it out"
            )


def read_matrix(path: Path | None, given: dict[str, Any]) -> Matrix:
    """The matrix of a YAML file, if any, with keys of the command line in place of its own.

    Raises:
        RecipeError: a file that is not YAML, an unknown key, a value of another kind or range.
        UsageError: a folder, or no prompts.
    """
    from headstart.train.recipe.files import read_yaml
    from headstart.train.recipe.loading import parse_section

    if path is not None and path.is_dir():
        raise UsageError(f"{path} is a folder; expected a YAML file (a drafter follows --drafter)")
    data: Any = {} if path is None else read_yaml(path.read_bytes(), str(path))
    whole = "headstart bench" if path is None else str(path)
    if isinstance(data, dict):
        data = data | given
        if "prompts" not in data and data.keys() <= Matrix.__dataclass_fields__.keys():
            option = "give --prompts FILE, or a YAML file with the key prompts"
            raise UsageError(f"no prompts to measure on; {option}")
    return parse_section(Matrix, data, whole=whole)
