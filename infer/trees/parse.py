"""How trees are written: every text form, read; and the tree where none is given."""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headstart.heads import Drafter, OptionError

from .limits import check_size
from .policy import Policy
from .search import Beam, BestFirst
from .static import StaticTree
from .union import Union

TREES = (
    "plain, chain:DEPTH, cartesian:WIDTH,WIDTH,…, best-first:NODES,WIDTH,DEPTH[,FRONTIER], "
    "beam:WIDTH,LENGTH[,NODES], a JSON list of rank paths such as [[0],[1],[0,0]], or the path of "
    "a .json file that holds one; with several drafters a tree for each, joined by +"
)

_MOST_BYTES = 2**24  # of a file; the longest list of paths within the limits is far shorter

_NUMBERED: dict[str, Callable[..., Policy]] = {
    "chain": StaticTree.chain,
    "cartesian": lambda *widths: StaticTree.cartesian(widths),
    "best-first": BestFirst,
    "beam": Beam,
}


def parse_tree(text: str | Sequence[Sequence[int]] | Policy) -> Policy:
    """The policy that a text names, see `TREES`; a list of rank paths and a policy pass too.

    Raises:
        OptionError: anything else, and numbers that make no tree.

    >>> str(parse_tree("beam:3,4")), parse_tree("beam:3,4").nodes
    ('beam:3,4', 13)
    >>> parse_tree("beam:3,4+chain:2").nodes
    15
    """
    if not isinstance(text, str):
        return text if isinstance(text, Policy) else StaticTree(text)
    if (tree := _parse_part(text)) is not None:
        return tree
    if "+" in text:
        return Union([parse_tree(part) for part in text.split("+")])
    if sparse_nodes(text):
        raise OptionError(
            f"tree {text!r} is chosen for a drafter by measuring it, which training does; expected "
            "the tree itself, such as the artifact's tree.json."
        )
    raise OptionError(f"tree is {text[:60]!r}; expected {TREES}.")


def default_tree(drafters: Sequence[Drafter], trees: Sequence[Any] = ()) -> Policy:
    """The tree of one drafter, the union of the trees of several; `plain` without drafter.

    Where a drafter has none in `trees`, the deepest chain that it can propose; of 4 without bound.
    """
    parts = [
        parse_tree(tree or f"chain:{drafter.max_depth or 4}")
        for drafter, tree in itertools.zip_longest(drafters, trees[: len(drafters)])
    ]
    if len(parts) > 1:
        return Union(parts)
    return parts[0] if parts else parse_tree("plain")


def parse_static(text: str | Sequence[Sequence[int]] | Policy) -> StaticTree:
    """The same for trees whose shape is fixed; others are refused."""
    tree = parse_tree(text)
    if isinstance(tree, StaticTree):
        return tree
    raise OptionError(f"tree is {tree}; expected plain, chain, cartesian, or rank paths.")


def sparse_nodes(text: object) -> int | None:
    """N of `sparse:N`, the best static tree of N nodes for ranks yet to be measured; else None.

    Raises:
        OptionError: a number of nodes that makes no tree, or one beyond the `limits`.
    """
    if not isinstance(text, str) or not text.startswith("sparse:"):
        return None
    number = text.partition(":")[2]
    if not number.isdecimal() or len(number) > 9 or int(number) < 2:
        raise OptionError(
            f"tree is {text!r}; expected sparse:N with N nodes, at least 2 with the root."
        )
    check_size(text, int(number))
    return int(number)


def _parse_part(text: str) -> Policy | None:
    """A tree of one drafter; None for a text that is none."""
    name, _, arguments = text.partition(":")
    try:
        if text == "plain":
            return StaticTree([])
        if name in _NUMBERED:
            numbers = [int(number) for number in arguments.split(",")]
            if name in ("chain", "cartesian") and min(numbers) < 1:
                return None
            return _NUMBERED[name](*numbers)
        if text.endswith(".json"):
            return StaticTree(_read(Path(text)))
        if text.startswith("["):
            return StaticTree(json.loads(text))
    except OptionError:
        raise
    except (ValueError, TypeError, OSError, RecursionError):
        pass
    return None


def _read(path: Path) -> list:
    """The list in a file of rank paths.

    Raises:
        OptionError: there is no such file, or it holds something else.
    """
    if not path.is_file():
        raise OptionError(f"tree {path} is no file; expected {TREES}.")
    if path.stat().st_size > _MOST_BYTES:
        raise OptionError(f"tree {path} is larger than any tree; expected a list of rank paths.")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        said = " ".join(str(error).split())
        raise OptionError(f"tree {path} cannot be read ({said}); expected rank paths.") from error
    if not isinstance(found, list):
        raise OptionError(
            f"tree {path} holds a {type(found).__name__}; expected a list of rank paths such as "
            "[[0],[1],[0,0]]."
        )
    return found
