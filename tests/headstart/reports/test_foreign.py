"""`headstart inspect` of somebody else's drafter: what it is, what it needs, and what is wrong."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import ones

from headstart.commands import inspect
from headstart.heads.artifacts.source import DrafterSource
from headstart.reports.foreign import describe_foreign, fits_foreign, print_foreign
from headstart.reports.tables import grid, plain_console
from tests.support import gemma4
from tests.support import published_dflash as dflash
from tests.support import published_eagle as eagle
from tests.support import published_hydra as hydra
from tests.support.bytewise import save_target
from tests.support.published_eagle3 import VARIANTS
from tests.support.published_mlp_speculator import LAYOUTS
from tests.support.tiny import tiny

MLP = LAYOUTS["tied"]


def write(folder: Path, config: dict[str, Any], tensors: Any, file: str) -> DrafterSource:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / file)
    return DrafterSource(folder)


def test_what_it_is_and_what_it_needs(tmp_path: Path) -> None:
    variant = VARIANTS["P-EAGLE of two layers"]
    verifier = {"speculators_config": {"verifier": {"name_or_path": "them/target"}}}
    config = variant.config | verifier | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    source = write(tmp_path / "head", config, variant.tensors(), "model.safetensors")
    found = describe_foreign(source)
    assert (found["format"], found["family"], found["target"], found["problem"]) == (
        "speculators", "eagle3", "them/target", None,
    )  # fmt: skip
    assert found["options"]["mask_token_id"] == 7 and found["options"]["fc_norm"]
    assert found["layer"]["num_hidden_layers"] == 2 and found["layer"]["sliding_window"] == 5
    assert found["tensors"]["fc.weight"] == {"shape": [32, 96], "dtype": "F64"}
    assert found["needs"] == [
        "a target of hidden size 32 and vocabulary 64",
        "the inputs of its layers 0, 1, 2 (the outputs of -1, 0, 1)",
        "nothing of its embeddings, unless those in the file are the same",
    ]
    assert fits_foreign(source, tiny("llama"), None) is None
    assert "reads the input of layer 2" in str(fits_foreign(source, _one_layer(), None))
    out = io.StringIO()
    print_foreign(found, out)
    shown = out.getvalue()
    for part in ("speculators", "eagle3", "layer: sliding_window", "fc.weight", "0, 1, 2"):
        assert part in shown


def test_a_language_model_has_no_gap_for_what_only_heads_have(tmp_path: Path) -> None:
    save_target(tmp_path / "model")
    out = io.StringIO()
    print_foreign(describe_foreign(DrafterSource(tmp_path / "model")), out)
    assert "a language model of transformers" in out.getvalue()
    assert "\n\n\n" not in out.getvalue()


@pytest.mark.parametrize(
    ("config", "tensors", "said"),
    [
        (eagle.SAID, eagle.published(3, "midlayer."), "2, L/2 and L - 3, of L"),
        (dflash.Form().config | {"dflash_config": {"mask_token_id": 3}}, dflash.Form().tensors,
         "2 … L - 2, evenly spread, of L"),
    ],
)  # fmt: skip
def test_layers_that_are_not_named(config: Any, tensors: Any, said: str, tmp_path: Path) -> None:
    found = describe_foreign(write(tmp_path / "head", config, tensors, "model.safetensors"))
    assert f"the inputs of its layers {said}: the config names none" in found["needs"]


def test_an_assistant_of_gemma_4(tmp_path: Path) -> None:
    gemma4.assistant().save_pretrained(tmp_path)
    found = describe_foreign(source := DrafterSource(tmp_path))
    assert (found["family"], found["problem"]) == ("gemma4_assistant", None)
    assert found["options"]["centroids"] == 8 and "rope_parameters" not in found["options"]
    assert found["needs"] == [
        "a target of hidden size 32 and vocabulary 64",
        "a Gemma 4 with keys and values of size 16 in its full_attention",
        "a Gemma 4 with keys and values of size 8 in its sliding_attention",
    ]
    assert fits_foreign(source, gemma4.target(), None) is None
    assert "the target is a llama" in str(fits_foreign(source, tiny("llama"), None))


@pytest.mark.parametrize("width", [80, 60, 45])
def test_names_of_tensors_are_whole(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A narrow terminal wraps them: cut, those of one layer would be alike. So it does figures."""
    monkeypatch.setenv("COLUMNS", str(width))
    name, figures = "model.layers.0.self_attn.q_proj.weight", "1: 6.55  2: 7.14  8: 8.1  16: 8.2"
    out = io.StringIO()
    plain_console(out, width).print(grid([(f"  {name}", "[64]"), ("made from", figures)]))
    shown = [line.split("  [")[0].strip() for line in out.getvalue().splitlines()]
    assert "".join(shown).startswith(name)
    assert all(word in out.getvalue() for word in figures.split())
    plain_console(out, width).print(grid([("corpus", "/data/" + "x" * 90)]))
    assert "…" not in out.getvalue()


def _one_layer() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.support.tiny import COMMON

    sizes: dict[str, Any] = COMMON | {"num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


@pytest.mark.parametrize(
    ("config", "tensors", "file", "expected"),
    [
        (*hydra.public("mlp", 1), "hydra_lm_head.safetensors", ("its authors'", "hydra")),
        (eagle.DIALECTS["SpecForge"][2], eagle.published(3, "midlayer."), "model.safetensors",
         ("SpecForge", "eagle3")),
        (MLP.config, MLP.tensors(), "model.safetensors", ("its authors'", "mlp_speculator")),
        ({"medusa_num_heads": 1}, {"medusa_head.0.0.linear.weight": ones(4, 4),
         "medusa_head.0.0.linear.bias": ones(4)}, "model.safetensors",
         ("its authors', inside of its target", "medusa")),
        ({}, {"blocks.0.layers.0.weight": ones(4, 4)}, "model.safetensors", ("vLLM", "medusa")),
        ({"model_type": "llama", "hidden_size": 8}, {"model.norm.weight": ones(8)},
         "model.safetensors", ("a language model of transformers", "draft_model")),
    ],
)  # fmt: skip
def test_formats(config: Any, tensors: Any, file: str, expected: Any, tmp_path: Path) -> None:
    found = describe_foreign(write(tmp_path / "it", config, tensors, file))
    assert (found["format"], found["family"], found["problem"]) == (*expected, None)
    assert found["files"] and print_foreign(found, io.StringIO()) is None


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import argparse

    def run(folder: Path) -> tuple[int, dict[str, Any]]:
        parser = argparse.ArgumentParser()
        inspect.add_arguments(parser)
        parser.set_defaults(parser=parser)
        status = inspect.run(parser.parse_args([str(folder), "--json"]))
        return status, json.loads(capsys.readouterr().out)

    write(tmp_path / "it", eagle.SAID, eagle.published(1, "layers.0."), "model.safetensors")
    status, found = run(tmp_path / "it")
    assert (status, found["family"], found["options"]["bias"]) == (0, "eagle", True)
    write(tmp_path / "no", {"speculators_model_type": "xpress"}, {}, "model.safetensors")
    status, found = run(tmp_path / "no")
    assert status == 1 and "calls it 'xpress'" in found["problem"]
