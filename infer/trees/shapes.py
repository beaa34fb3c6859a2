"""The numbers of trees that are searched for, and the parts of a union; they need no torch."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

from headstart.heads import OptionError
from headstart.heads.core import counted

from .limits import check_size


class Shape(Protocol):
    """What is known of a tree from its text: N, the root counted, and the deepest level."""

    nodes: int
    max_depth: int


class BestFirstShape:
    """The numbers of `best-first:NODES,WIDTH,DEPTH[,FRONTIER]`, see `BestFirst`.

    Raises:
        OptionError: numbers that make no tree, leave nodes without a use, or exceed the `limits`.
    """

    def __init__(self, nodes: int, width: int, depth: int, frontier: int | None = None):
        self.nodes, self.width, self.max_depth, self.frontier = nodes, width, depth, frontier
        if min(nodes - 1, width, depth, frontier or 1) < 1:
            raise OptionError(
                f"tree {self} has no node beside the root; expected at least 2 nodes, and width, "
                "depth and frontier from 1."
            )
        check_levels(str(self), nodes, depth)
        check_size(str(self), nodes, depth)
        narrowest = frontier or min(width, nodes - 1)  # with any drafter at least so many
        check_size(str(self), candidates=self.ranked(narrowest))
        self.check_ranked(frontier or nodes - 1)

    def __str__(self) -> str:
        numbers = [self.nodes, self.width, self.max_depth, self.frontier]
        return "best-first:" + ",".join(str(number) for number in numbers if number is not None)

    def ranked(self, frontier: int, depth: int | None = None) -> int:
        """How many nodes are ranked down to a depth when so many of a level are extended."""
        extended, candidates = 1, 0
        for _ in range(self.max_depth if depth is None else depth):
            candidates += extended * self.width
            extended = min(frontier, extended * self.width)
        return candidates

    def check_ranked(self, frontier: int) -> None:
        """Refuse a tree of more nodes than are ranked."""
        candidates = self.ranked(frontier)
        if candidates < self.nodes - 1:
            raise OptionError(
                f"tree {self} never has more than {candidates + 1} nodes when {frontier} of a "
                "level are extended; lower its nodes, or raise width, depth or frontier."
            )


class BeamShape:
    """The numbers of `beam:WIDTH,LENGTH[,NODES]`, see `Beam`.

    Raises:
        OptionError: numbers that make no tree, leave nodes without a use, or exceed the `limits`.
    """

    def __init__(self, width: int, length: int, nodes: int | None = None):
        self.width, self.max_depth, self._cut = width, length, nodes
        most = 1 + width * length
        self.nodes = most if nodes is None else nodes
        if min(width, length) < 1 or not 1 < self.nodes <= most:
            raise OptionError(
                f"tree {self} makes no beams; expected width and length from 1, and from 2 to "
                "1 + width * length nodes."
            )
        check_levels(str(self), self.nodes, length)
        check_size(str(self), self.nodes, length, width * width * length)

    def __str__(self) -> str:
        cut = "" if self._cut is None else f",{self._cut}"
        return f"beam:{self.width},{self.max_depth}{cut}"


class UnionShape:
    """The parts of `TREE+TREE`, see `Union`.

    Raises:
        OptionError: fewer than two, one without a node, or together more than the `limits` allow.
    """

    parts: tuple[Any, ...]

    def __init__(self, parts: Sequence[Shape]):
        text = "+".join(map(_label, parts))
        if any(isinstance(part, AdaptiveShape) for part in parts):
            raise OptionError(
                f"tree {text} adapts the depth of a part, and all parts have one depth at a time; "
                f"write {AdaptiveShape.prefix} once, before the first part."
            )
        if len(parts) < 2 or any(part.nodes < 2 for part in parts):
            raise OptionError(
                f"tree {text} is no union; expected two or more trees, each with a node "
                "beside the root: leave out a drafter that is to propose nothing."
            )
        self.parts = tuple(parts)
        *firsts, self.nodes = accumulate((part.nodes - 1 for part in parts), initial=1)
        self.first_nodes = tuple(firsts)
        check_size(text, self.nodes)
        self.max_depth = max(part.max_depth for part in parts)

    def __str__(self) -> str:
        return "+".join(map(str, self.parts))

    @property
    def label(self) -> str:
        return "+".join(map(_label, self.parts))


ADAPTIVE = "adaptive"
"""The tree that a drafter has anyway, as an adaptive one."""


class AdaptiveShape:
    """`adaptive:TREE`, see `AdaptiveTree`: the numbers are those of the tree, its deepest one.

    Args:
        tree: None for the drafter's own, of which nothing is known but that it has a node.

    Raises:
        OptionError: a tree without a node beside the root, or one that is adaptive itself.
    """

    prefix = "adaptive:"
    tree: Any

    def __init__(self, tree: Shape | None = None):
        self.tree = tree
        if tree is None:
            self.nodes, self.max_depth, self.first_nodes = 2, 1, (1,)
            return
        if tree.nodes < 2 or isinstance(tree, AdaptiveShape):
            raise OptionError(
                f"tree {self.prefix}{tree} has no depth to adapt; expected one with a node beside "
                f"the root, such as {self.prefix}chain:7."
            )
        self.nodes, self.max_depth = tree.nodes, tree.max_depth
        self.first_nodes = getattr(tree, "first_nodes", (1,))

    def __str__(self) -> str:
        return ADAPTIVE if self.tree is None else f"{self.prefix}{self.tree}"

    @property
    def label(self) -> str:
        return ADAPTIVE if self.tree is None else self.prefix + _label(self.tree)


def _label(tree: Shape) -> str:
    return getattr(tree, "label", str(tree))


def check_levels(text: str, nodes: int, depth: int) -> None:
    """Refuse a tree whose nodes are too few for its depth; `text` is what the message calls it.

    The keys and values of a path are moved to the slots of the first nodes, so a path as deep as
    the tree needs as many nodes.

    Raises:
        OptionError: fewer nodes, the root not counted, than levels.
    """
    if nodes <= depth:
        raise OptionError(
            f"tree {text[:60]} has {counted(nodes - 1, 'node')} beside the root, and a depth of "
            f"{depth}; expected at least one node for each level: raise its nodes, or lower its "
            "depth."
        )


def check_grown_by(tree: Shape, depths: Sequence[int | None]) -> None:
    """Refuse a tree that these drafters cannot fill.

    Args:
        depths: of each drafter, the deepest level that it can propose for; None without a bound.

    Raises:
        OptionError: a tree with nodes and no drafter, another number of drafters than of parts, or
            a part that is deeper than its drafter.

    >>> try:
    ...     check_grown_by(BeamShape(2, 5), [3])
    ... except OptionError as error:
    ...     print(str(error).partition(";")[0])
    tree beam:2,5 is 5 deep, but the drafter proposes 3 tokens
    """
    found = len(depths)
    if isinstance(tree, AdaptiveShape):
        if tree.tree is None and found:
            return
        tree = tree.tree or tree
    text = _label(tree)
    if isinstance(tree, UnionShape):
        if found != len(tree.parts):
            drafters = counted(found, "drafter") if found else "no drafters"
            raise OptionError(
                f"tree {text} has {len(tree.parts)} parts, found {drafters}; give a drafter for "
                "each part, in the same order."
            )
        for part, depth in zip(tree.parts, depths, strict=True):
            check_grown_by(part, [depth])
        return
    if not found and tree.nodes > 1:
        raise OptionError(
            f"tree {text} needs a drafter, found none; give one, or use tree 'plain'."
        )
    if found > 1 and tree.nodes > 1:
        raise OptionError(
            f"tree {text} is grown by one drafter, found {found}; give a tree with a part for "
            f"each, such as {'+'.join(['chain:4'] * found)}."
        )
    deepest = depths[0] if found == 1 else None
    if deepest is not None and tree.max_depth > deepest:
        raise OptionError(
            f"tree {text} is {tree.max_depth} deep, but the drafter proposes "
            f"{counted(deepest, 'token')}; use a shallower tree or train more heads."
        )
