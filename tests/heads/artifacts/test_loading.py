"""Bad days of a load: foreign targets, damage, pickles, hostile files."""

import copy
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from headstart.heads import (
    ArtifactError,
    Manifest,
    OptionError,
    fingerprint,
    load_drafter,
    save_drafter,
)
from headstart.heads.artifacts.manifest import sha256
from headstart.heads.eagle import Eagle, EagleConfig
from headstart.infer import Speculator
from tests.support.artifacts import OLD, medusa, save, value_of
from tests.support.tiny import COMMON, one_line, prompts, tiny


def refused(folder: Path, **options: Any) -> str:
    with pytest.raises(ArtifactError) as caught:
        load_drafter(folder, tiny("llama"), **options)
    return one_line(caught.value)


# Another base, width, depth, device or type.


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 48, "head_dim": 12},
        {"num_hidden_layers": 3},
        {"num_hidden_layers": 1},
        {"vocab_size": 65},
    ],
)
def test_a_target_of_another_shape_is_refused(change: dict, tmp_path: Path) -> None:
    folder = save(tmp_path / "head")
    other: Any = tf.LlamaForCausalLM(tf.LlamaConfig(**{**COMMON, **change})).eval()
    with pytest.raises(ArtifactError, match="another target") as caught:
        load_drafter(folder, other)
    assert "tiny-llama" in one_line(caught.value)


@pytest.mark.parametrize("target_type", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_type", [torch.float64, torch.float32, torch.bfloat16])
def test_other_types_decode(
    target_type: torch.dtype, head_type: torch.dtype, tmp_path: Path
) -> None:
    """The fingerprint and the heads bear every pair of types."""
    folder, model = save(tmp_path / "head"), copy.deepcopy(tiny("llama")).to(target_type)
    drafter = load_drafter(folder, model, dtype=head_type)
    assert (drafter.dtype, model.dtype) == (head_type, target_type)
    ids, _ = prompts([5])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    speculator = Speculator(model, drafter)
    text = speculator.generate(ids, **options)
    assert text.shape == (1, 17) and speculator.stats.rounds > 0
    if target_type == torch.float64:
        assert torch.equal(text, Speculator(model).generate(ids, **options))


def test_another_device_is_refused() -> None:
    drafter = medusa().to(torch.device("meta"))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="different devices") as caught:
        Speculator(tiny("llama"), drafter)
    assert "cpu" in one_line(caught.value) and "meta" in str(caught.value)


# Damage, pickles, hostile files.


def test_every_flipped_byte_is_seen(tmp_path: Path) -> None:
    folder = save(tmp_path / "head")
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    for at in range(0, len(data), len(data) // 40):
        weights.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert str(weights) in refused(folder)
    for length in (0, 7, 8, 100, len(data) - 1):
        weights.write_bytes(data[:length])
        assert str(weights) in refused(folder)
    weights.write_bytes(data)
    assert value_of(folder) == OLD


def test_a_manifest_of_a_newer_headstart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Fields that are unknown here are ignored, and named; those that are needed must be there."""
    folder = save(tmp_path / "head")
    path = folder / "headstart.json"
    manifest = json.loads(path.read_text())
    assert value_of(folder) == OLD and "newer" not in caplog.text
    path.write_text(json.dumps(manifest | {"signature": "x", "energy": {}}))
    assert value_of(folder) == OLD
    (told,) = [record.getMessage() for record in caplog.records if "newer" in record.getMessage()]
    assert told.startswith(f"{path} was written by a newer") and "'energy', 'signature'" in told
    del manifest["target_fingerprint"]
    path.write_text(json.dumps(manifest | {"signature": "x"}))
    assert "cannot be read (it has no target_fingerprint)" in refused(folder)
    path.write_text(json.dumps(manifest | {"target_fingerprint": 3}))
    assert "cannot be read" in refused(folder) and "target_fingerprint" in refused(folder)


class Bomb:
    """Unpickling it runs code."""

    def __reduce__(self) -> tuple:
        return os.mkdir, (os.environ["BOMB"],)


def pickled(folder: Path, name: str, content: Any) -> None:
    """Put a pickle in the weights' place, as the manifest would have it."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    torch.save(content, folder / name)
    manifest = json.loads((folder / "headstart.json").read_text())
    manifest["weights_sha256"] = sha256(folder / name)
    (folder / "headstart.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt", "heads.pkl"])
def test_a_pickle_is_refused(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "head")
    pickled(folder, name, load_file(folder / "model.safetensors"))
    assert name in refused(folder) and "pickle" in refused(folder)
    if name == "pytorch_model.bin":
        drafter: Any = load_drafter(folder, tiny("llama"), allow_pickle=True)
        assert drafter.weight.unique().item() == OLD
    else:
        assert name in refused(folder, allow_pickle=True)


def test_a_hostile_pickle_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "head")
    monkeypatch.setenv("BOMB", str(tmp_path / "boom"))
    pickled(folder, "pytorch_model.bin", {"weight": Bomb()})
    assert "pytorch_model.bin holds more than tensors" in refused(folder, allow_pickle=True)
    assert not (tmp_path / "boom").exists()
    pickle.loads(pickle.dumps(Bomb()))  # the control
    assert (tmp_path / "boom").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"auto_map": {"AutoModel": "code.Drafter"}}, "auto_map"),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights"),
        ({"transformers_weights": "../other.safetensors"}, "transformers_weights"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"attn_implementation": "someone/kernel"}, "attn_implementation"),
        ({"_attn_implementation": "someone/kernel"}, "_attn_implementation"),
        ({"_attn_implementation_internal": "someone/kernel"}, "_attn_implementation_internal"),
        ({"attn_implementation_internal": "someone/kernel"}, "attn_implementation_internal"),
        ({"experts_implementation": "x"}, "experts_implementation"),
        ({"kernel_config": {"kernel_mapping": {}}}, "kernel_config"),
        ({"backbone": "someone/model"}, "backbone"),
        ({"attribute_map": {"x": "_attn_implementation"}, "x": "someone/kernel"}, "attribute_map"),
        ({"layer": {"parts": [{"_attn_implementation": "someone/kernel"}]}}, "_attn_implement"),
        ({"a": [[{"b": {"auto_map": {}}}]]}, "auto_map"),
        ({"model_type": "llama"}, "model type 'llama'"),
        ({"heads": "four"}, "config.json"),
        ({"chunk": 1, "zeta": 2}, "sets chunk and 1 more, which no headstart_medusa has"),
        ({"configuration_files": ["config.4.0.0.json"]}, "sets configuration_files"),
        ({"layer": {"hidden_size": 32}}, "sets layer"),
        ({"heads": 3}, "config.json"),
        ({"layers": 0}, "config.json"),
    ],
)
def test_a_config_that_asks_for_more(settings: dict, said: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "head")
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    save_file({"weight": torch.zeros(1)}, folder / "other.safetensors")
    save_file({"weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    assert said in refused(folder)
    assert not (tmp_path / "ran").exists()


def test_a_layer_has_no_settings_but_llamas(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    target = tiny("llama")
    drafter = Eagle(EagleConfig.for_target(target)).double().bind(target)
    save_drafter(drafter, folder, Manifest("eagle", "tiny-llama", fingerprint(target)))
    config = json.loads((folder / "config.json").read_text())
    for layer in ({"attention_bias": False, "rope_scaling": None}, {"x": None}):
        (folder / "config.json").write_text(json.dumps(config | {"layer": config["layer"] | layer}))
        load_drafter(folder, target)
    config["layer"]["kernel"] = "someone/kernel"
    (folder / "config.json").write_text(json.dumps(config))
    assert "layer sets kernel, which no Llama layer has" in refused(folder)


def test_peft_s_config_beside_the_config(tmp_path: Path) -> None:
    folder = save(tmp_path / "head")
    (folder / "adapter_config.json").write_text('{"megatron_core": "antigravity"}')
    assert "adapter_config.json" in refused(folder)


def test_settings_that_are_not_set(tmp_path: Path) -> None:
    folder = save(tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": None, "_attn_implementation": None, "unknown": None}
    (folder / "config.json").write_text(json.dumps(config))
    assert value_of(folder) == OLD


def test_an_index_that_climbs_out(tmp_path: Path) -> None:
    """The weights are one file of a fixed name: an index and what it points at are never read."""
    folder = save(tmp_path / "head")
    index = {"metadata": {}, "weight_map": {"weight": "../out.safetensors", "bias": "/out"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert value_of(folder) == OLD
    (folder / "model.safetensors").rename(tmp_path / "out.safetensors")
    assert "model.safetensors is missing" in refused(folder)


@pytest.mark.parametrize(
    "manifest",
    ["[]", "{", "null", '"x"', '{"family": 1, "target": "x", "target_fingerprint": "x"}',
     '{"family": "medusa", "target": "x", "target_fingerprint": []}', "[" * 100_000, "\udcff"],
)  # fmt: skip
def test_a_broken_manifest(manifest: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "head")
    (folder / "headstart.json").write_bytes(manifest.encode("utf-8", "surrogateescape"))
    assert "headstart.json" in refused(folder)


def test_a_family_is_a_name_in_our_table(tmp_path: Path) -> None:
    folder = save(tmp_path / "head")
    for family in ("os:system", "../medusa", "eagle9"):
        manifest = json.loads((folder / "headstart.json").read_text()) | {"family": family}
        (folder / "headstart.json").write_text(json.dumps(manifest))
        config = json.loads((folder / "config.json").read_text())
        config["model_type"] = f"headstart_{family}"
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(OptionError, match="expected one of") as caught:
            load_drafter(folder, tiny("llama"))
        one_line(caught.value)
