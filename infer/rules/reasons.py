"""Why a rule accepted a node or did not, in words, for one row.

Each explanation is computed by the functions that the rule itself decides with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .matching import target_choices
from .rule_api import Accepted, Verified
from .siblings import State, accepts, attempt, child_at, proposal, proposal_from, verdicts
from .traversal import node_weights
from .typical import DELTA, EPSILON, typical_nodes

ABOVE = "its parent was not accepted"


def reasons(
    rule: str,
    verified: Verified,
    accepted: Accepted,
    scores: Sequence[Tensor],
    name: Callable[[int], str],
) -> list[str]:
    """For each node of a batch of one row; empty at the root.

    Args:
        rule: its name; scores: the target's processed ones [V] after each node; name: what a
            token is called.
    """
    path = accepted.path[0, : int(accepted.count[0])].tolist()
    found = _EXPLAIN.get(rule, _nothing)(verified, path, scores, name)
    parents = verified.tree.topology.parents[0].tolist()
    for node in range(1, len(parents)):
        if parents[node] not in path:
            found[node] = ABOVE
    found[0] = ""
    return found


def _matching(
    verified: Verified, path: list[int], scores: Sequence[Tensor], name: Callable[[int], str]
) -> list[str]:
    """`greedy`, `match`, `coupled`: the target chooses, and nodes that agree are accepted."""
    tree = verified.tree
    choices = target_choices(verified)[0].tolist()
    found = []
    for node, (parent, token) in enumerate(
        zip(tree.topology.parents[0].tolist(), tree.tokens[0].tolist(), strict=True)
    ):
        if parent not in path:
            found.append(ABOVE)
        elif choices[parent] == token:
            right = "the target chose it"
            found.append(right if node in path else f"{right}, and another branch was right longer")
        else:
            p = float(scores[parent].softmax(-1)[choices[parent]])
            found.append(f"the target chose {name(choices[parent])} (p {p:.2f})")
    return found


def _rejection(verified: Verified, path: list[int], scores: Sequence[Tensor], *_: Any) -> list[str]:
    tree, uniforms = verified.tree, verdicts(verified)
    found = ["a sibling was accepted before it"] * tree.nodes
    for level, node in enumerate(path):
        if level == tree.topology.max_depth:
            break
        at = torch.full_like(tree.tokens[:, :1], node)
        p = scores[node].unsqueeze(0).softmax(-1)
        state = State(p, proposal(verified, at), torch.ones_like(p[:, 0]))
        for order in range(tree.topology.widths[level]):
            child, there = child_at(tree, at, order)
            if level == 0 and order in tree.turns:
                state.q = proposal_from(verified, order)
            if not there:
                continue
            probability, state = attempt(tree, state, child, there)
            drawn = uniforms.gather(1, child).squeeze(1)
            found[int(child)] = _drew(float(probability), float(drawn))
            if accepts(drawn, probability):
                break
    return found


def _drew(probability: float, drawn: float) -> str:
    return f"needs a draw below {probability:.2f}, drew {drawn:.2f}"


def _traversal(verified: Verified, path: list[int], scores: Sequence[Tensor], *_: Any) -> list[str]:
    uniforms, weights = verdicts(verified), node_weights(verified)[1]
    found = []
    for node, (weight, drawn) in enumerate(
        zip(weights[0].tolist(), uniforms[0, :-1].tolist(), strict=True)
    ):
        said = _drew(weight, drawn)
        if node in path[:-1]:
            said += "; accepted with the node below it"
        elif node != path[-1] and drawn < weight:
            said += "; an earlier branch was accepted"
        found.append(said)
    return found


def _typical(verified: Verified, path: list[int], scores: Sequence[Tensor], *_: Any) -> list[str]:
    good, found = typical_nodes(verified, EPSILON, DELTA)[0][0].tolist(), []
    bar = f"likely than min({EPSILON}, {DELTA} · exp(−entropy))"
    for node, typical in enumerate(good):
        if not typical:
            found.append(f"not typical: less {bar}")
        elif node in path:
            found.append(f"typical: more {bar}")
        else:
            found.append("typical, and a longer or likelier path was accepted")
    return found


def _nothing(verified: Verified, path: list[int], *_: Any) -> list[str]:
    return [f"{'' if node in path else 'not '}accepted" for node in range(verified.tree.nodes)]


_EXPLAIN: dict[str, Callable[..., list[str]]] = {
    "greedy": _matching,
    "match": _matching,
    "coupled": _matching,
    "rejection": _rejection,
    "block": _traversal,
    "traversal": _traversal,
    "typical": _typical,
}
