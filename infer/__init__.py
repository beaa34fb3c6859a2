"""The decode loop: trees, acceptance rules, target runner, and the Speculator over them."""

if __name__ != "headstart.infer":
    raise ImportError(f"imported as {__name__!r}; write `from headstart.infer import …` instead.")

from .loading import load
from .loop import Decoding
from .request import Request
from .rules.registry import RULES, Rule
from .speculator import Speculator
from .stats import Stats
from .target import Target
from .trees.parse import parse_static, parse_tree
from .trees.policy import Policy
from .trees.search import Beam, BestFirst
from .trees.static import StaticTree
from .trees.union import Union

__all__ = [
    "RULES",
    "Beam",
    "BestFirst",
    "Decoding",
    "Policy",
    "Request",
    "Rule",
    "Speculator",
    "StaticTree",
    "Stats",
    "Target",
    "Union",
    "load",
    "parse_static",
    "parse_tree",
]
