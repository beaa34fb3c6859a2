"""A module for multi-token prediction in a copy of its target's own checkpoint."""

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from headstart.heads import ArtifactError, load_drafter
from headstart.heads.artifacts.engines import serve_line
from headstart.heads.artifacts.export import export_drafter, is_copy_of_target
from headstart.heads.artifacts.trimming import trimmed
from tests.support.drafters import made
from tests.support.shipped_mtp import HYBRIDS, hybrid_with_module, windowed_with_module
from tests.support.tiny import one_line, tiny

FORMS = ("vllm", "sglang", "llama.cpp", "original")


def of_folder(folder: Path) -> Any:
    return tf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    ).eval()


def weights(folder: Path) -> dict[str, Any]:
    """All tensors that engines find in a folder, which read each file of weights once."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        part = load_file(path)
        assert not found.keys() & part.keys(), "an engine would read one of them"
        found |= part
    return found


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_released_module_comes_back_as_it_was(kind: str, tmp_path: Path) -> None:
    target = hybrid_with_module(kind, tmp_path / "target")
    before = hashes(tmp_path / "target")
    assert export_drafter(load_drafter("mtp", target), "original", tmp_path / "out") is None
    assert hashes(tmp_path / "target") == before
    old, new = weights(tmp_path / "target"), weights(tmp_path / "out")
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        torch.testing.assert_close(new[name], tensor, rtol=0, atol=1e-15)


@pytest.mark.parametrize("kind", HYBRIDS)
@pytest.mark.parametrize("shard", ["1KB", "1GB"])
def test_a_trained_module_takes_the_place_of_the_old_one(
    kind: str, shard: str, tmp_path: Path
) -> None:
    """Also where the old one's tensors are in many files, some of which hold nothing else."""
    target = hybrid_with_module(kind, tmp_path / "target")
    trained: Any = load_drafter("mtp", target)
    with torch.no_grad():
        for weight in trained.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    if shard == "1KB":
        _in_shards(tmp_path / "target")
    export_drafter(trained, "vllm", tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights(tmp_path / "out").keys()
    assert set(index["weight_map"].values()) == {
        path.name for path in (tmp_path / "out").glob("*.safetensors")
    }
    again = of_folder(tmp_path / "out")
    read: Any = load_drafter("mtp", again)
    for name, tensor in trained.state_dict().items():
        torch.testing.assert_close(read.state_dict()[name], tensor, rtol=0, atol=1e-14)
    for name, tensor in target.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("mtp_num_hidden_layers") == (None if kind == "qwen3-next" else 1)


def _in_shards(folder: Path) -> None:
    """Let each tensor of a folder be in a file of its own."""
    places = {}
    for number, (name, tensor) in enumerate(load_file(folder / "model.safetensors").items()):
        places[name] = f"part-{number}.safetensors"
        save_file({name: tensor}, folder / places[name], {"format": "pt"})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def test_the_config_of_a_model_that_also_sees_images_holds_it_for_its_text(tmp_path: Path) -> None:
    target = hybrid_with_module("qwen3.5", tmp_path / "target")
    path = tmp_path / "target" / "config.json"
    path.write_text(json.dumps({"text_config": json.loads(path.read_text())}))
    export_drafter(load_drafter("mtp", target), "vllm", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["text_config"]["mtp_num_hidden_layers"] == 1 and len(config) == 1


@pytest.mark.parametrize(
    ("kind", "able"), [("exaone-moe", {"vllm", "sglang", "original"}), ("exaone4", set())]
)
def test_modules_of_exaone_go_where_engines_run_them(
    kind: str, able: set[str], tmp_path: Path
) -> None:
    target, module = windowed_with_module(kind, tmp_path / "target")
    drafter: Any = load_drafter("mtp", target)
    for form in FORMS:
        if form not in able:
            with pytest.raises(ArtifactError, match="of which no module drafts there"):
                export_drafter(drafter, form, tmp_path / form)
            continue
        export_drafter(drafter, form, tmp_path / form)
        config = json.loads((tmp_path / form / "config.json").read_text())
        assert config["num_nextn_predict_layers"] == 1
        found = {n: t for n, t in weights(tmp_path / form).items() if n.startswith("mtp.")}
        assert found.keys() == {f"mtp.{name}" for name in module}
        assert all(found[f"mtp.{name}"].equal(tensor) for name, tensor in module.items())


def test_of_exaone_4_5_vllm_reads_the_count_at_the_top(tmp_path: Path) -> None:
    """Its language model alone has no module in vLLM; the config of the whole has two parts."""
    target, _ = windowed_with_module("exaone4", tmp_path / "target")
    drafter: Any = load_drafter("mtp", target)
    path = tmp_path / "target" / "config.json"
    whole = tf.Exaone4_5_Config(text_config=json.loads(path.read_text()))
    path.write_text(json.dumps(whole.to_dict() | {"num_nextn_predict_layers": 3}))
    target.config = whole
    for form in ("vllm", "original"):
        export_drafter(drafter, form, tmp_path / form)
        config = json.loads((tmp_path / form / "config.json").read_text())
        assert config["num_nextn_predict_layers"] == 1
        assert "num_nextn_predict_layers" not in config["text_config"]
    for form in ("sglang", "llama.cpp"):
        with pytest.raises(ArtifactError, match="of which no module drafts there"):
            export_drafter(drafter, form, tmp_path / form)


def test_experts_in_a_module_of_k_exaone_are_refused(tmp_path: Path) -> None:
    target, _ = windowed_with_module("exaone-moe", tmp_path / "target")
    target.config.mlp_layer_types[0] = "sparse"
    with pytest.raises(ArtifactError, match="its layer has experts"):
        export_drafter(made("mtp", target), "vllm", tmp_path / "out")


def test_what_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = hybrid_with_module("qwen3.5", tmp_path / "target")
    drafter: Any = load_drafter("mtp", target)

    def said(drafter: Any) -> str:
        with pytest.raises(ArtifactError) as caught:
            export_drafter(drafter, "vllm", tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return one_line(caught.value)

    assert "its target is of type qwen3," in said(made("mtp", tiny("qwen3")))
    assert "it knows 20 of its target's tokens" in said(trimmed(drafter, torch.arange(20)))
    target.config.quantization_config = {"quant_method": "fp8"}
    assert "its target is quantized" in said(drafter)
    del target.config.quantization_config
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
        assert "and the disk of" in said(drafter) and "0.0 GB" in said(drafter)
    (tmp_path / "target" / "model.safetensors").unlink()
    assert "holds no weights in safetensors" in said(drafter)


def test_the_lines_of_engines_name_the_copy() -> None:
    target = HYBRIDS["qwen3.5"]()
    lines = {form: serve_line(made("mtp", target, depths=3), form, "my out") for form in FORMS}
    assert lines["vllm"] == (
        "vllm serve 'my out' --speculative-config "
        """'{"method": "mtp", "num_speculative_tokens": 3}'"""
    )
    assert lines["sglang"] == (
        "python -m sglang.launch_server --model-path 'my out' --speculative-algorithm NEXTN "
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    )
    assert lines["llama.cpp"] == (
        "python convert_hf_to_gguf.py 'my out' --outfile target.gguf && "
        "llama-server -m target.gguf --spec-type draft-mtp --spec-draft-n-max 3"
    )
    assert lines["original"] is None
    assert all(is_copy_of_target("mtp", form) for form in FORMS)
    assert not is_copy_of_target("mtp", "speculators") and not is_copy_of_target("eagle", "vllm")
