"""A real pretrained target that nobody here trained: heads on its own stories, by its recipe."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import headstart
from headstart.infer import Speculator, Stats
from headstart.train import pipeline
from headstart.train.data.corpus import load_documents
from headstart.train.data.held_out import held_out_prompts
from headstart.train.data.prefixes import make_prefixes
from headstart.train.recipe import Recipe, RecipeError, load_recipe
from tests.support.paths import ROOT, SHARED

MODEL = SHARED / "models" / "stories260k"
RECIPE = ROOT / "benchmarks" / "stories260k.yaml"
needs_model = pytest.mark.skipif(
    not MODEL.is_dir(), reason="../shared/models/stories260k is not on this machine"
)


def recipe(tmp_path: Path, *overrides: str) -> Recipe:
    return load_recipe(RECIPE, [f"target.model={MODEL}", f"output={tmp_path}/runs", *overrides])


def measure(recipe: Recipe, count: int) -> tuple[float, int]:
    """τ over held-out prompts, and how many texts differ from those of `generate`."""
    heads = recipe.folder / "heads"
    speculator = headstart.load(MODEL, heads, tree=str(heads / "tree.json"))
    assert speculator.tree.nodes == 8
    tokenizer: Any = speculator.tokenizer
    documents = load_documents(recipe.folder / "corpus", "held_out")
    prompts = held_out_prompts(tokenizer, documents, count, recipe.decode.prefix_tokens)
    learnt = make_prefixes(
        recipe.distill, tokenizer, load_documents(recipe.folder / "corpus", "train")
    )
    seen = {tuple(learnt[i].tolist()) for i in range(len(learnt))}
    stats, different = Stats(speculator.tree.max_depth), 0
    model: Any = speculator.model
    for prompt in (each.tokens for each in prompts):
        assert prompt[0] == tokenizer.bos_token_id and tuple(prompt.tolist()) not in seen
        options = {"max_new_tokens": recipe.decode.new_tokens, "do_sample": False}
        text = speculator.generate(prompt[None], **options)
        stats.extend(speculator.stats)
        different += not torch.equal(text, model.generate(prompt[None], **options))
    return stats.tau, different


SMALL = (
    "corpus.max_bytes=16_000", "distill.examples=64", "distill.new_tokens=96", "distill.shards=1",
    "train.max_steps=80", "train.max_seconds=null", "train.eval_every=null",
    "decode.validation_prompts=8", "decode.new_tokens=64",
)  # fmt: skip


@needs_model
@pytest.mark.usefixtures("no_pictures")
def test_a_few_seconds_of_training_help(tmp_path: Path) -> None:
    small = recipe(tmp_path, *SMALL)
    pipeline.train(small)
    tau, different = measure(small, 8)
    print(f"tau {tau:.3f}")
    assert different == 0
    assert tau > 1.7


@needs_model
@pytest.mark.proof
@pytest.mark.usefixtures("no_pictures")
def test_heads_that_learnt_nothing_are_far_off(tmp_path: Path) -> None:
    """A control: with the same tree."""
    pipeline.train(recipe(tmp_path, *SMALL, "train.learning_rate=1e-9", "train.max_steps=2"))
    assert measure(recipe(tmp_path, *SMALL), 8)[0] < 1.4


@needs_model
def test_the_openings_are_the_models_own_and_seeded(tmp_path: Path) -> None:
    from itertools import islice

    from headstart.train.data.target_text import sample_documents

    def openings(seed: int) -> list[str]:
        return [d.text for d in islice(sample_documents(str(MODEL), 12, seed), 80)]

    texts = openings(0)
    assert texts == openings(0) and len(set(texts)) == 80
    assert len(set(texts) & set(openings(1))) < 40
    # Text i does not depend on how many others are written: here it is sampled alone.
    model = headstart.load(MODEL).model
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    from headstart.heads.core import row_seeds

    for i in (0, 3):
        ids = Speculator(model).generate(
            torch.tensor([[tokenizer.bos_token_id]]), do_sample=True, temperature=1.0, top_k=0,
            max_new_tokens=12, seed=row_seeds(0, 64).tolist()[i : i + 1],
        )  # fmt: skip
        assert str(tokenizer.decode(ids[0], skip_special_tokens=True)) in texts[: i + 1]


def test_the_corpus_of_the_target_needs_a_model() -> None:
    spec = load_recipe(RECIPE)
    assert spec.corpus.writer == spec.target.model
    assert load_recipe(RECIPE, ["target.model=other"]).corpus.writer == "other"
    with pytest.raises(RecipeError, match=r"corpus\.source: a target that is trained here"):
        load_recipe("quickstart", ["corpus.source=target"])


@needs_model
@pytest.mark.proof
def test_the_recipe_reaches_its_bar(tmp_path: Path) -> None:
    """Under 60 s of `headstart train` in all, τ of at least 2.5, 100 texts of 128 tokens equal."""
    command = ["train", str(RECIPE), f"target.model={MODEL}", f"output={tmp_path}/runs"]
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "headstart", *command], cwd=ROOT, check=True)
    seconds = time.perf_counter() - started
    full = recipe(tmp_path)
    assert (full.decode.prompts, full.decode.new_tokens) == (100, 128)
    tau, different = measure(full, 100)
    print(f"{seconds:.1f} s, tau {tau:.3f}, {different} texts differ")
    assert different == 0
    assert tau >= 2.5
    assert seconds < 60
