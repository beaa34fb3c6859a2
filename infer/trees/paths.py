"""The shape of a static tree, as rank paths and as text; it needs no torch."""

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Self

from headstart.heads import OptionError
from headstart.heads.core import parents_of_paths

from .limits import check_paths, check_size


class RankPaths:
    """A tree whose shape is fixed beforehand.

    >>> RankPaths.cartesian([2, 1]).paths
    ((0,), (1,), (0, 0), (1, 0))
    >>> str(RankPaths([[0], [1], [0, 0]]))
    '[[1],[0,0]]'
    """

    def __init__(self, paths: Sequence[Sequence[int]]):
        """Build from rank paths, see `parents_of_paths`; no path at all is plain decoding.

        Raises:
            OptionError: not a list of non-empty lists of whole numbers from 0, or a tree beyond
                the `limits`.
        """
        try:
            good = all(path and all(type(i) is int and i >= 0 for i in path) for path in paths)
        except TypeError:
            good = False
        if not good:
            raise OptionError(
                "a tree is a list of non-empty paths of ranks from 0, such as [[0], [1], [0, 0]]; "
                f"found {str(paths)[:60]}."
            )
        check_paths(paths)
        self.parents, self.ranks, self.depths = parents_of_paths(paths)
        self.max_depth = max(self.depths)
        self.nodes = len(self.parents)
        self.width = max(Counter(self.parents[1:]).values(), default=0)
        self.in_place = self.nodes == self.max_depth + 1

    @classmethod
    def chain(cls, length: int) -> Self:
        """One path of the best token at each depth."""
        check_size(f"chain:{length}", length + 1, length)
        return cls.cartesian([1] * length)

    @classmethod
    def cartesian(cls, widths: Sequence[int]) -> Self:
        """Every node of depth d - 1 has widths[d - 1] children (SpecInfer's expansion)."""
        nodes, level = 1, 1
        for depth, width in enumerate(widths, start=1):
            level *= width
            nodes += level
            text = f"cartesian:{','.join(map(str, widths[:9]))}{',…' if len(widths) > 9 else ''}"
            check_size(text, nodes, depth)
        return cls(list(product(*map(range, widths))) if widths else [])

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The rank path of every node without the root."""
        found: list[tuple[int, ...]] = [()]
        for parent, rank in zip(self.parents[1:], self.ranks[1:], strict=True):
            found.append((*found[parent], rank))
        return tuple(found[1:])

    def __str__(self) -> str:
        """`plain`, `chain:…`, `cartesian:…`, or the rank paths of the leaves of another tree."""
        counts = [self.depths.count(depth) for depth in range(self.max_depth + 1)]
        widths = [below // above for above, below in pairwise(counts)]
        if self.nodes == 1:
            return "plain"
        if not all(widths) or RankPaths.cartesian(widths).paths != self.paths:
            leaves = [path for node, path in enumerate(self.paths, 1) if node not in self.parents]
            return json.dumps(leaves, separators=(",", ":"))
        if self.in_place:
            return f"chain:{self.max_depth}"
        return "cartesian:" + ",".join(map(str, widths))

    @property
    def label(self) -> str:
        """`sparse` and the nodes of each level for a list of rank paths, else the text form."""
        if not (text := str(self)).startswith("["):
            return text
        counts = (self.depths.count(depth) for depth in range(1, self.max_depth + 1))
        return "sparse " + "/".join(map(str, counts))
