"""The acceptance rules by name, their legal pairs with expansions, and what each refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast, get_args

from headstart.heads import OptionError, Sampling

from ..trees.policies import Expansion, Policy
from .matching import matching
from .rejection import rejection
from .rule_api import Accepted, Verified
from .traversal import block, traversal
from .typical import typical

Rule = Callable[[Verified], Accepted]
"""Turns the target's logits on a tree into a path and the next token."""

RULES: dict[str, Rule] = {
    "greedy": matching,
    "match": matching,
    "coupled": matching,
    "rejection": rejection,
    "block": block,
    "traversal": traversal,
    "typical": typical,
}

EXPANSION: dict[str, Expansion] = {
    "greedy": "topk",
    "match": "topk",
    "coupled": "coupled",
    "rejection": "without_replacement",
    "block": "without_replacement",
    "traversal": "without_replacement",
    "typical": "topk",
}
"""The children that each rule takes unless told otherwise."""

APPROXIMATE = {"typical"}
"""The rules that change the distribution of the text; never a default, and labelled."""

NO_READERS = {"block", "traversal", "typical"}
"""The rules that judge nodes off the walked path, where processors cannot read the text."""

_DRAWN = ("with_replacement", "without_replacement")
_REFUSALS = [
    (
        ["coupled"],
        ["greedy", "typical"],
        "the rule draws nothing, so its children have no noise to share",
    ),
    (
        ["coupled"],
        ["match"],
        "children that share the target's noise are what the rule 'coupled' names",
    ),
    (
        ["coupled"],
        ["rejection", "block", "traversal"],
        "the rule is exact for children drawn independently at every node and in every round, and "
        "shared noise is one for all nodes of a position",
    ),
    (
        ["topk", *_DRAWN],
        ["coupled"],
        "children without the target's noise are what the rule 'match' names",
    ),
    (_DRAWN, ["greedy"], "greedy decoding draws nothing, and drawn children agree less often"),
    (_DRAWN, ["typical"], "the rule never asks what a child was drawn from"),
]
REFUSED: dict[tuple[str, str], str] = {
    (expansion, rule): reason
    for expansions, rules, reason in _REFUSALS
    for expansion in expansions
    for rule in rules
}
"""Pairs of expansion and rule that are refused, and why; all others of known names are legal."""


def check_pair(expansion: str | None, rule: str) -> Expansion:
    """The expansion to use with a rule, its own when None.

    Raises:
        OptionError: an unknown name, or an illegal pair, with the reason.
    """
    if rule not in EXPANSION:
        raise OptionError(f"rule is {rule!r}; expected one of: {', '.join(EXPANSION)}.")
    if expansion is None:
        return EXPANSION[rule]
    known = get_args(Expansion)
    if expansion not in known:
        raise OptionError(f"expansion is {expansion!r}; expected one of: {', '.join(known)}.")
    if reason := REFUSED.get((expansion, rule)):
        raise OptionError(
            f"expansion {expansion!r} with rule {rule!r}: {reason}; use {EXPANSION[rule]!r} "
            "children."
        )
    return cast(Expansion, expansion)


def check_rule(rule: str, tree: Policy) -> None:
    """Refuse a rule that cannot judge the trees of a policy.

    Raises:
        OptionError: `block` with a tree that branches.
    """
    if rule == "block" and not tree.in_place:
        raise OptionError(
            f"rule 'block' takes a chain, found tree {tree}; use rule 'traversal', or tree "
            f"'chain:{tree.max_depth}'."
        )


def check_sampling(rule: str, sampling: Sampling) -> None:
    """Refuse a rule that cannot follow the processors of a request.

    Raises:
        OptionError: a rule that judges nodes off the walked path, with a processor that reads the
            text.
    """
    if rule in NO_READERS and sampling.readers:
        names = [type(item).__name__ for item in sampling.readers]
        raise OptionError(
            f"rule {rule!r} judges nodes off the walked path, found {', '.join(names)}, which may "
            "read the text before a node; use rule 'rejection' or 'coupled', or leave it out."
        )
