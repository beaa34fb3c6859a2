"""Every family's drafter for the tiny target, and the trees that tests decode with."""

from functools import cache
from typing import Any

import torch

from headstart.heads import Drafter, DrafterGroup, family
from tests.support.paths import ROOT, SHARED
from tests.support.tiny import tiny

TARGETS = {
    "tiny": None,
    "stories260k": SHARED / "models" / "stories260k",
    "quickstart": ROOT / "runs" / "quickstart" / "target",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "medusa": {"heads": 3},
    "medusa2": {"heads": 3, "rank": 4},
    "redrafter": {"depths": 3},
    "hydra": {"heads": 3, "layers": 2, "prefix": True},
    "eagle": {},
    "eagle3": {"depths": 3},
    "draft_model": {"layers": 1},
    "lookup": {},
}
"""A row for every family: what its recipe's drafter section says."""
TREES = ["chain:3", "[[0],[1],[2],[0,0],[0,1],[0,0,0]]", "best-first:8,3,3", "beam:3,3"]
UNIONS = {"medusa+lookup": TREES[0], "draft_model+redrafter": TREES[1]}
"""Drafters that decode together; the first one's tree stays, the last one's is each of `TREES`."""
LENGTHS = [9, 4, 7, 6]


@cache
def target(name: str) -> Any:
    if name == "tiny":
        return tiny("llama")
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TARGETS[name], dtype=torch.float64).eval()


@cache
def drafter(name: str, of: str) -> Drafter:
    """As training would start it, with every weight moved a little."""
    if name in UNIONS:
        return DrafterGroup([drafter(each, of) for each in name.split("+")])
    torch.manual_seed(5)
    model, cls = target(of), family(name)
    config: Any = cls.config_class
    made = cls(config.for_target(model, **OPTIONS[name])).double().bind(model)
    made.init_from_target(torch.arange(model.config.vocab_size))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return made.eval()
