"""An artifact with an adapter: what it changes in a target, how it loads, what is refused."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.heads import (
    ArtifactError,
    Manifest,
    OptionError,
    fingerprint,
    load_drafter,
    save_drafter,
)
from headstart.heads.artifacts.files import MANIFEST
from headstart.heads.artifacts.manifest import sha256
from headstart.heads.artifacts.publish import clean_copy
from headstart.heads.declared.adapter import ADAPTER, ADAPTER_WEIGHTS
from headstart.heads.medusa2 import Medusa2, Medusa2Config
from headstart.infer import Speculator
from tests.support.tiny import one_line, prompts, tiny

PROMPTS, MASK = prompts([5, 8])


def target(name: str = "llama") -> Any:
    """Its own copy: an adapter changes it."""
    return copy.deepcopy(tiny(name))


def medusa2(model: Any, **options: Any) -> Medusa2:
    options = {"heads": 2, "rank": 3, **options}
    return Medusa2(Medusa2Config.for_target(model, **options)).to(model.dtype).bind(model).eval()


def adapt(drafter: Medusa2, model: Any) -> None:
    """Put an adapter into the model that changes what it says."""
    assert drafter.adapter is not None
    drafter.adapter.attach(model)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in (*drafter.adapter.parameters(), *drafter.parameters()):
            parameter.normal_(0, 0.2)


def artifact(folder: Path, name: str = "llama", **options: Any) -> tuple[Path, Any]:
    """A saved drafter, and the adapted target that it was saved with."""
    model = target(name)
    drafter = medusa2(model, **options)
    adapt(drafter, model)
    manifest = Manifest("medusa2", "org/tiny", fingerprint(model), target_revision="0" * 40)
    return save_drafter(drafter, folder / "head", manifest), model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=PROMPTS, attention_mask=MASK).logits


def greedy(model: Any, **options: Any) -> Tensor:
    return model.generate(
        PROMPTS, attention_mask=MASK, max_new_tokens=20, do_sample=False, pad_token_id=0, **options
    )


def same_weights(model: Any, other: Any) -> bool:
    mine, its = model.state_dict(), other.state_dict()
    return mine.keys() == its.keys() and all(torch.equal(mine[key], its[key]) for key in mine)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_the_target_is_its_old_self_without_the_adapter(name: str) -> None:
    model, before = target(name).requires_grad_(True), logits(target(name))
    drafter = medusa2(model)
    assert drafter.adapter is not None
    drafter.adapter.attach(model)
    assert torch.equal(logits(model), before), "a fresh adapter says nothing"
    drafter.adapter.detach()
    adapt(drafter, model)
    assert (logits(model) - before).abs().max() > 1e-2
    with drafter.adapter.disabled():
        assert torch.equal(logits(model), before)
    assert (logits(model) - before).abs().max() > 1e-2
    drafter.adapter.detach()
    assert torch.equal(logits(model), before) and same_weights(model, tiny(name))
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_a_loaded_drafter_decodes_the_adapted_target(name: str, tmp_path: Path) -> None:
    options = {"modules": ["q_proj", "lm_head"]} if name == "llama" else {}
    folder, adapted = artifact(tmp_path, name, **options)
    expected, plain = greedy(adapted), greedy(target(name))
    assert not torch.equal(expected, plain)
    model = target(name)
    drafter = load_drafter(folder, model)
    assert type(model) is type(tiny(name)) and not drafter.adapter.attached  # type: ignore[union-attr]
    assert model.state_dict().keys() == tiny(name).state_dict().keys()
    torch.testing.assert_close(logits(model), logits(adapted))
    speculator = Speculator(model, drafter, tree="chain:2")
    assert torch.equal(greedy(model, custom_generate=speculator), expected)
    assert torch.equal(greedy(model), expected)


def test_dropout_acts_while_training_alone() -> None:
    model = target()
    drafter = medusa2(model, dropout=0.5)
    adapt(drafter, model)
    calm = logits(model)
    assert torch.equal(logits(model), calm)
    drafter.train()
    assert not torch.equal(logits(model), calm) and not model.training
    drafter.eval()
    assert torch.equal(logits(model), calm)


def test_the_artifact_holds_no_pickle_and_no_more_than_needed(tmp_path: Path) -> None:
    folder, _ = artifact(tmp_path)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    assert names == [
        "adapter", "adapter/adapter_config.json", "adapter/adapter_model.safetensors",
        "config.json", "headstart.json", "model.safetensors",
    ]  # fmt: skip
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["adapter_sha256"] == sha256(folder / ADAPTER_WEIGHTS)
    assert not any("lora" in name for name in load_file(folder / "model.safetensors"))


def test_what_is_pushed_has_the_adapter_and_no_path_of_this_machine(tmp_path: Path) -> None:
    folder, _ = artifact(tmp_path)
    config = folder / ADAPTER / "adapter_config.json"
    base = {**json.loads(config.read_text()), "base_model_name_or_path": str(tmp_path)}
    config.write_text(json.dumps(base))
    (tmp_path / "clean").mkdir()
    files = clean_copy(folder, tmp_path / "clean", "org/name")
    assert {str(file.relative_to(tmp_path / "clean")) for file in files} >= {
        "adapter/adapter_config.json", "adapter/adapter_model.safetensors",
    }  # fmt: skip
    assert str(tmp_path) not in (tmp_path / "clean/adapter/adapter_config.json").read_text()
    assert load_drafter(tmp_path / "clean", target()).config.model_type == "headstart_medusa2"


def test_a_target_that_is_adapted_already_is_refused(tmp_path: Path) -> None:
    folder, _ = artifact(tmp_path)
    model = target()
    load_drafter(folder, model)
    once = copy.deepcopy(model)
    with pytest.raises(ArtifactError) as caught:
        load_drafter(folder, model)
    assert "adapted or trained further" in one_line(caught.value)
    assert same_weights(model, once)


def signed(folder: Path) -> None:
    """Make the manifest say that the adapter's file is the one that was saved."""
    path = folder / MANIFEST
    manifest = json.loads(path.read_text()) | {"adapter_sha256": sha256(folder / ADAPTER_WEIGHTS)}
    path.write_text(json.dumps(manifest))


def missing(folder: Path) -> None:
    shutil.rmtree(folder / ADAPTER)


def missing_and_denied(folder: Path) -> None:
    shutil.rmtree(folder / ADAPTER)
    path = folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"adapter_sha256": ""}))


def altered(folder: Path) -> None:
    weights = load_file(folder / ADAPTER_WEIGHTS)
    save_file({k: v + 1e-3 for k, v in weights.items()}, folder / ADAPTER_WEIGHTS)


def cut(folder: Path) -> None:
    path = folder / ADAPTER_WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])
    signed(folder)


def with_a_stranger(folder: Path) -> None:
    weights = load_file(folder / ADAPTER_WEIGHTS)
    save_file({**weights, "stranger": torch.ones(2)}, folder / ADAPTER_WEIGHTS)
    signed(folder)


def of_another_rank(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rank": 2}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (missing, "missing or not the file that was saved"),
        (missing_and_denied, "missing or damaged"),
        (altered, "not the file that was saved"),
        (cut, "cannot be read"),
        (with_a_stranger, "stranger is missing, unknown"),
        (of_another_rank, "of another shape"),
    ],
)
def test_a_damaged_adapter_is_refused_and_the_target_left_alone(
    damage: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    folder, _ = artifact(tmp_path)
    damage(folder)
    model = target()
    with pytest.raises(ArtifactError) as caught:
        load_drafter(folder, model)
    assert said in one_line(caught.value)
    assert same_weights(model, tiny("llama"))


def test_a_merged_drafter_is_not_saved_without_its_adapter(tmp_path: Path) -> None:
    folder, _ = artifact(tmp_path)
    drafter = load_drafter(folder, target())
    with pytest.raises(ArtifactError, match="merged already") as caught:
        save_drafter(drafter, tmp_path / "again", Manifest("medusa2", "org/tiny", ""))
    one_line(caught.value)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 0}, "rank"),
        ({"dropout": 1.0}, "dropout"),
        ({"heads_first": 1}, "heads_first"),
        ({"head_weight": 0}, "head_weight"),
        ({"ramp": "cosine"}, "ramp"),
        ({"heads": 0}, "heads"),
        ({"lora_rank": 4}, "lora_rank"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said) as caught:
        Medusa2Config.for_target(tiny("llama"), **options)
    one_line(caught.value)


@pytest.mark.parametrize(
    ("name", "modules", "said"),
    [("llama", ["no_proj"], "cannot be adapted"), ("gpt2", ["c_attn", "lm_head"], "ties")],
)
def test_layers_that_cannot_be_adapted_are_refused(
    name: str, modules: list[str], said: str
) -> None:
    model = target(name)
    drafter = medusa2(model, modules=modules)
    assert drafter.adapter is not None
    with pytest.raises(OptionError, match=said) as caught:
        drafter.adapter.attach(model)
    one_line(caught.value)
    assert same_weights(model, tiny(name)) and not drafter.adapter.attached
