"""The acceptance rules by name: what each does, what it promises, and what it refuses.

It needs no torch, so that a wrong name is told at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, cast, get_args

from headstart.heads import OptionError

from ..trees.expansions import SAMPLED, Expansion
from ..trees.shapes import AdaptiveShape

if TYPE_CHECKING:
    from headstart.heads import Sampling

    from ..trees.policy import Policy
    from .rule_api import Accepted, Verified


@dataclass(frozen=True, eq=False)
class Rule:
    """An acceptance rule, as `RULES` lists it.

    Attributes:
        name: what `rule=` and `--rule` call it.
        module: of this package, with a function of its own name, which is `accept`.
        children: the expansion that it takes by default.
        refuses: the expansions that it does not take, each with the reason; it takes all others.
        samples: whether it is a rule for sampling.
        exact: whether the text has the target's distribution.
        same_text: whether the text equals that of plain decoding, with the same seeds if sampled.
        reads_prefix: whether logits processors that read the text work; not where nodes off the
            walked path are judged.
        chains_only: whether trees that branch are refused.
    """

    name: str
    module: str
    children: Expansion
    refuses: Mapping[str, str]
    samples: bool = True
    exact: bool = True
    same_text: bool = False
    reads_prefix: bool = True
    chains_only: bool = False

    @cached_property
    def accept(self) -> Callable[[Verified], Accepted]:
        """Turns the target's logits on a tree into a path and the tokens after its nodes."""
        return getattr(import_module(f".{self.module}", __package__), self.module)

    @property
    def has_choice(self) -> bool:
        """Whether it takes more than one expansion."""
        return len(self.refuses) < len(get_args(Expansion)) - 1

    def check_expansion(self, expansion: str | None) -> Expansion:
        """The expansion to use, the rule's own when None; one that it refuses is an error."""
        if expansion is None:
            return self.children
        known = get_args(Expansion)
        if expansion not in known:
            raise OptionError(f"expansion is {expansion!r}; expected one of: {', '.join(known)}.")
        if reason := self.refuses.get(expansion):
            raise OptionError(
                f"expansion {expansion!r} with rule {self.name!r}: {reason}; use "
                f"{self.children!r} children."
            )
        return cast(Expansion, expansion)

    def check_tree(self, tree: Policy) -> None:
        """Refuse a policy whose trees branch, for a rule of chains, by an `OptionError`; and one
        of changing depth, for a rule under which the text depends on it."""
        if isinstance(tree, AdaptiveShape) and not self.same_text:
            raise OptionError(
                f"rule {self.name!r} with tree {tree.label}: its text depends on the trees, and "
                "an adaptive one on how long rounds take, so a seed would not give it again; use "
                "rule 'coupled' or 'match', or another tree."
            )
        if self.chains_only and not tree.in_place:
            raise OptionError(
                f"rule {self.name!r} takes a chain, found tree {tree.label}; use rule 'traversal', "
                f"or tree 'chain:{tree.max_depth}'."
            )

    def check_sampling(self, sampling: Sampling) -> None:
        """Refuse processors that read the text, for a rule that judges nodes off the path."""
        if not self.reads_prefix and sampling.on_host:
            names = [type(item).__name__ for item in sampling.readers] or ["a grammar"]
            raise OptionError(
                f"rule {self.name!r} judges nodes off the walked path, found {', '.join(names)}, "
                "which may read the text before a node; use rule 'rejection' or 'coupled', or "
                "leave it out."
            )


_NO_NOISE = {"coupled": "the rule draws nothing, so its children have no noise to share"}
_SHARED_NOISE = (
    "the rule is exact for children drawn independently at every node and in every round, and "
    "shared noise is one for all nodes of a position"
)
_NOT_DRAWN = "greedy decoding draws nothing, and drawn children agree less often"
_NOT_ASKED = "the rule never asks what a child was drawn from"
_NAMED_MATCH = "children without the target's noise are what the rule 'match' names"
_NAMED_COUPLED = "children that share the target's noise are what the rule 'coupled' names"

GREEDY = Rule(
    "greedy",
    "matching",
    children="topk",
    refuses=_NO_NOISE | dict.fromkeys(SAMPLED, _NOT_DRAWN),
    samples=False,
    same_text=True,
)
_MATCH = Rule("match", "matching", "topk", {"coupled": _NAMED_COUPLED}, same_text=True)
_COUPLED = Rule(
    "coupled",
    "matching",
    children="coupled",
    refuses=dict.fromkeys(("topk", *SAMPLED), _NAMED_MATCH),
    same_text=True,
)
_REJECTION = Rule("rejection", "rejection", "without_replacement", {"coupled": _SHARED_NOISE})
_TRAVERSAL = replace(_REJECTION, name="traversal", module="traversal", reads_prefix=False)
_BLOCK = replace(_TRAVERSAL, name="block", chains_only=True)
_TYPICAL = Rule(
    "typical",
    "typical",
    children="topk",
    refuses=_NO_NOISE | dict.fromkeys(SAMPLED, _NOT_ASKED),
    exact=False,
    reads_prefix=False,
)
RULES = {
    rule.name: rule for rule in (GREEDY, _MATCH, _COUPLED, _REJECTION, _BLOCK, _TRAVERSAL, _TYPICAL)
}


def choose_rule(name: str | None, sampled: bool) -> Rule:
    """The rule that decodes a request: when sampling the one asked for, else always `greedy`."""
    rule = find_rule(name)
    if sampled and not rule.samples:
        raise OptionError(
            f"rule {rule.name!r} with do_sample=True; drop the rule, or set do_sample=False."
        )
    return rule if sampled else GREEDY


def find_rule(name: str | None) -> Rule:
    """The rule of that name; where none is asked for `coupled`, the default when sampling."""
    if name is None:
        return _COUPLED
    if not isinstance(name, str) or name not in RULES:  # a list cannot be looked up
        raise OptionError(f"rule is {name!r}; expected one of: {', '.join(RULES)}.")
    return RULES[name]
