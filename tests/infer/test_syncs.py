"""Nothing inside a round reads the device from the host, but the one report at its end.

On the CPU a read shows as an operator that copies a scalar or whose result's shape depends on data.
`no_grad`, not `inference_mode`: the latter hides these operators from a dispatch mode.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from headstart.heads import Drafter, DrafterGroup, Sampling, Step, family
from headstart.heads.core import CountPenalty, row_seeds
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.infer import Decoding
from headstart.infer.rules.registry import RULES
from tests.support.covering import covering
from tests.support.scripted import SHAPES, Heads, Script, decoding_of, make
from tests.support.syncs import WARPERS, Synchronised, run_rounds
from tests.support.tiny import CONFIGS, VOCAB, prompts, tiny

LENGTHS = [9, 4, 7]


def sampling(rule: str) -> Sampling:
    if rule == "greedy":
        return Sampling()
    return Sampling(row_seeds(3, len(LENGTHS)), LogitsProcessorList(WARPERS))


def medusa(name: str = "llama", **options: Any) -> Medusa:
    drafter = Medusa(MedusaConfig.for_target(tiny(name), heads=4, **options)).double()
    drafter.bind(tiny(name))
    drafter.init_from_target(torch.arange(VOCAB))
    return drafter.eval()


def with_layers(name: str, **options: Any) -> Drafter:
    cls: Any = family(name)
    drafter = cls(cls.config_class.for_target(tiny("llama"), **options)).double()
    return drafter.bind(tiny("llama")).eval()


def script() -> Tensor:
    ids, mask = prompts(LENGTHS)
    out = tiny("llama").generate(
        ids, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0
    )
    return out[:, ids.shape[1] :]


def started(drafter: Any, tree: Any, rule: str, name: str = "llama") -> Decoding:
    ids, mask = prompts(LENGTHS)
    options: dict[str, Any] = {"rule": RULES[rule], "expansion": RULES[rule].children}
    decoding = decoding_of(tiny(name), drafter, tree, sampling(rule), eos=[VOCAB - 1], **options)
    decoding.prefill(ids, mask, 16)
    return decoding


DRAFTERS: dict[str, Callable[[], Any]] = {
    "medusa": medusa,
    "trimmed": lambda: medusa(output="trimmed", draft_vocab_size=9),
    **{name: partial(with_layers, name) for name in ("eagle", "eagle3", "dflash", "mtp")},
    "domino": partial(with_layers, "dflash", domino_rank=4, gru_hidden_dim=6),
    **{shape: lambda shape=shape: make(shape, tiny("llama"), script()) for shape in SHAPES},
}
TREES = ["plain", "chain:4", "cartesian:3,2,1", "[[0],[1],[0,0],[1,1]]"]


@pytest.mark.parametrize(
    ("name", "tree", "rule"), covering([*product(DRAFTERS, TREES, ("greedy", "coupled", "match"))])
)
def test_a_round_does_not_wait(name: str, tree: str, rule: str) -> None:
    with torch.no_grad():
        assert run_rounds(started(DRAFTERS[name](), tree, rule)) > 2


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection", "traversal"])
def test_several_drafters_do_not_wait(rule: str) -> None:
    shapes = ("heads", "cached", "lookup")
    drafter = DrafterGroup([make(shape, tiny("llama"), script()) for shape in shapes])
    trees = ["cartesian:2,2+chain:3+[[0],[1]]"]
    if rule in ("greedy", "coupled"):
        trees.append("best-first:6,2,3+chain:2+beam:2,3")
    with torch.no_grad():
        for tree in trees:
            assert run_rounds(started(drafter, tree, rule)) > 2


@pytest.mark.parametrize("name", CONFIGS)
def test_no_family_of_targets_waits(name: str) -> None:
    with torch.no_grad():
        assert run_rounds(started(medusa(name), "cartesian:2,2", "coupled", name)) > 2


PENALTIES = [
    RepetitionPenaltyLogitsProcessor(1.3),
    NoRepeatNGramLogitsProcessor(2),
    MinLengthLogitsProcessor(20, [3]),
    CountPenalty(0.5, 0.25, prompt=9),
    NoBadWordsLogitsProcessor([[3], [1, 2]]),
]


@pytest.mark.parametrize("reader", PENALTIES, ids=lambda item: type(item).__name__)
def test_processors_of_the_text_do_not_wait(reader: LogitsProcessor) -> None:
    ids, mask = prompts(LENGTHS)
    chosen = Sampling(row_seeds(3, len(LENGTHS)), LogitsProcessorList([reader, *WARPERS]))
    decoding = decoding_of(tiny("llama"), medusa(), "cartesian:3,2", chosen, expansion="coupled")
    with torch.no_grad():
        decoding.prefill(ids, mask, 16)
        assert run_rounds(decoding) > 2


class Waiting(Heads):
    """Proposals as they should be, after one read of the device."""

    read: Callable[[Tensor], Any]

    def begin(self, state: Any, features: Tensor, tokens: Tensor, count: Tensor) -> Step:
        type(self).read(count)
        return super().begin(state, features, tokens, count)


WAITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda count: count[0].item(),
    "int": lambda count: int(count.max()),
    "bool": lambda count: bool((count > 0).all()),
    "float": lambda count: float(count.sum()),
    "python index": lambda count: list(range(5))[count[0]],
    "nonzero": lambda count: count.nonzero(),
    "where": lambda count: torch.where(count > 0),
    "masked_select": lambda count: count.masked_select(count > 0),
    "bool index": lambda count: count[count > 0],
    "bool assignment": lambda count: count.clone().__setitem__(count > 0, torch.ones_like(count)),
    "unique": lambda count: count.unique(),
    "equal": lambda count: torch.equal(count, count),
}


@pytest.mark.parametrize("how", WAITS)
def test_a_wait_is_seen(how: str) -> None:
    class Reads(Waiting):
        read = staticmethod(WAITS[how])

    with torch.no_grad(), pytest.raises(Synchronised):
        run_rounds(started(Reads(tiny("llama"), Script(script())), "chain:2", "greedy"))


@pytest.mark.parametrize("rule", ["greedy", "coupled", "match"])
@pytest.mark.parametrize("tree", ["plain", "chain:4", "cartesian:3,2,1"])
def test_one_report_a_round(tree: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies to the host that no operator shows on the CPU are counted by name."""
    with torch.no_grad():
        decoding = started(medusa(), tree, rule)
        copies: list[str] = []
        for name in ("numpy", "tolist", "cpu", "__array__"):
            true = getattr(Tensor, name)

            def counted(self: Tensor, *rest: Any, _of: Any = (name, true), **named: Any) -> Any:
                copies.append(_of[0])
                return _of[1](self, *rest, **named)

            monkeypatch.setattr(Tensor, name, counted)
        while not decoding.finished:
            copies.clear()
            decoding.round()
            assert copies == ["cpu", "numpy"]
