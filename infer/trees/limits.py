"""The largest trees: what is asked beyond them is refused before any of it is built.

They are several times what pays on any machine: the planner considers up to 768 nodes, and only
for a target whose weights are streamed from CPU memory. A tree comes from files of others too.
"""

from collections.abc import Sequence

from headstart.heads import OptionError

NODES = 4096
"""The most nodes of a tree, the root counted; so no path has a rank from here on."""

DEPTH = 256
"""The deepest level."""

CANDIDATES = 2**20
"""The most nodes that a search ranks in a round, to keep the best of them."""


def check_size(text: str, nodes: int = 0, depth: int = 0, candidates: int = 0) -> None:
    """Refuse a tree beyond the limits; `text` is what it is called in the message.

    Raises:
        OptionError: the first of the numbers that is above its limit.

    >>> try:
    ...     check_size("chain:300", nodes=301, depth=300)
    ... except OptionError as error:
    ...     print(error)
    tree chain:300 has a depth of 300; expected at most 256: give a smaller tree.
    """
    for said, found, most in (
        ("a depth of {}", depth, DEPTH),
        ("{} nodes", nodes, NODES),
        ("{} nodes to choose from", candidates, CANDIDATES),
    ):
        if found > most:
            found_in = f"tree {text[:60]} has {said.format(_short(found))}"
            raise OptionError(f"{found_in}; expected at most {most}: give a smaller tree.")


def check_paths(paths: Sequence[Sequence[int]]) -> None:
    """Refuse rank paths beyond the limits, at a cost of no more than reading those within them.

    Raises:
        OptionError: too many paths or nodes, or one too deep or of too high a rank.
    """
    if len(paths) >= NODES:
        raise OptionError(
            f"a tree has {len(paths)} rank paths; expected fewer than {NODES}, its most nodes."
        )
    if (deepest := max(map(len, paths), default=0)) > DEPTH:
        raise OptionError(f"a tree has a path of {deepest} ranks; expected at most {DEPTH}.")
    if (rank := max((max(path) for path in paths), default=0)) >= NODES:
        raise OptionError(f"a tree has a rank of {_short(rank)}; expected less than {NODES}.")
    nodes = 1  # the root; prefixes that are left out count too
    top: dict[int, dict] = {}
    for path in paths:
        here = top
        for rank in path:
            nodes += rank not in here
            here = here.setdefault(rank, {})
        check_size("of rank paths", nodes)


def _short(number: int) -> str:
    """A number in digits, or its magnitude where it has many."""
    return str(number) if number < 10**12 else f"10^{len(str(number)) - 1}"
