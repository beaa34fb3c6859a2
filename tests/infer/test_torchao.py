"""Targets whose weights torchao has quantised decode as others do; run where it is installed."""

import copy
from typing import Any

import pytest
import torch

from headstart.heads import DrafterGroup
from headstart.heads.core import Packing
from headstart.infer import Speculator
from tests.support.families import TREES, drafter
from tests.support.tiny import prompts, tiny

quantization = pytest.importorskip("torchao.quantization")

IDS, _ = prompts([7, 7, 7])
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}


def weight_only(bits: int) -> Any:
    if bits == 8:
        return quantization.Int8WeightOnlyConfig()
    int4: Any = getattr(torch, "int4")  # noqa: B009
    group = quantization.PerGroup(16)
    return quantization.IntxWeightOnlyConfig(weight_dtype=int4, granularity=group)


NAMES = [
    "medusa", "eagle", "eagle3", "dflash", "mtp", "hydra", "redrafter", "mlp_speculator",
    "draft_model",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_text_and_the_acceptance_are_the_targets(
    name: str, bits: int, dtype: torch.dtype
) -> None:
    model = copy.deepcopy(tiny("llama")).to(dtype)
    quantization.quantize_(model, weight_only(bits))
    given: Any = DrafterGroup.of(drafter(name, "tiny")).drafters
    drafters = [copy.deepcopy(each).to(dtype) for each in given]
    expected, found = model.generate(IDS, **GREEDY), []
    for compile in (False, True):
        ours = Speculator(model, drafters, tree=TREES[1], compile=compile)
        assert torch.equal(ours.generate(IDS, **GREEDY), expected)
        found.append(ours.stats.counts.tolist())
    assert found[0] == found[1]
    weight = model.lm_head.weight
    Packing().pack_in_place(model)  # leaves what is quantised as it is
    assert model.lm_head.weight is weight and type(weight) is not torch.nn.Parameter
    assert torch.equal(model.generate(IDS, **GREEDY), expected)
