"""The decode loop: trees, acceptance rules, target runner, and the Speculator over them."""

if __name__ != "headstart.infer":
    raise ImportError(f"imported as {__name__!r}; write `from headstart.infer import …` instead.")

from .loading import load as load
from .loop import Decoding as Decoding
from .request import Request as Request
from .rules.registry import RULES as RULES
from .rules.registry import Rule as Rule
from .speculator import Speculator as Speculator
from .stats import Drafted as Drafted
from .stats import Emitted as Emitted
from .stats import Stats as Stats
from .streamer import RoundStreamer as RoundStreamer
from .target import Target as Target
from .trees.parse import parse_static as parse_static
from .trees.parse import parse_tree as parse_tree
from .trees.policy import Policy as Policy
from .trees.search import Beam as Beam
from .trees.search import BestFirst as BestFirst
from .trees.static import StaticTree as StaticTree
from .trees.union import Union as Union
