"""Models that also read images: text alone is decoded, images are refused."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig

import headstart
from headstart.heads import OptionError, family
from headstart.infer import Speculator
from tests.support.bytewise import save_target
from tests.support.recurrent import DELTA, LAYERS
from tests.support.tiny import COMMON, config_of, one_line, prompts

IMAGE = 60  # the token in whose place an image stands; the prompts have none from there on
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
PATCHES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
QWEN_VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
}  # fmt: skip
QWEN_IDS: dict[str, Any] = {
    "image_token_id": IMAGE, "video_token_id": 61, "vision_start_token_id": 62,
    "vision_end_token_id": 63,
}  # fmt: skip


def gemma3() -> Any:
    text = config_of(
        tf.Gemma3TextConfig,
        query_pre_attn_scalar=8,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"],
    )
    return tf.Gemma3ForConditionalGeneration(
        tf.Gemma3Config(
            text_config=text,
            vision_config=PATCHES,
            mm_tokens_per_image=4,
            image_token_index=IMAGE,
            boi_token_index=61,
            eoi_token_index=62,
        )
    )


def mistral3() -> Any:
    return tf.Mistral3ForConditionalGeneration(
        tf.Mistral3Config(
            text_config=tf.MistralConfig(**COMMON, sliding_window=9),
            vision_config=tf.PixtralVisionConfig(**PATCHES),
            image_token_index=IMAGE,
        )
    )


def qwen2_5_vl() -> Any:
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = config_of(Qwen2_5_VLTextConfig, head_dim=..., rope_parameters=rotary)
    return tf.Qwen2_5_VLForConditionalGeneration(
        tf.Qwen2_5_VLConfig(text_config=text.to_dict(), vision_config=QWEN_VISION, **QWEN_IDS)
    )


def qwen3_5() -> Any:
    text = config_of(tf.Qwen3_5TextConfig, **LAYERS, **DELTA)
    vision = QWEN_VISION | {"num_position_embeddings": 16}
    return tf.Qwen3_5ForConditionalGeneration(
        tf.Qwen3_5Config(text_config=text, vision_config=vision, **QWEN_IDS)
    )


MODELS = {each.__name__: each for each in (gemma3, mistral3, qwen2_5_vl, qwen3_5)}


@cache
def built(name: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return MODELS[name]().double().eval()


@cache
def eagle3(name: str) -> Any:
    kind, target = family("eagle3"), built(name)
    config: Any = kind.config_class
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return kind(config.for_target(target)).double().bind(target)


def texts() -> tuple[Tensor, Tensor]:
    ids, mask = prompts([13, 7, 10, 3])
    return ids.clamp(max=IMAGE - 1), mask


@pytest.mark.parametrize("name", MODELS)
def test_text_equals_generate(name: str) -> None:
    """Also positions that `generate` numbers for each axis of an image are taken."""
    model, (ids, mask) = built(name), texts()
    speculator = Speculator(model, eagle3(name), tree="cartesian:3,2")
    for rows in (slice(None), slice(0, 1)):
        given: dict[str, Any] = {"input_ids": ids[rows], "attention_mask": mask[rows], **GREEDY}
        expected = model.generate(**given)
        assert len(set(expected[0].tolist())) > 5
        assert torch.equal(speculator.generate(**given), expected)


@pytest.mark.parametrize("name", MODELS)
def test_it_loads_by_name(name: str, tmp_path: Path) -> None:
    """Also where `AutoModelForCausalLM` knows no model of the type, as of the middle two."""
    model, (ids, mask) = built(name), texts()
    model.save_pretrained(tmp_path)
    tokenizer = save_target(tmp_path / "other")[1]
    found = headstart.load(tmp_path, "lookup", tokenizer=tokenizer, dtype=torch.float64)
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, **GREEDY}
    assert torch.equal(found.generate(**given), model.generate(**given))


def test_an_image_is_refused() -> None:
    model, (ids, _) = built("gemma3"), texts()
    ids[:, 2:6] = IMAGE
    pixels = torch.zeros(len(ids), 3, 28, 28, dtype=torch.float64)
    with pytest.raises(OptionError, match="an image or a video was given") as caught:
        Speculator(model).generate(ids, pixel_values=pixels, **GREEDY)
    one_line(caught.value)


@pytest.mark.parametrize("axis", range(4))
def test_other_positions_on_any_axis_are_refused(axis: int) -> None:
    model, (ids, mask) = built("qwen3_5"), texts()
    positions = (mask.cumsum(-1) - 1).expand(4, -1, -1).clone()  # [4, B, P]
    given = {"attention_mask": mask, **GREEDY}
    natural = Speculator(model).generate(ids, position_ids=positions, **given)
    assert torch.equal(natural, model.generate(ids, **given))
    positions[axis, 1, -1] += 1
    with pytest.raises(OptionError, match="position_ids do not count") as caught:
        Speculator(model).generate(ids, position_ids=positions, **given)
    one_line(caught.value)
