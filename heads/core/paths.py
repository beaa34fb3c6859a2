"""Rank paths, in which the shape of a tree is written."""

from collections.abc import Sequence


def parents_of_paths(paths: Sequence[Sequence[int]]) -> tuple[list[int], list[int], list[int]]:
    """Parents (-1 at the root), ranks (0 there) and depths of N nodes, parents first, from paths.

    A path of ranks stands for each node but the root, such as `[[0], [1], [0, 0]]`: the best child,
    the second child, and the best child of the best child. Missing prefixes are added.

    >>> parents_of_paths([[0, 1], [1]])
    ([-1, 0, 0, 1], [0, 0, 1, 1], [0, 1, 1, 2])
    """
    closed = {tuple(path[: i + 1]) for path in paths for i in range(len(path))}
    ordered = [(), *sorted(closed, key=lambda path: (len(path), path))]
    index = {path: i for i, path in enumerate(ordered)}
    parents = [-1, *(index[path[:-1]] for path in ordered[1:])]
    return parents, [0, *(path[-1] for path in ordered[1:])], [len(path) for path in ordered]
