"""Modules for multi-token prediction in quantized files: FP8 in blocks is read, others refused."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.heads import OptionError, load_drafter
from headstart.heads.mtp import Mtp, MtpConfig
from headstart.heads.parts.shipped_tensors import in_full
from headstart.infer import Speculator
from tests.support.families import LENGTHS
from tests.support.shipped_mtp import hybrid_with_module, with_module
from tests.support.tiny import one_line, prompts

FP8, WHOLE = torch.float8_e4m3fn, ("embed_tokens", "lm_head", "conv1d", "eh_proj", "fc.", ".gate.")
KINDS: dict[str, tuple[Callable[..., Any], str]] = {
    "qwen3.5": (hybrid_with_module, "mtp.layers."),
    "qwen3-next": (hybrid_with_module, "mtp.layers."),
    "glm4": (with_module, "model.layers.2."),
    "deepseek-v3": (with_module, "model.layers.2."),
}
"""How a target is made, and how its files name the module's layer."""


def by_definition(stored: Tensor, scales: Tensor, blocks: tuple[int, int]) -> Tensor:
    rows, columns = stored.shape
    found = [
        [
            float(stored[i, j]) * float(scales[i // blocks[0], j // blocks[1]])
            for j in range(columns)
        ]
        for i in range(rows)
    ]
    return torch.tensor(found)


def in_blocks(weight: Tensor, blocks: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A matrix in FP8, and the scales of its blocks."""
    parts = [part.split(blocks[1], 1) for part in weight.float().split(blocks[0])]
    scales = torch.stack([torch.stack([part.abs().max() / 448 for part in row]) for row in parts])
    rows = [
        torch.cat([part / scale for part, scale in zip(row, of, strict=True)], 1)
        for row, of in zip(parts, scales, strict=True)
    ]
    return torch.cat(rows).to(FP8), scales


def store(folder: Path, prefix: str, blocks: tuple[int, int]) -> dict[str, Tensor]:
    """Have a folder's files hold matrices in FP8; returns what those are by the definition."""
    file, known = folder / "model.safetensors", {}
    tensors = load_file(file)
    for name in [name for name in tensors if name.startswith(prefix)]:
        if tensors[name].dim() == 2 and not any(part in name for part in WHOLE):
            tensors[name], scales = in_blocks(tensors[name], blocks)
            known[name] = by_definition(tensors[name], scales, blocks)
            tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, file, {"format": "pt"})
    say(folder, quant_method="fp8", weight_block_size=blocks, fmt="e4m3")
    return known


def say(folder: Path, **quantization: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": quantization}
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_in_fp8_is_what_the_definition_says(kind: str, tmp_path: Path) -> None:
    """Blocks that do not divide the matrices; in the target there is no trace of a quantization."""
    make, prefix = KINDS[kind]
    plain, stored = make(kind, tmp_path / "plain"), make(kind, tmp_path / "stored")
    known = store(tmp_path / "stored", prefix, (12, 20))
    assert len(known) > 5
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    assert not any(torch.allclose(tensors[name].float(), each) for name, each in known.items())
    save_file(tensors | known, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    found, expected = (load_drafter("mtp", target).state_dict() for target in (stored, plain))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def test_a_checkpoint_in_fp8_decodes_with_its_module(tmp_path: Path) -> None:
    hybrid_with_module("qwen3.5", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: each.float() for name, each in load_file(file).items()}, file)
    assert len(store(tmp_path, "", (8, 8))) > 20
    target: Any = tf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids, mask = prompts(LENGTHS)
    how: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    speculator = Speculator(target, load_drafter("mtp", target), tree="chain:2")
    written = target.generate(ids, **how, pad_token_id=0)
    assert torch.equal(speculator.generate(ids, **how, pad_token_id=0), written)


def test_scales_may_be_in_another_file(tmp_path: Path) -> None:
    target = hybrid_with_module("qwen3.5", tmp_path)
    store(tmp_path, "mtp.layers.", (16, 16))
    whole = load_drafter("mtp", target).state_dict()
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    places = {name: "b" if name.endswith("scale_inv") else "a" for name in tensors}
    for place in "ab":
        part = {name: tensors[name] for name, held in places.items() if held == place}
        save_file(part, tmp_path / f"{place}.safetensors", {"format": "pt"})
    index = {"weight_map": {name: f"{place}.safetensors" for name, place in places.items()}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, tensor in load_drafter("mtp", target).state_dict().items():
        assert torch.equal(whole[name], tensor)


def test_scales_of_whole_matrices_and_of_several() -> None:
    torch.manual_seed(3)
    stored, scales = torch.randn(3, 5, 7).to(FP8), torch.rand(3, 2, 3)
    expected = [by_definition(*each, (4, 3)) for each in zip(stored, scales, strict=True)]
    assert torch.equal(in_full(stored, scales, (4, 3)), torch.stack(expected))
    one = torch.tensor(0.25)
    for given in (one, one.view(1), one.to(torch.float8_e8m0fnu)):
        assert torch.equal(in_full(stored[0], given, None), stored[0].float() / 4)


@pytest.mark.parametrize("kind", ["qwen3.5", "glm4"])
@pytest.mark.parametrize(
    ("changes", "quantization", "reason"),
    [
        ({"weight": None, "weight_packed": torch.int32}, {}, "weight_packed is quantized by compr"),
        ({"weight": FP8, "weight_scale": torch.float32}, {}, "weight is quantized by compressed-t"),
        ({"weight": torch.int8}, {"quant_method": "int8"}, "weight is quantized by int8; of such"),
        ({"weight": torch.uint8}, {"quant_method": None}, "weight is quantized by a way that"),
        (
            {"weight": FP8, "weight_scale_inv": torch.float32},
            {"quant_method": "fp8", "weight_block_size": [16, 16]},
            r"k_proj.weight: its scales are torch.float32 of shape \[16, 32\]; expected .*\[1, 2\]",
        ),
        (
            {"weight": FP8, "weight_scale_inv": torch.uint8},
            {"quant_method": "fp8", "weight_block_size": [1, 1]},
            "its scales are torch.uint8",
        ),
    ],
)
def test_other_formats_are_refused_by_name(
    kind: str,
    changes: dict[str, torch.dtype | None],
    quantization: dict[str, Any],
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make, prefix = KINDS[kind]
    target = make(kind, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(each for each in tensors if each.startswith(prefix) and "k_proj" in each)
    weight = tensors[name]
    for part, dtype in changes.items():
        tensors.pop(name.replace("weight", part), None)
        if dtype is not None:
            tensors[name.replace("weight", part)] = weight.to(dtype)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    say(tmp_path, **{"quant_method": "compressed-tensors", **quantization})
    with pytest.raises(OptionError, match=rf"holds no module .* \(.*{reason}.*; train") as refused:
        load_drafter("mtp", target)
    one_line(refused.value)
    with caplog.at_level(logging.WARNING, "headstart.heads.mtp"):
        made: Any = Mtp(MtpConfig.for_target(target)).to(target.dtype).bind(target)
        made.init_from_target(torch.arange(target.config.vocab_size))
    assert "Training starts with a new one." in caplog.text
