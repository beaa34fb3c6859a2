"""The τ in a manifest is that of independent real prompts, on a target trained on chats."""

import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from headstart.heads import load_drafter
from headstart.heads.artifacts.manifest import read_manifest
from headstart.infer import parse_static
from headstart.train import pipeline
from headstart.train.data.corpus import load_documents
from headstart.train.data.held_out import held_out_prompts, prompt_settings
from headstart.train.fit.validate import measure_tau
from headstart.train.recipe import parse_recipe
from tests.support.paths import SHARED

CHATS = SHARED / "data" / "gsm8k" / "train.jsonl"
RECIPE: dict[str, Any] = {
    "name": "chats",
    "corpus": {"source": str(CHATS), "max_bytes": 2_000_000, "held_out": 0.1},
    "target": {
        "scratch": {"layers": 6, "hidden_size": 128, "context": 512, "max_seconds": 60.0},
    },
    "distill": {
        "examples": 768, "prefix": "prompt", "prefix_tokens": 160, "new_tokens": 96,
        "max_seconds": 40.0,
    },
    "drafter": {"family": "medusa", "heads": 4, "output": "own"},
    "train": {"learning_rate": 1e-2, "max_steps": 400, "max_seconds": 40.0, "eval_every": 200},
    "decode": {
        "tree": "sparse:8", "prompts": 90, "new_tokens": 96, "validation_prompts": 60,
    },
}  # fmt: skip


@pytest.mark.proof
@pytest.mark.skipif(not CHATS.is_file(), reason="../shared/data is not on this machine")
def test_recorded_tau_is_that_of_independent_prompts(tmp_path: Path) -> None:
    recipe = parse_recipe(RECIPE | {"output": str(tmp_path)})
    folder = pipeline.train(recipe)
    manifest = read_manifest(folder)
    recorded = manifest.metrics
    target: Any = AutoModelForCausalLM.from_pretrained(manifest.target)
    tokenizer: Any = AutoTokenizer.from_pretrained(manifest.target)
    documents = load_documents(recipe.folder / "corpus", "held_out")
    prompts = held_out_prompts(tokenizer, documents, recipe.decode.prompts,
                               **prompt_settings(recipe))  # fmt: skip
    assert all(tokenizer.decode(p.tokens).endswith("Assistant:") for p in prompts)
    drafter = load_drafter(folder, target, tokenizer)
    tree = parse_static(str(folder / "tree.json"))
    found = measure_tau(target, drafter, tree, "greedy", prompts, recipe.decode.new_tokens)
    apart, error = found["tau"] - recorded["tau"], math.hypot(found["tau_se"], recorded["tau_se"])
    windows = held_out_prompts(tokenizer, documents, recipe.decode.prompts, 64)
    cut = measure_tau(target, drafter, tree, "greedy", windows, recipe.decode.new_tokens)
    print(
        f"recorded {recorded['tau']:.3f} ± {recorded['tau_se']:.3f}, simulated "
        f"{recorded['simulated_tau']:.3f}; real prompts {found['tau']:.3f} ± "
        f"{found['tau_se']:.3f}; windows {cut['tau']:.3f} ± {cut['tau_se']:.3f}"
    )
    assert abs(apart) <= 2 * error
    assert abs(recorded["simulated_tau"] - recorded["tau"]) <= 0.15
