"""Every family's drafter for the tiny target, and the trees that tests decode with."""

from functools import cache
from typing import Any

import torch

from headstart.heads import DrafterGroup, TrainableDrafter, family
from headstart.heads.families import KNOWN, PUBLISHED
from tests.support import gemma4
from tests.support.paths import ROOT, SHARED
from tests.support.tiny import tiny

TARGETS = {
    "tiny": None,
    "stories260k": SHARED / "models" / "stories260k",
    "quickstart": ROOT / "runs" / "quickstart" / "target",
}
TREES = ["chain:3", "[[0],[1],[2],[0,0],[0,1],[0,0,0]]", "best-first:8,3,3", "beam:3,3"]
UNIONS = {
    "medusa+lookup": TREES[0], "draft_model+redrafter": TREES[1], "recycling+lookup": TREES[1],
}  # fmt: skip
"""Drafters that decode together; the first one's tree stays, the last one's is each of `TREES`."""
LENGTHS = [9, 4, 7, 6]


@cache
def target(name: str) -> Any:
    """A target of `TARGETS`, or that of a family which is for targets of one kind."""
    if name in PUBLISHED:
        return gemma4.target()
    if name == "tiny":
        return tiny("llama")
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TARGETS[name], dtype=torch.float64).eval()


def own(name: str) -> str:
    """A family's tiny target, by name."""
    return name if name in PUBLISHED else "tiny"


@cache
def written(of: str) -> list[tuple[Any, Any]]:
    """Texts that a target writes greedily after two random tokens, and what it wrote of them."""
    torch.manual_seed(3)
    model = target(of)
    start = torch.randint(3, model.config.vocab_size, (12, 2))
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    texts = model.generate(
        start, attention_mask=torch.ones_like(start), max_new_tokens=24, **options
    )
    return [(text, torch.arange(len(text)) >= 2) for text in texts]


@cache
def drafter(name: str, of: str) -> Any:
    """As training would start it, with every weight moved a little."""
    if name in UNIONS:
        return DrafterGroup([drafter(each, of) for each in name.split("+")])
    torch.manual_seed(5)
    made = moved(name, of).eval()
    if made.remembers:
        for text, answer in written(of):
            made.remember(text, int((~answer).sum()))
        made.remember = lambda *_: None  # so that no test depends on those before
    return made


def moved(name: str, of: str, spread: float = 0.05, **options: Any) -> Any:
    """A new one, with other options, whose weights are moved that far."""
    model, cls = target(of), family(name)
    config: Any = cls.config_class
    made = cls(config.for_target(model, **{**KNOWN[name].small, **options})).double().bind(model)
    if isinstance(made, TrainableDrafter):
        made.init_from_target(torch.arange(model.config.vocab_size))
    if made.collects:
        made.collect(written(of))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * spread)
    return made
