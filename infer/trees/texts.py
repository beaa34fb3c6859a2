"""How trees are written: every text form, read without torch."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.heads import OptionError

from .limits import check_size
from .paths import RankPaths
from .shapes import ADAPTIVE, AdaptiveShape, BeamShape, BestFirstShape, UnionShape

TREES = (
    "plain, chain:DEPTH, cartesian:WIDTH,WIDTH,…, best-first:NODES,WIDTH,DEPTH[,FRONTIER], "
    "beam:WIDTH,LENGTH[,NODES], a JSON list of rank paths such as [[0],[1],[0,0]], or the path of "
    "a .json file that holds one; with several drafters a tree for each, joined by +; and "
    "adaptive:TREE, one of these whose depth follows what is accepted, or adaptive alone"
)

_MOST_BYTES = 2**24  # of a file; the longest list of paths within the limits is far shorter


@dataclass(frozen=True)
class Kinds:
    """What a text is made into: shapes alone, or the policies that grow such trees."""

    static: type[RankPaths] = RankPaths
    best_first: type[BestFirstShape] = BestFirstShape
    beam: type[BeamShape] = BeamShape
    union: type[UnionShape] = UnionShape
    adaptive: type[AdaptiveShape] = AdaptiveShape

    def numbered(self, name: str) -> Callable[..., Any]:
        """What makes a tree of the numbers after its name."""
        return {
            "chain": self.static.chain,
            "cartesian": lambda *widths: self.static.cartesian(widths),
            "best-first": self.best_first,
            "beam": self.beam,
        }[name]


SHAPES = Kinds()


def read_tree(text: str, kinds: Kinds = SHAPES) -> Any:
    """The tree that a text names, see `TREES`, as one of `kinds`.

    Raises:
        OptionError: anything else, and numbers that make no tree.

    >>> read_tree("beam:3,4+chain:2").nodes
    15
    """
    if text == ADAPTIVE:
        return AdaptiveShape()
    if text.startswith(AdaptiveShape.prefix):
        return kinds.adaptive(read_tree(text.removeprefix(AdaptiveShape.prefix), kinds))
    if (tree := _part(text, kinds)) is not None:
        return tree
    if "+" in text:
        return kinds.union([read_tree(part, kinds) for part in text.split("+")])
    if sparse_nodes(text):
        raise OptionError(
            f"tree {text!r} is chosen for a drafter by measuring it, which training does; expected "
            "the tree itself, such as the artifact's tree.json."
        )
    raise OptionError(f"tree is {text[:60]!r}; expected {TREES}.")


def check_static(tree: object) -> None:
    """Refuse a tree whose shape is not fixed.

    Raises:
        OptionError: it is found by a search, or grown by several drafters.
    """
    if not isinstance(tree, RankPaths):
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


def _part(text: str, kinds: Kinds) -> Any:
    """A tree of one drafter; None for a text that is none."""
    name, _, arguments = text.partition(":")
    try:
        if text == "plain":
            return kinds.static([])
        if name in ("chain", "cartesian", "best-first", "beam"):
            numbers = [int(number) for number in arguments.split(",")]
            if name in ("chain", "cartesian") and min(numbers) < 1:
                return None
            return kinds.numbered(name)(*numbers)
        if text.endswith(".json"):
            return kinds.static(_read(Path(text)))
        if text.startswith("["):
            return kinds.static(json.loads(text))
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
