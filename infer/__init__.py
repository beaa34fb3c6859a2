"""The decode loop: trees, acceptance rules, target runner, and the Speculator over them."""

if __name__ != "headstart.infer":
    raise ImportError(f"imported as {__name__!r}; write `from headstart.infer import …` instead.")

from .loading import load
from .loop import Decoding
from .rules.registry import check_pair
from .speculator import Speculator
from .stats import Stats
from .target import Target
from .trees.dynamic import Beam, BestFirst, parse_tree
from .trees.policies import Policy, StaticTree
from .trees.union import Union

__all__ = [
    "Beam",
    "BestFirst",
    "Decoding",
    "Policy",
    "Speculator",
    "StaticTree",
    "Stats",
    "Target",
    "Union",
    "check_pair",
    "load",
    "parse_tree",
]
