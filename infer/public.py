"""Names of `infer`, whose modules import torch; the package imports this file on first use."""

from .batcher import Batcher
from .grammars import Grammar
from .loading import load
from .log_probabilities import LogProbabilities
from .loop import Decoding
from .recorder import Recorder
from .request import Request
from .rules.registry import RULES, Rule
from .speculator import Speculator
from .stats import Drafted, Emitted, Stats
from .streamer import RoundStreamer
from .target import Target
from .trees.parse import parse_static, parse_tree
from .trees.policy import Policy
from .trees.search import Beam, BestFirst
from .trees.static import StaticTree
from .trees.union import Union
