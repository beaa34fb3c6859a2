"""A target that processes divide: what transformers is told, and what is refused in one line.

What two processes train so is in `tests/train/test_distributed.py`.
"""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
)

from headstart.heads import OptionError
from headstart.heads.core import in_parts, whole_plan
from headstart.train.checks.plan import plan_run
from headstart.train.fit.arguments import load_options
from headstart.train.processes.tensor_parallel import WORDS, check_together
from headstart.train.recipe import RecipeError, TargetSpec, parse_recipe
from tests.support.recipes import TINY

pytestmark = pytest.mark.skipif(
    not hasattr(PreTrainedModel, "_resolve_parallel_plans"), reason="needs transformers 5.23"
)


def model(kind: Any = LlamaConfig, **sizes: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(kind(**sizes))


LLAMA = {
    "vocab_size": 50, "hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 3,
}  # fmt: skip


def tiny(**more: Any) -> Any:
    return parse_recipe(TINY | {"target": TINY["target"] | {"tp_plan": "auto"}} | more)


def test_layers_are_divided_and_the_ends_are_whole() -> None:
    target = model(**LLAMA)
    styles = whole_plan(target, "auto", 3, **WORDS)
    assert styles["model.layers.*.self_attn.q_proj"] == "colwise"
    assert styles["lm_head"] == styles["model.embed_tokens"] == "replicate"
    changed = {"model.layers.*.mlp.up_proj": "replicate"}
    assert whole_plan(target, changed, 3, **WORDS) == styles | changed
    assert not in_parts(target)


@pytest.mark.parametrize(
    ("kind", "sizes", "plan", "world", "words"),
    [
        (LlamaConfig, LLAMA, "auto", 2, "among 2 processes, and its num_key_value_heads is 3"),
        (LlamaConfig, LLAMA, "auto", 4, "among 4 processes, and its num_attention_heads is 6"),
        (LlamaConfig, LLAMA, {"model.layer.mlp": "colwise"}, 3, r"\['model.layer.mlp'\] match n"),
        (GPT2Config, {"n_layer": 1, "n_embd": 12}, "auto", 2, "transformers has no plan for gpt2"),
        (BambaConfig, {"num_hidden_layers": 1}, "auto", 2, "transformers has no plan for bamba"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    kind: Any, sizes: dict[str, Any], plan: Any, world: int, words: str
) -> None:
    with pytest.raises(OptionError, match=words) as refused:
        whole_plan(model(kind, **sizes), plan, world, **WORDS)
    assert "\n" not in str(refused.value) and "target.tp_plan" in str(refused.value)


@pytest.mark.parametrize("kind", ["ZeRO-2", "ZeRO-3", "FSDP2"])
def test_engines_that_divide_weights_themselves_are_refused(kind: str) -> None:
    check_together("DDP")
    with pytest.raises(OptionError, match=f"and so does {kind}; use the launch file ddp"):
        check_together(kind)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"tp_plan": "colwise"}, "tp_plan: found 'colwise', expected auto, or styles"),
        ({"tp_plan": {"lm_head": 3}}, "found 3 for lm_head, expected a style"),
        ({"tp_plan": "auto", "device_map": "auto"}, "found target.device_map auto too"),
        ({"tp_plan": "auto", "dtype": "4bit"}, "found target.dtype 4bit too"),
    ],
)
def test_a_recipe_says_what_it_can_mean(target: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        parse_recipe(TINY | {"target": TINY["target"] | target})


def test_adapters_and_drafting_writers_are_refused_before_any_stage() -> None:
    plan_run(tiny(), 2)
    with pytest.raises(OptionError, match="and medusa2 trains an adapter of them"):
        plan_run(tiny(drafter={"family": "medusa2"}), 2)
    with pytest.raises(OptionError, match=r"target\.tp_plan divides .* early_exit drafts with"):
        plan_run(tiny(drafter={"family": "early_exit"}), 2)
    for drafting in ({"drafter": "lookup"}, {"rounds": 2}):
        with pytest.raises(OptionError, match="write each row together, without a drafter"):
            plan_run(tiny(distill=TINY["distill"] | drafting), 2)
    with pytest.raises(OptionError, match="among 4 processes, and its num_attention_heads is 2"):
        plan_run(tiny(), 4)


def test_fsdp_does_not_shard_layers_that_a_drafter_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    plan_run(tiny(target=TINY["target"]))
    with pytest.raises(OptionError, match=r"FSDP divides .* use the launch file ddp or zero3"):
        plan_run(tiny(target=TINY["target"], drafter={"family": "early_exit"}))


def test_a_single_process_spreads_the_target_over_its_gpus() -> None:
    spec, gpu = TargetSpec(tp_plan="auto"), torch.device("cuda", 0)
    assert load_options(spec, gpu)["device_map"] == "auto"
    assert "device_map" not in load_options(spec, gpu, world=2)
    assert load_options(spec, torch.device("cpu")) == {"dtype": "float32"}
