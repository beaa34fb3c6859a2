"""Legal pairs of expansion and rule, and rounds small enough to enumerate."""

from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headstart.heads.core.forms import Form, FormsByRow
from headstart.infer.rules.registry import RULES
from headstart.infer.trees.expansions import Expansion
from headstart.infer.trees.parse import parse_tree
from tests.support.enumeration import Round, SeveralTables, Tables

EXACT = 1e-12
SHOWS = 1e-3
LEGAL = [
    (expansion, name)
    for expansion in get_args(Expansion)
    for name, rule in RULES.items()
    if expansion not in rule.refuses
]


class AfterLast(LogitsProcessor):
    """Favours a token by the last one, so that each node needs its own prefix."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        favoured = (input_ids[:, -1:] * 2 + 1) % scores.shape[-1]
        return scores.scatter_add(1, favoured, torch.ones(favoured.shape, dtype=scores.dtype))


class Restricted(Form):
    """Excludes a token or two after each text, and claims that another one must follow some."""

    def allow(self, text: np.ndarray, bits: np.ndarray) -> bool:
        number = int(text.sum())
        bits.fill(255 - (1 << number % 3) - (8 << number % 2))
        return True

    def forced(self, text: np.ndarray) -> int:
        number = int(text.sum())
        return (number + 1) % 3 if number % 2 else -1


class _Same:
    def __init__(self, form: Form):
        self._form = form

    def __getitem__(self, row: int) -> Form:
        return self._form


def form_of_all(form: Form) -> FormsByRow:
    """The same form for every row of any batch."""
    found: Any = FormsByRow([])
    found.forms = _Same(form)
    return found


WARPS: dict[str, list[Any]] = {
    "plain": [],
    "cool": [TemperatureLogitsWarper(0.6)],
    "hot": [TemperatureLogitsWarper(1.7)],
    "top_k": [TopKLogitsWarper(2)],
    "top_p": [TemperatureLogitsWarper(1.7), TopPLogitsWarper(0.7)],
    "all": [TemperatureLogitsWarper(2.5), TopKLogitsWarper(3), TopPLogitsWarper(0.9)],
    "min_p": [TemperatureLogitsWarper(1.3), MinPLogitsWarper(0.2)],
    "prefix": [AfterLast(), TemperatureLogitsWarper(0.9)],
    "penalty": [RepetitionPenaltyLogitsProcessor(1.6), TemperatureLogitsWarper(0.9)],
    "form": [form_of_all(Restricted()), TemperatureLogitsWarper(0.9)],
    "ngrams": [NoRepeatNGramLogitsProcessor(2), MinLengthLogitsProcessor(2, [2])],
}
# Tree, V, what the drafter is (see `Tables`), and the tokens that it knows.
Shape = tuple[str, int, str, list[int] | None]
SMALL: dict[str, Shape] = {
    "chain": ("chain:2", 4, "levels", None),
    "chain of heads": ("chain:2", 4, "heads", None),
    "wide": ("cartesian:3", 5, "levels", None),
    "cartesian": ("cartesian:2,2", 3, "levels", None),
    "cartesian of heads": ("cartesian:2,2", 3, "heads", None),
    "uneven": ("[[0],[1],[1,0],[1,1]]", 3, "levels", None),
    "narrow": ("[[0],[1],[0,0]]", 5, "levels", [3, 1, 4]),
    "candidates": ("cartesian:3,2", 5, "lookup", None),
    "best first": ("best-first:6,2,2", 4, "levels", None),
    "best first of heads": ("best-first:6,3,2", 4, "heads", None),
    "beam": ("beam:2,3", 3, "levels", None),
    "union": ("chain:2+[[0],[1]]", 3, "levels+heads", None),
    "union of vocabularies": ("[[0],[1]]+chain:1", 4, "levels+levels", [3, 1]),
    "union with candidates": ("[[0]]+chain:2", 3, "lookup+levels", None),
    "union grown anew": ("best-first:4,2,2+beam:2,2", 3, "levels+heads", None),
}


def round_of(
    pair: tuple[str, str], shape: Shape, warp: str = "plain", seed: int = 1, apart: float = 1.0
) -> Round:
    tree, vocab, kind, narrow = shape
    policy = parse_tree(tree)
    known = SeveralTables if "+" in kind else Tables
    tables = known(vocab, policy.max_depth, seed, kind, narrow, apart)
    expansion: Any = pair[0]
    return Round(tables, policy, RULES[pair[1]], expansion, LogitsProcessorList(WARPS[warp]))
