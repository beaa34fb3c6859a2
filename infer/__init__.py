"""The decode loop: trees, acceptance rules, target runner, and the Speculator over them."""

if __name__ != "headstart.infer":
    raise ImportError(f"imported as {__name__!r}; write `from headstart.infer import …` instead.")

from .loop import Decoding, Stats
from .policies import Policy, StaticTree
from .rules import check_pair
from .speculator import Speculator, load
from .target import Target

__all__ = [
    "Decoding",
    "Policy",
    "Speculator",
    "StaticTree",
    "Stats",
    "Target",
    "check_pair",
    "load",
]
