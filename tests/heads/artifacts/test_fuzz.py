"""Damaged files: an artifact or another's checkpoint loads and decodes, or is refused on a line."""

import io
import json
import random
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headstart.heads import load_drafter
from headstart.heads.artifacts.conversion import convert
from headstart.heads.artifacts.files import MANIFEST, WEIGHTS
from headstart.heads.artifacts.manifest import sha256
from headstart.heads.artifacts.source import DrafterSource
from headstart.infer import Speculator, load
from headstart.reports.description import describe, print_description
from headstart.terminal import one_line
from tests.support import published_eagle as eagle
from tests.support.artifacts import save
from tests.support.mutations import REFUSED, mutate_bytes, mutate_header, mutate_json, tried
from tests.support.published_mlp_speculator import LAYOUTS
from tests.support.tiny import letters, prompts, tiny


def artifact(folder: Path) -> Path:
    save(folder)
    (folder / "tree.json").write_text("[[0],[1],[0,0]]")
    plan = {
        "device": "x", "dtype": "float64", "batch_size": 1, "policy": "chain:1", "tree": [[0]],
        "tau": 1.5, "speedup": 1.2, "acceptance": [[0.5]], "costs": {}, "candidates": [],
        "prompts": 1, "new_tokens": 1,
    }  # fmt: skip
    (folder / "plan.json").write_text(json.dumps({"x, float64, batch 1": plan}))
    return folder


def checkpoint(folder: Path) -> Path:
    version, prefix, config, trimmed = eagle.DIALECTS["EAGLE-3"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(eagle.published(version, prefix, trimmed), folder / "model.safetensors")
    return folder


def mlp_speculator(folder: Path) -> Path:
    layout = LAYOUTS["Arctic's LSTM"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(layout.config))
    tensors = {name: tensor.clone() for name, tensor in layout.tensors().items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def language_model(folder: Path) -> Path:
    """A smaller model, with the tokenizer that the target is given."""
    tiny("llama", 2).save_pretrained(folder)
    letters().save_pretrained(folder)
    return folder


def check(folder: Path, foreign: bool, out: Path) -> bool:
    """Inspect, load and convert what is in a folder; whether it decodes."""
    target: Any = tiny("llama")
    if not foreign and (found := tried(lambda: describe(folder))) is not None:
        print_description(found, io.StringIO())
    drafter = tried(lambda: load_drafter(folder, target, letters()))
    if foreign:
        shutil.rmtree(out, ignore_errors=True)
        made = tried(lambda: convert(folder, target, letters(), out))
        assert (made is None) == (drafter is None)
    speculator = tried(lambda: load(target, DrafterSource(folder), tokenizer=letters()))
    if speculator is None:
        return False
    assert drafter is not None
    ids, _ = prompts([5])
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    text = tried(lambda: speculator.generate(ids, **options))
    if text is not None:
        assert torch.equal(text, Speculator(target).generate(ids, **options))
    return True


def damage(path: Path, draw: random.Random) -> None:
    """Change a file; a manifest beside it then has the sha256 of what it is now."""
    how = mutate_bytes
    if path.suffix in (".json", ".safetensors") and draw.random() < 0.7:
        how = mutate_json if path.suffix == ".json" else mutate_header
    path.write_bytes(how(path.read_bytes(), draw))
    if path.name == WEIGHTS and (manifest := path.with_name(MANIFEST)).is_file():
        known = json.loads(manifest.read_text()) | {"weights_sha256": sha256(path)}
        manifest.write_text(json.dumps(known))


KINDS = {
    "artifact": artifact, "checkpoint": checkpoint, "mlp_speculator": mlp_speculator,
    "model": language_model,
}  # fmt: skip
FEW, MANY = (
    {"artifact": 30, "checkpoint": 20, "mlp_speculator": 10, "model": 20},
    {"artifact": 600, "checkpoint": 500, "mlp_speculator": 300, "model": 300},
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "cases", [FEW, pytest.param(MANY, marks=pytest.mark.proof)], ids=["few", "many"]
)
def test_a_damaged_file_is_refused_or_harmless(
    cases: dict[str, int], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the recipes of `test_recipe_fuzz` these are 100 cases, or 2,000."""
    monkeypatch.setattr(tiny("llama"), "name_or_path", "tiny")
    whole, foreign = KINDS[kind](tmp_path / "whole"), kind != "artifact"
    names = sorted(path.name for path in whole.iterdir() if path.name != "README.md")
    folder, out, loaded = tmp_path / "case", tmp_path / "out", 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert check(whole, foreign, out)
        for case in range(cases[kind]):
            draw = random.Random(case)
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(whole, folder)
            path = folder / names[case % len(names)]
            damage(path, draw)
            started = time.process_time()
            try:
                loaded += check(folder, foreign, out)
                assert time.process_time() - started < 20, "it takes too long"
            except BaseException:
                print(f"case {case}: {path.name}, {path.read_bytes()[:400]!r}")
                raise
    assert 0 < loaded < cases[kind]


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "no_such"}, {"hidden_act": 5}, {"hidden_act": None},
        {"num_attention_heads": -4}, {"num_attention_heads": 10**9}, {"num_attention_heads": "4"},
        {"num_attention_heads": []},
        {"head_dim": 0.5}, {"head_dim": 10**12}, {"rms_norm_eps": "x"}, {"rope_theta": "x"},
        {"rope_theta": 0}, {"rope_theta": float("inf")}, {"rope_theta": -5.0},
        {"sliding_window": -3, "layer_types": ["sliding_attention"]}, {"rms_norm_eps": -1.0},
        {"partial_rotary_factor": "x"}, {"rope_scaling": {"rope_dim": 10**400}},
        {"rope_scaling": "x"}, {"rope_scaling": {"rope_type": "no_such"}},
        {"rope_scaling": {"rope_type": "llama3"}}, 
        {"eagle_config": "x"}, {"eagle_aux_hidden_state_layer_ids": "abc"},
        {"eagle_aux_hidden_state_layer_ids": [10**9, 1, 2]}, {"transformer_layer_config": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_an_eagle_config_with_a_wrong_value(change: dict[str, Any], tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(REFUSED) as caught:
        Speculator(tiny("llama"), load_drafter(folder, tiny("llama")))
    assert 20 < len(one_line(caught.value)) < 700


@pytest.mark.parametrize("name", ["d2t", "t2d", "fc.weight", "norm.weight"])
def test_an_empty_tensor(name: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "head")
    version, prefix, _, trimmed = eagle.DIALECTS["EAGLE-3"]
    tensors = eagle.published(version, prefix, trimmed)
    tensors[name] = tensors[name][:0]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(REFUSED) as caught:
        load_drafter(folder, tiny("llama"))
    assert 20 < len(one_line(caught.value)) < 700
