"""The acceptance rules by name, and the legal pairs of expansion and rule."""

from __future__ import annotations

from collections.abc import Callable

from headstart.heads import OptionError

from .choices import matching
from .policies import Expansion
from .verified import Accepted, Verified

Rule = Callable[[Verified], Accepted]
"""Turns the target's logits on a tree into a path and the next token."""

RULES: dict[str, Rule] = {"greedy": matching, "match": matching, "coupled": matching}

EXPANSION: dict[str, Expansion] = {"greedy": "topk", "match": "topk", "coupled": "coupled"}
"""The children that each rule takes unless told otherwise."""

REFUSED = {
    ("coupled", "greedy"): "greedy decoding draws nothing, so its children have no noise to share",
    (
        "coupled",
        "match",
    ): "children that share the target's noise are what the rule 'coupled' names",
    ("topk", "coupled"): "children without the target's noise are what the rule 'match' names",
}
"""Pairs of expansion and rule that are refused, and why; all others of known names are legal."""


def check_pair(expansion: str, rule: str) -> None:
    """Refuse an illegal or unknown pair of expansion and rule.

    Raises:
        OptionError: with the reason.
    """
    if rule not in EXPANSION:
        raise OptionError(f"rule is {rule!r}; expected one of: {', '.join(EXPANSION)}.")
    known = sorted(set(EXPANSION.values()))
    if expansion not in known:
        raise OptionError(f"expansion is {expansion!r}; expected one of: {', '.join(known)}.")
    if reason := REFUSED.get((expansion, rule)):
        raise OptionError(
            f"expansion {expansion!r} with rule {rule!r}: {reason}; use {EXPANSION[rule]!r} "
            "children."
        )
