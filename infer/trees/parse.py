"""From a text to the policy that grows its trees; and the tree where none is given."""

import itertools
from collections.abc import Sequence
from typing import Any

from headstart.heads import Drafter, OptionError

from .adaptive import AdaptiveTree
from .policy import Policy
from .search import Beam, BestFirst
from .shapes import ADAPTIVE
from .static import StaticTree
from .texts import Kinds, check_static, read_tree
from .union import Union

_POLICIES = Kinds(StaticTree, BestFirst, Beam, Union, AdaptiveTree)


def parse_tree(text: str | Sequence[Sequence[int]] | Policy) -> Policy:
    """The policy that a text names, see `TREES`; a list of rank paths and a policy pass too.

    Raises:
        OptionError: anything else, and numbers that make no tree.

    >>> str(parse_tree("beam:3,4")), parse_tree("beam:3,4").nodes
    ('beam:3,4', 13)
    """
    if text == ADAPTIVE:
        raise OptionError(
            "tree 'adaptive' is for a drafter that has a tree; expected the tree to adapt, such as "
            "adaptive:chain:7."
        )
    if isinstance(text, str):
        return read_tree(text, _POLICIES)
    return text if isinstance(text, Policy) else StaticTree(text)


def default_tree(drafters: Sequence[Drafter], trees: Sequence[Any] = ()) -> Policy:
    """The tree of one drafter, the union of the trees of several; `plain` without drafter.

    Where a drafter has none in `trees`, its own default is taken.
    """
    parts = [
        parse_tree(tree or drafter.default_tree)
        for drafter, tree in itertools.zip_longest(drafters, trees[: len(drafters)])
    ]
    if len(parts) > 1:
        return Union(parts)
    return parts[0] if parts else parse_tree("plain")


def parse_static(text: str | Sequence[Sequence[int]] | Policy) -> StaticTree:
    """The same for trees whose shape is fixed; others are refused."""
    tree = parse_tree(text)
    check_static(tree)
    assert isinstance(tree, StaticTree)
    return tree
