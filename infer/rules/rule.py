"""The record of an acceptance rule: what it does, what it promises, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast, get_args

from headstart.heads import OptionError, Sampling

from ..trees.children import Expansion
from ..trees.policy import Policy
from .rule_api import Accepted, Verified


@dataclass(frozen=True, eq=False)
class Rule:
    """An acceptance rule, as `RULES` lists it.

    Attributes:
        name: what `rule=` and `--rule` call it.
        accept: turns the target's logits on a tree into a path and the tokens after its nodes.
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
    accept: Callable[[Verified], Accepted]
    children: Expansion
    refuses: Mapping[str, str]
    samples: bool = True
    exact: bool = True
    same_text: bool = False
    reads_prefix: bool = True
    chains_only: bool = False

    def check_expansion(self, expansion: str | None) -> Expansion:
        """The expansion to use, the rule's own when None.

        Raises:
            OptionError: an unknown expansion, or one that the rule refuses, with the reason.
        """
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
        """Refuse a policy whose trees the rule cannot judge.

        Raises:
            OptionError: a tree that branches, for a rule of chains.
        """
        if self.chains_only and not tree.in_place:
            raise OptionError(
                f"rule {self.name!r} takes a chain, found tree {tree.label}; use rule 'traversal', "
                f"or tree 'chain:{tree.max_depth}'."
            )

    def check_sampling(self, sampling: Sampling) -> None:
        """Refuse processors of a request that the rule cannot follow.

        Raises:
            OptionError: a processor that reads the text, for a rule that judges nodes off the path.
        """
        if not self.reads_prefix and sampling.readers:
            names = [type(item).__name__ for item in sampling.readers]
            raise OptionError(
                f"rule {self.name!r} judges nodes off the walked path, found {', '.join(names)}, "
                "which may read the text before a node; use rule 'rejection' or 'coupled', or "
                "leave it out."
            )
