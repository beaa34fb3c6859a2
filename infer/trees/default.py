"""The tree that is decoded with where none is given."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from headstart.heads import Drafter

from .parse import parse_tree
from .policy import Policy
from .union import Union


def default_tree(drafters: Sequence[Drafter], trees: Sequence[Any] = ()) -> Policy:
    """The tree of one drafter, the union of the trees of several; `plain` without drafter.

    Args:
        trees: of the drafters, in their order; where it is None or missing, the deepest chain that
            the drafter can propose, of 4 where it has no bound.
    """
    parts = [
        parse_tree(tree or f"chain:{drafter.max_depth or 4}")
        for drafter, tree in itertools.zip_longest(drafters, trees[: len(drafters)])
    ]
    if len(parts) > 1:
        return Union(parts)
    return parts[0] if parts else parse_tree("plain")
