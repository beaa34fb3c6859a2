"""Damaged files: an artifact or another's checkpoint loads and decodes, or is refused on a line."""

import io
import json
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from headstart.heads import load_drafter
from headstart.heads.artifacts.conversion import convert
from headstart.heads.artifacts.source import DrafterSource
from headstart.infer import Speculator, load
from headstart.reports.description import describe, print_description
from headstart.terminal import one_line
from tests.support import published_eagle as eagle
from tests.support.artifacts import save
from tests.support.tiny import letters, prompts, tiny

VALUES: list[Any] = [
    None, True, -1, 0, 10**9, 10**30, 0.5, float("nan"), float("inf"), "", "x", "../../x",
    "\x1b[2J", [], [[]], [-1], ["a"], {}, {"a": {"b": [1]}}, [0] * 10_000,
]  # fmt: skip
REFUSED = (ValueError, OSError, SafetensorError)  # what the command line prints on one line


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


def mutate_bytes(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    return draw.choice([
        lambda: data[:at],
        lambda: data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :],
        lambda: data[:at] + draw.randbytes(draw.randrange(1, 64)) + data[at:],
        lambda: data + data,
        lambda: b"",
        lambda: draw.randbytes(8) + data[8:],
        lambda: b"[" * 100_000,
        lambda: b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    ])()  # fmt: skip


def mutate_json(data: bytes, draw: random.Random) -> bytes:
    """One place in the document, at any depth, gets another value or goes."""
    document = json.loads(data)
    places: list[tuple[Any, Any]] = []
    left = [document]
    while left:
        value = left.pop()
        if isinstance(value, dict | list):
            keys = list(value) if isinstance(value, dict) else list(range(len(value)))
            places += [(value, key) for key in keys]
            left += [value[key] for key in keys]
    holder, key = draw.choice(places)
    if draw.random() < 0.2:
        del holder[key]
    elif isinstance(holder, dict) and draw.random() < 0.1:
        holder[f"{key}_"] = holder.pop(key)
    else:
        holder[key] = draw.choice(VALUES)
    return json.dumps(document).encode()


def tried(action: Any) -> Any:
    """What it returns; None where it was refused, and then on one line."""
    try:
        return action()
    except REFUSED as error:
        line = one_line(error)
        assert "\n" not in line and len(line) > 20, line
        return None


def check(folder: Path, foreign: bool, out: Path) -> bool:
    """Inspect, load and convert what is in a folder; whether it decodes."""
    target: Any = tiny("llama")
    if not foreign and (found := tried(lambda: describe(folder))) is not None:
        print_description(found, io.StringIO())
    drafter = tried(lambda: load_drafter(folder, target))
    if foreign:
        made = tried(lambda: convert(folder, target, letters(), out))
        assert (made is None) == (drafter is None)
    speculator = tried(lambda: load(target, DrafterSource(folder)))
    if speculator is None:
        return False
    assert drafter is not None
    ids, _ = prompts([5])
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    text = tried(lambda: speculator.generate(ids, **options))
    if text is not None:
        assert torch.equal(text, Speculator(target).generate(ids, **options))
    return True


@pytest.mark.parametrize("foreign", [False, True], ids=["artifact", "checkpoint"])
@pytest.mark.parametrize(
    "cases", [50, pytest.param(1000, marks=pytest.mark.proof)], ids=["few", "many"]
)
def test_a_damaged_file_is_refused_or_harmless(
    cases: int, foreign: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny("llama"), "name_or_path", "tiny")
    whole = checkpoint(tmp_path / "whole") if foreign else artifact(tmp_path / "whole")
    names = sorted(path.name for path in whole.iterdir() if path.name != "README.md")
    folder, out, loaded = tmp_path / "case", tmp_path / "out", 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert check(whole, foreign, out)
        for case in range(cases):
            draw = random.Random(case)
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(whole, folder)
            path = folder / names[case % len(names)]
            as_json = path.suffix == ".json" and draw.random() < 0.7
            mutate = mutate_json if as_json else mutate_bytes
            path.write_bytes(mutate(path.read_bytes(), draw))
            try:
                loaded += check(folder, foreign, out)
            except BaseException:
                print(f"case {case}: {path.name}, {path.read_bytes()[:400]!r}")
                raise
    assert 0 < loaded < cases


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "no_such"}, {"hidden_act": 5}, {"hidden_act": None},
        {"num_attention_heads": -4}, {"num_attention_heads": 10**9}, {"num_attention_heads": "4"},
        {"num_attention_heads": []},
        {"head_dim": 0.5}, {"head_dim": 10**12}, {"rms_norm_eps": "x"}, {"rope_theta": "x"},
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
