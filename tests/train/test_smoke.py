"""`--smoke` runs a recipe through all its stages; here one of each family and architecture."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from headstart.cli import main
from headstart.heads.artifacts.source import DrafterSource
from headstart.heads.core import causal_class, probe_layers
from headstart.heads.families import FAMILIES, family
from headstart.train.estimate import model_config
from headstart.train.recipe import load_recipe, shipped_combinations, shipped_recipes
from headstart.train.smoke import LAYERS, chats, shrunk, smoke, tiny_tokenizer
from tests.support.paths import ROOT
from tests.support.recipes import launch

CASES = [
    "medusa+llama-3.1-8b+1x24gb",
    "medusa2+mistral-7b+1x24gb",
    "hydra+qwen3-8b+1x80gb",
    "redrafter+mistral-7b+1x80gb",
    "eagle+llama-3.1-8b+8x80gb",
    "eagle3+qwen3-8b+8x80gb",
    "draft-model+qwen3-8b+1x80gb",
    "dflash+llama-3.1-8b+1x80gb",
    "pard+qwen3-8b+1x80gb",
    "mlp-speculator+llama-3.1-8b+1x24gb",
    "early-exit+llama-3.1-8b+1x24gb",
    "mtp+mistral-7b+1x80gb",
    "lookup+mistral-7b+1x80gb",
    "recycling+qwen3-8b+1x80gb",
    "retrieval+llama-3.1-8b+1x80gb",
    "suffix+mistral-7b+1x80gb",
]

STAGES = ("corpus", "target", "distill", "train", "heads")


def run(name: str, folder: Path, *overrides: str) -> Path:
    """The run's folder."""
    assert main(["train", name, "--smoke", f"output={folder}/runs", *overrides]) == 0
    return folder / "runs" / f"{name}-smoke"


def check(name: str, root: Path, *overrides: str) -> None:
    recipe = load_recipe(name, overrides)
    stages = {name for name in STAGES if (root / name / "stage.json").exists()}
    kind = family(recipe.drafter.family)
    learns = ["distill"] * kind.learns() + ["train"] * kind.trainable
    assert stages == {"corpus", "target", "heads", *learns}
    manifest = json.loads((root / "heads" / "headstart.json").read_text())
    assert manifest["family"] == recipe.drafter.family
    assert manifest["metrics"]["steps"] == (4 if kind.trainable else 0)
    assert 1 <= manifest["metrics"]["tau"] < 9
    DrafterSource(root / "heads").check_files()
    if kind.trainable:
        assert (root / "heads" / "metrics.jsonl").is_file()
        plotted = "](metrics.png)" in (root / "heads" / "README.md").read_text()
        assert plotted == (root / "heads" / "metrics.png").is_file()
    if recipe.target.model is not None:
        found = AutoConfig.from_pretrained(root / "inputs" / "target")
        assert found.model_type == model_config(recipe.target.model).model_type
        assert (found.num_hidden_layers, found.hidden_size) == (LAYERS, 64)


RECURRENT: list[Any] = [
    tf.Qwen3NextConfig(),
    tf.Qwen3_5TextConfig(),
    tf.OlmoHybridConfig(),
    tf.KimiLinearConfig(),
    tf.Lfm2Config(layer_types=["conv"] * 6 + ["full_attention"] * 10, num_hidden_layers=16),
    tf.FalconH1Config(),
    tf.BambaConfig(attn_layer_indices=[9, 18, 27]),
    tf.GraniteMoeHybridConfig(layer_types=["mamba"] * 5 + ["attention"] + ["mamba"] * 26),
    tf.NemotronHConfig(),
    tf.Zamba2Config(),
]


QUICK = {
    "medusa2+mistral-7b+1x24gb", "eagle3+qwen3-8b+8x80gb", "draft-model+qwen3-8b+1x80gb",
    "dflash+llama-3.1-8b+1x80gb", "lookup+mistral-7b+1x80gb",
}  # fmt: skip
"""Heads, a module, a model, blocks, and nothing to train; the others are proofs."""


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.proof) for name in CASES],
)
def test_a_recipe_runs_through_all_stages(name: str, tmp_path: Path) -> None:
    check(name, run(name, tmp_path))


def test_the_cases_have_each_family_and_architecture() -> None:
    recipes = [load_recipe(name) for name in CASES]
    assert {recipe.drafter.family for recipe in recipes} == FAMILIES.keys()
    kinds = {model_config(str(recipe.target.model)).model_type for recipe in recipes}
    assert kinds == {"llama", "mistral", "qwen3"}


def test_what_is_replaced_and_what_is_kept(tmp_path: Path) -> None:
    overrides = [f"output={tmp_path}", "drafter.feature_layers=[2,16,29]", "train.clip=0.25"]
    recipe = load_recipe("eagle3+llama-3.1-8b+1x24gb", overrides)
    small = smoke(recipe)
    assert (small.name, small.shares) == (f"{recipe.name}-smoke", None)
    assert small.target.dtype == "float32" and recipe.target.dtype == "4bit"
    options = recipe.drafter.options | {"feature_layers": [0, 2, 3], "draft_vocab_size": 128}
    assert small.drafter.options == options
    assert (small.train.loss, small.train.clip) == (recipe.train.loss, 0.25)
    tokenizer = AutoTokenizer.from_pretrained(str(small.target.model))
    text = tokenizer.apply_chat_template(next(chats()), tokenize=False)
    assert text.startswith("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhat is 2")
    assert text.endswith("One more than 6 is 7.<|eot_id|>")
    assert len(tokenizer) == 320
    told = {json.dumps(chat) for chat in chats()}
    assert len(told) == len(list(chats())) > 30


def test_a_recipe_of_many_rounds_stays_small(tmp_path: Path) -> None:
    overrides = ["distill.rounds=5", "distill.round_steps=1000"]
    small = smoke(load_recipe("quickstart", [f"output={tmp_path}", *overrides])).distill
    assert (small.rounds, small.shards, small.round_steps) == (5, 5, None)


@pytest.mark.usefixtures("no_pictures")
def test_a_scratch_target_is_trained_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = run("quickstart", tmp_path)
    said = capsys.readouterr().err
    assert said.endswith("without --smoke the drafter is trained on your model\n"), said
    assert f"\nThe report is {root / 'heads' / 'report.html'}\n" in said
    check("quickstart", root)
    assert not (root / "inputs" / "target").exists()
    assert (root / "target" / "model.safetensors").is_file()


@pytest.mark.proof
@pytest.mark.distributed
def test_two_processes_share_one_smoke_run(tmp_path: Path) -> None:
    config, name = str(ROOT / "recipes" / "launch" / "ddp_cpu.yaml"), CASES[0]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
    command += ["-m", "headstart.train", "--smoke", name, f"output={tmp_path}/runs"]
    done = launch(command, ACCELERATE_USE_CPU="true", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr[-3000:]
    check(name, tmp_path / "runs" / f"{name}-smoke")


@pytest.mark.proof
@pytest.mark.parametrize("name", [*shipped_recipes(), *shipped_combinations()])
def test_every_recipe_runs(name: str, tmp_path: Path) -> None:
    overrides = ["target.model=Qwen/Qwen3-8B"] if name == "own-model" else []
    check(name, run(name, tmp_path, *overrides), *overrides)


@pytest.mark.parametrize("config", RECURRENT, ids=lambda config: config.model_type)
def test_targets_with_recurrent_layers_keep_one_that_attends(config: Any) -> None:
    """And all that is large in them is small."""
    small = shrunk(config, tiny_tokenizer(""))
    assert small.num_hidden_layers == LAYERS
    model: Any = AutoModelForCausalLM.from_config(small)
    assert model.num_parameters() < 1e6
    shapes = probe_layers(model.eval())
    assert any(shape.attends for shape in shapes) and any(shape.recurrent for shape in shapes)


PATCHES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
WITH_IMAGES = {
    "mistral3": lambda: tf.Mistral3Config(vision_config=PATCHES | {"model_type": "pixtral"}),
    "gemma3": lambda: tf.Gemma3Config(vision_config=PATCHES),
    "qwen2.5-vl": lambda: tf.Qwen2_5_VLConfig(
        text_config={"rope_parameters": MROPE},
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
    ),
}


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_targets_that_also_read_images_are_small(name: str) -> None:
    """Also of fewer layers than `LAYERS`, whose lists for each layer are continued."""
    given = WITH_IMAGES[name]()
    text: Any = given.get_text_config(decoder=True)
    text.num_hidden_layers = LAYERS - 1
    if types := getattr(text, "layer_types", None):
        text.layer_types = types[: LAYERS - 1]
    small: Any = shrunk(given, tiny_tokenizer(""))
    model: Any = causal_class(small).from_config(small)
    assert model(input_ids=torch.ones(1, 3).long()).logits.shape[1] == 3
    assert len(model.get_decoder().layers) == LAYERS
    vision = small.vision_config
    assert getattr(vision, "depth", None) == 1 or vision.num_hidden_layers == 1


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("ORG/MODEL", "ORG/MODEL stands for a model of yours"),
        ("nobody/nothing", "nobody/nothing is not a folder, and was not found on the Hub"),
        ("{empty}", "holds no config.json"),
    ],
)
def test_a_target_that_is_not_there_is_named(
    model: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model.format(empty=tmp_path)
    options = [f"target.model={model}", "corpus.source=x.jsonl", f"output={tmp_path}/runs"]
    assert main(["train", "own-model", *options, "--smoke"]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1
