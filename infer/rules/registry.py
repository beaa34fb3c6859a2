"""The acceptance rules by name, and which of them decodes a request."""

from __future__ import annotations

from headstart.heads import OptionError

from .matching import COUPLED, GREEDY, MATCH
from .rejection import REJECTION
from .rule import Rule
from .traversal import BLOCK, TRAVERSAL
from .typical import TYPICAL

RULES: dict[str, Rule] = {
    rule.name: rule for rule in (GREEDY, MATCH, COUPLED, REJECTION, BLOCK, TRAVERSAL, TYPICAL)
}


def choose_rule(name: str | None, sampled: bool) -> Rule:
    """The rule that decodes a request: when sampling the one asked for, else always `greedy`.

    Raises:
        OptionError: an unknown name, or `greedy` when sampling.
    """
    rule = find_rule(name)
    if not sampled:
        return GREEDY
    if not rule.samples:
        raise OptionError(
            f"rule {rule.name!r} with do_sample=True; drop the rule, or set do_sample=False."
        )
    return rule


def find_rule(name: str | None) -> Rule:
    """The rule of that name; where none is asked for `coupled`, the default when sampling.

    Raises:
        OptionError: an unknown name.
    """
    if name is None:
        return COUPLED
    if name not in RULES:
        raise OptionError(f"rule is {name!r}; expected one of: {', '.join(RULES)}.")
    return RULES[name]
