"""The target and the drafters that the suite trains, with prompts that they were not trained on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from headstart.commands.quickstart import quickstart_of
from headstart.heads import Drafter, load_drafter
from headstart.heads.artifacts.source import DrafterSource
from headstart.infer import StaticTree
from headstart.train import pipeline
from headstart.train.data.corpus import load_documents
from headstart.train.data.held_out import held_out_prompts
from headstart.train.recipe import DrafterSpec, Recipe, load_recipe
from headstart.train.stages.store import RECORD

from .job import Job

_RECIPE = Path(__file__).with_name("recipe.yaml")

_OPTIONS: dict[str, dict[str, Any]] = {
    "medusa": {"output": "shared"},
    "medusa2": {"output": "shared"},
    "draft_model": {"layers": 1},
    "pard": {"layers": 1, "depths": 8},  # as its costs are timed
}
"""Options in which a trained drafter differs from that of its family's quickstart."""


def recipe_of(job: Job, name: str) -> Recipe:
    """The recipe that trains a family: the suite's, with the drafter of the family's quickstart."""
    text = [] if job.corpus is None else [f"corpus.source={job.corpus}"]
    base = load_recipe(_RECIPE, [*job.scale.recipe, *text])
    options = load_recipe(quickstart_of(name)).drafter.options | _OPTIONS.get(name, {})
    return dataclasses.replace(
        base,
        name=f"{base.name}-{name}",
        output=str(job.trained),
        shares=base.name,
        drafter=DrafterSpec(name, options),
    )


class Pair(NamedTuple):
    """A trained target and one of its drafters, and prompts [1, P] that neither was trained on.

    `id` is different for every training.
    """

    target: PreTrainedModel
    drafter: Drafter
    tree: StaticTree
    prompts: list[Tensor]
    id: str


def trained_pair(job: Job, name: str, dtype: torch.dtype) -> Pair:
    """Load a family's drafter and its target; what is not trained yet is trained first."""
    recipe = recipe_of(job, name)
    folder = pipeline.train(recipe)
    source = DrafterSource(folder)
    target = Path(source.own_target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype)
    model.to(job.on).eval()  # type: ignore[arg-type]
    tokenizer = AutoTokenizer.from_pretrained(target)
    # Beside a target that is shared stands its corpus; one with settings of its own may share it.
    runs = (target.parent, recipe.folder.with_name(str(recipe.shares)))
    corpus = next(run / "corpus" for run in runs if (run / "corpus" / RECORD).is_file())
    prompts = held_out_prompts(
        tokenizer, load_documents(corpus, "held_out"), job.scale.prompts,
        recipe.decode.prefix_tokens, recipe.seed,
    )  # fmt: skip
    tree = StaticTree(source.tree or [[0]])
    drafter = load_drafter(source, model, tokenizer)
    record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    prompts = [prompt.tokens.view(1, -1).to(job.on) for prompt in prompts]
    return Pair(model, drafter, tree, prompts, record["id"])
