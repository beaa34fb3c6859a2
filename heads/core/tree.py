"""The token tree: what a drafter proposes and a target verifies in one forward.

Node 0 is the root: the last committed token, whose keys and values are not cached yet. Parents come
before their children, and siblings in the order in which they were drawn. B batch, N nodes (the
root counted), D the largest depth, G proposal rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .topology import Topology


@dataclass(slots=True)
class TokenTree:
    """A batch of token trees of N nodes.

    Attributes:
        tokens: [B, N] int64; column 0 is the root.
        topology: parents, depth, ancestors and paths.
        valid: [B, N] bool, or None when every node may be accepted.
        proposal_row: [B, N] int64, the proposal row a node was drawn from; -1 marks a point mass.
        logits: [B, G, Vd] the proposals' raw logits, only for rules that need them; None when every
            node is a point mass.
        vocabulary: [Vd] target ids that the columns of `logits` stand for; 0 … V - 1 when None.
        replacement: whether siblings were drawn with replacement.
        turns: with several drafters, the numbers of the root's children at which each drafter's
            own begin; siblings from there on were drawn from that drafter's row.
    """

    tokens: Tensor
    topology: Topology
    valid: Tensor | None
    proposal_row: Tensor
    logits: Tensor | None = None
    vocabulary: Tensor | None = None
    replacement: bool = False
    turns: tuple[int, ...] = ()

    @property
    def nodes(self) -> int:
        """N, the root counted."""
        return self.tokens.shape[1]


def parents_of_paths(paths: Sequence[Sequence[int]]) -> tuple[list[int], list[int], list[int]]:
    """Turn rank paths into nodes, parents first, siblings by rank.

    Args:
        paths: one path of ranks per node without the root, such as `[[0], [1], [0, 0]]`: the best
            child, the second child, and the best child of the best child. Missing prefixes are
            added.

    Returns:
        parents (with -1 for the root), ranks (0 for the root) and depths, each of N entries.

    >>> parents_of_paths([[0, 1], [1]])
    ([-1, 0, 0, 1], [0, 0, 1, 1], [0, 1, 1, 2])
    """
    closed = {tuple(path[: i + 1]) for path in paths for i in range(len(path))}
    ordered = [(), *sorted(closed, key=lambda path: (len(path), path))]
    index = {path: i for i, path in enumerate(ordered)}
    parents = [-1, *(index[path[:-1]] for path in ordered[1:])]
    return parents, [0, *(path[-1] for path in ordered[1:])], [len(path) for path in ordered]
