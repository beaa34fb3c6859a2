"""Token trees drawn on a terminal: the shape of one, and a round that was replayed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from rich.text import Text
from rich.tree import Tree

from headstart.heads import OptionError
from headstart.heads.core import counted
from headstart.infer import Policy, StaticTree, Union
from headstart.infer.replay import ReplayedRound
from headstart.terminal import visible

from .drafted_text import colour


def draw_shape(policy: Policy, acceptance: Sequence[Sequence[float]] | None = None) -> Tree:
    """A static tree: each node's depth and rank, and how often it is expected to be accepted.

    Args:
        acceptance: [K][W], a plan's: how often the true token stood at each rank, by depth.

    Raises:
        OptionError: the tree has another shape in each round.
    """
    parts = _static_parts(policy)
    root = Tree(Text(f"root · {policy.label} · {counted(policy.nodes, 'node')}", "bold"))
    for number, part in enumerate(parts):
        below = root
        if len(parts) > 1:
            below = root.add(Text(f"drafter {number + 1} · {part.label}", "dim"))
        drawn = [below]
        for path, parent in zip(part.paths, part.parents[1:], strict=True):
            drawn.append(drawn[parent].add(_shape_label(path, acceptance)))
    return root


def described_shape(
    policy: Policy, acceptance: Sequence[Sequence[float]] | None = None
) -> dict[str, Any]:
    """The same as plain data: of each node its rank path and, where known, two shares.

    `after_parent` is how often it is accepted where its parent is, `of_rounds` how often at all.
    """
    parts = []
    for part in _static_parts(policy):
        nodes = [
            {"path": list(path)}
            | dict(zip(("after_parent", "of_rounds"), _shares(path, acceptance), strict=False))
            for path in part.paths
        ]
        parts.append({"tree": part.label, "nodes": nodes})
    return {"tree": policy.label, "nodes": policy.nodes, "parts": parts}


def _static_parts(policy: Policy) -> list[StaticTree]:
    """The tree of each drafter. Raises an OptionError where one has no shape of its own."""
    found = []
    for part in policy.parts if isinstance(policy, Union) else (policy,):
        if not isinstance(part, StaticTree):
            raise OptionError(
                f"tree {part.label} is grown anew in each round; give --prompt to look at one "
                "round, or --tree with a static tree."
            )
        found.append(part)
    return found


def _shares(path: tuple[int, ...], acceptance: Sequence[Sequence[float]] | None) -> list[float]:
    """How often a node is accepted after its parent, and of all rounds; nothing without a plan."""
    if acceptance is None:
        return []
    shares = []
    for level, rank in enumerate(path):
        row = acceptance[min(level, len(acceptance) - 1)]
        shares.append(row[rank] if rank < len(row) else 0.0)
    return [shares[-1], math.prod(shares)]


def _shape_label(path: tuple[int, ...], acceptance: Sequence[Sequence[float]] | None) -> Text:
    depth = len(path)
    label = Text(f"depth {depth}", colour(depth)).append(f" · rank {path[-1]}", "dim")
    if shares := _shares(path, acceptance):
        label.append(f" · {shares[0]:.0%} after its parent, {shares[1]:.1%} of rounds")
    return label


def draw_round(found: ReplayedRound, name: Callable[[int], str], drafters: int = 1) -> Tree:
    """The nodes of a round with their probabilities, what was accepted, and why.

    Args:
        name: what a token is called.
    """
    nodes: dict[int, Tree] = {}
    root = found.nodes[0]
    last = (" the last token of the text", "dim")
    nodes[0] = Tree(Text.assemble((name(root.token), "bold"), last))
    for node in found.nodes[1:]:
        label = Text("✓ " if node.accepted else "✗ ", "bold" if node.accepted else "dim")
        style = colour(node.depth) if node.accepted else "dim"
        label.append(name(node.token), style)
        if drafters > 1:
            label.append(f" drafter {node.drafter + 1}", "dim")
        q = "–" if node.drafted is None else f"{node.drafted:.2f}"
        label.append(f"  q {q}  p {node.wanted or 0:.2f}")
        label.append(f"  {node.why}", "dim")
        nodes[node.number] = nodes[node.parent].add(label)
    return nodes[0]


def token_name(tokenizer: Any) -> Callable[[int], str]:
    """Writes a token as its text in quotes, without control characters."""

    def name(token: int) -> str:
        return visible(repr(str(tokenizer.decode([token]))))

    return name
