"""Prompt lookup: what followed the longest earlier occurrence of the text's last tokens.

No weights and no training (Saxena 2023, "prompt lookup decoding"; Yang et al. 2023, arXiv
2304.04487).
With the text `a b c a b`, the suffix `a b` occurred before, ending at position 1, so `c` is
proposed, then `a`, then `b`; a continuation that reaches the end of the text repeats:

    position   0 1 2 3 4          the match ends at e = 1, the text at n - 1 = 4, so the period is 3
    token      a b c a b          token j of the continuation is text[e + 1 + j mod 3]: c a b c …
"""

from huggingface_hub.dataclasses import strict
from torch import Tensor

from .declared.lookup import LookupFields
from .drafter import DrafterConfig, Step
from .parts.request_text import RequestTextDrafter, RequestTextState
from .parts.weightless import WeightlessDrafter


@strict
class LookupConfig(LookupFields, DrafterConfig):
    """See `LookupFields`."""

    model_type = "headstart_lookup"


class Lookup(RequestTextDrafter, WeightlessDrafter):
    """Proposes candidates, best first: the continuations of the matches that agree with a node."""

    config_class = LookupConfig
    config: LookupConfig

    def begin(
        self, state: RequestTextState, features: Tensor, tokens: Tensor, count: Tensor
    ) -> Step:
        self.append(state, tokens, count)
        length = self.find_matches(state, self.config.min_match, self.config.matches)
        return self.at_root(state, length > 0)

    def scores(self, state: RequestTextState, shared: Tensor) -> Tensor:
        return (len(state.number) - state.number).expand(shared.shape[:-1])  # as they stand
