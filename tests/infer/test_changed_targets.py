"""Targets that peft wrapped, that are recast or run under autocast; and one that drops tokens."""

import copy
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import headstart
from headstart.heads import DecodingError, OptionError
from headstart.infer import Speculator
from tests.support.families import drafter
from tests.support.tiny import COMMON, one_line, prompts, tiny

OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
FAMILIES = [
    "medusa", "redrafter", "draft_model", "eagle3", "dflash", "mtp", "hydra", "pard",
    "mlp_speculator",
]  # fmt: skip
IDS, _ = prompts([7])


def own(name: str, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    """A target and a drafter that no other test shares."""
    model = copy.deepcopy(tiny("llama")).to(dtype)
    with_target = copy.deepcopy(drafter(name, "tiny")).to(dtype)
    return model, with_target.bind(model)


def text(generate: Any, **more: Any) -> Tensor:
    return generate(IDS, **OPTIONS, **more)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_target_may_be_recast_between_requests(name: str) -> None:
    model, heads = own(name)
    ours = Speculator(model, heads, tree="cartesian:2,1")
    for dtype in (torch.float64, torch.float32, torch.float64):
        model.to(dtype)
        assert torch.equal(text(ours.generate), text(model.generate))
        assert ours.target.cache.dtype == dtype
    hooks = [module._forward_hooks for module in model.modules()]
    assert sum(map(len, hooks)) <= 1  # those of earlier dtypes are gone


@pytest.mark.parametrize("name", FAMILIES)
def test_a_speculator_made_under_autocast(name: str) -> None:
    """It decodes outside; inside, where keys and values have other types, it refuses in a line."""
    model, heads = own(name, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = Speculator(model, heads, tree="chain:2")
        with pytest.raises(OptionError, match=r"autocast to torch\.bfloat16") as caught:
            text(ours.generate)
    one_line(caught.value)
    assert torch.equal(text(ours.generate), text(model.generate))


@pytest.mark.parametrize("through", ["speculator", "generate", "load"])
def test_a_peft_model(through: str) -> None:
    peft = pytest.importorskip("peft")
    model, heads = own("medusa")
    lora = peft.LoraConfig(
        r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(model, lora).eval()
    expected = text(adapted.generate)
    assert not torch.equal(expected, text(tiny("llama").generate))
    make = headstart.load if through == "load" else Speculator
    ours = make(adapted, heads, tree="chain:3")
    if through == "generate":
        assert torch.equal(text(adapted.generate, custom_generate=ours), expected)
    else:
        assert torch.equal(text(ours.generate), expected)


def test_a_learned_prompt_is_refused() -> None:
    peft = pytest.importorskip("peft")
    kind = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    with pytest.raises(OptionError, match="PROMPT_TUNING") as caught:
        Speculator(peft.get_peft_model(own("medusa")[0], kind))
    one_line(caught.value)


@pytest.mark.parametrize("tree", ["plain", "chain:3"])
def test_attention_that_drops_tokens_is_refused_past_its_window(tree: str) -> None:
    """Doge attends to so many tokens at most; up to there the text is that of `generate`."""
    sizes = {name: value for name, value in COMMON.items() if name != "head_dim"}
    torch.manual_seed(1)
    model: Any = tf.DogeForCausalLM(tf.DogeConfig(**sizes, keep_window_size=16)).double().eval()
    ours = Speculator(model, None if tree == "plain" else drafter("lookup", "tiny"), tree=tree)
    short = OPTIONS | {"max_new_tokens": 9}
    assert torch.equal(ours.generate(IDS, **short), model.generate(IDS, **short))
    with pytest.raises(DecodingError, match="all 16 positions") as caught:
        text(ours.generate)
    one_line(caught.value)
    with pytest.raises(OptionError, match=r"16 positions .*drops the tokens") as refused:
        ours.generate(prompts([20])[0], **OPTIONS)
    one_line(refused.value)
