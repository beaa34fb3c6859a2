"""Runs a recipe: corpus, target, distill, heads, and the benchmark, each a stage on disk.

Under `accelerate launch` every process runs this file: all share the work of distillation and
training, process 0 alone does the rest and writes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from headstart.heads import OptionError, family
from headstart.heads.core import load_pretrained
from headstart.infer import RULES, load

from .arguments import load_options, training_arguments
from .data.corpus import build_corpus, load_documents
from .data.distill import distill, summary
from .data.prefixes import held_out_prompts
from .data.training_rows import Rows
from .drafter_stage import train_drafter
from .engine import join_deepspeed, loaded_as, loaded_whole, weights_are_sharded
from .launched import check_engine, check_shared
from .lifetime import watch_processes
from .on_policy import check_on_policy
from .processes import is_process_0, wait_for_all
from .recipe import Recipe
from .scratch_target import train_target
from .stages import Stage, StageStore


def train(recipe: Recipe, fresh: bool = False) -> Path:
    """Run the stages up to the trained drafter; returns its folder. `fresh` reuses none."""
    return _Run(recipe, fresh).train().folder


def run(recipe: Recipe, fresh: bool = False) -> dict[str, Any]:
    """Train, then measure on held-out prompts; returns the benchmark's report.

    The report is that of `headstart.infer.measure.bench`, with `stage_seconds` and `artifact`
    added, and `held_out`, the file that the prompts came from.
    """
    this = _Run(recipe, fresh)
    artifact = this.train()
    return this.bench(artifact).info | {
        "stage_seconds": this.store.seconds(),
        "artifact": str(artifact.folder),
        "held_out": str(this.store.finished["corpus"].folder / "held_out.jsonl"),
    }


class _Run:
    """One recipe being run by this process."""

    def __init__(self, recipe: Recipe, fresh: bool):
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.recipe = recipe
        # Before anything asks for the processes: these arguments set them up.
        checkpoints = recipe.folder / "heads" / "checkpoints"
        self.args = training_arguments(recipe.train, checkpoints, recipe.seed)
        join_deepspeed(self.args)
        watch_processes()
        self.engine = check_engine(self.args, os.environ)
        check_shared(recipe.folder)
        other = recipe.folder.with_name(recipe.shares) if recipe.shares else None
        self.store = StageStore(recipe.folder, fresh, other)
        self._loaded: tuple[PreTrainedModel, Any] | None = None

    def train(self) -> Stage:
        trainable = family(self.recipe.drafter.family).trainable  # a mistyped name fails first
        check_on_policy(self.recipe)
        corpus = self._corpus()
        target = self._target(corpus)
        rows = self._distill(corpus, target) if trainable else None
        return self._heads(corpus, target, rows)

    def _settings(self, *sections: str) -> dict[str, Any]:
        """What decides a stage's result: the seed, and sections of the recipe."""
        settings = self.recipe.to_dict()
        return {name: settings[name] for name in (*sections, "seed")}

    def _corpus(self) -> Stage:
        spec, seed = self.recipe.corpus, self.recipe.seed
        return self.store.run(
            "corpus", self._settings("corpus"), lambda f: build_corpus(spec, f, seed), shared=True
        )

    def _target(self, corpus: Stage) -> Stage:
        spec, seed = self.recipe.target, self.recipe.seed

        def work(folder: Path) -> dict[str, Any]:
            if spec.scratch is None:
                return {"model": spec.model}
            with loaded_whole():
                return {"model": str(folder)} | train_target(
                    spec.scratch, corpus.folder, folder, seed
                )

        reads = [corpus] if spec.scratch else []
        return self.store.run("target", self._settings("target"), work, reads, shared=True)

    def _distill(self, corpus: Stage, target: Stage) -> Stage:
        spec, seed = self.recipe.distill, self.recipe.seed

        def work(folder: Path) -> dict[str, int]:
            if weights_are_sharded():
                raise OptionError(
                    "the target's text is not written yet, and under DeepSpeed ZeRO-3, where each "
                    "process holds a part of the target, they cannot write texts of their own; run "
                    "the recipe first with another launch file, up to the distill stage."
                )
            model, tokenizer = self._load(target)
            texts = load_documents(corpus.folder, "train")
            rank, world = self.args.process_index, self.args.world_size
            distill(spec, model, tokenizer, texts, folder, seed, rank, world, progress=rank == 0)
            wait_for_all()
            return summary(spec, folder) if is_process_0() else {}

        settings, reads = self._settings("distill"), [corpus, target]
        return self.store.run("distill", settings, work, reads, resumable=True, shared=True)

    def _heads(self, corpus: Stage, target: Stage, rows: Stage | None) -> Stage:
        def work(folder: Path) -> dict[str, Any]:
            loaded = *self._load(target), self._target_name(target)
            documents = load_documents(corpus.folder, "held_out")
            data = Rows.load(rows.folder) if rows else None
            return train_drafter(self.recipe, self.args, *loaded, documents, data, folder)

        settings = self._settings("drafter", "decode", *(["train"] if rows else []))
        del settings["decode"]["prompts"]  # only the benchmark's
        reads = [corpus, target, *([rows] if rows else [])]
        return self.store.run("heads", settings, work, reads, resumable=True)

    def bench(self, artifact: Stage) -> Stage:
        from headstart.infer.measure.bench import bench

        decode = self.recipe.decode
        corpus, target = self.store.finished["corpus"], self.store.finished["target"]

        def work(folder: Path) -> dict[str, Any]:
            model, tokenizer = self._load(target)
            speculator = load(model, artifact.folder, tokenizer=tokenizer, rule=decode.rule)
            documents = load_documents(corpus.folder, "held_out")
            sizes = decode.prompts, decode.prefix_tokens, self.recipe.seed
            prompts = held_out_prompts(tokenizer, documents, *sizes)
            prompts = [prompt.to(model.device) for prompt in prompts]
            temperature = 1.0 if RULES[decode.rule].samples else 0.0
            report = bench(speculator, prompts, decode.new_tokens, temperature=temperature)
            # JSON has neither NaN nor infinity.
            return json.loads(json.dumps(report), parse_constant=lambda _: None)

        return self.store.run("bench", self._settings("decode"), work, [corpus, artifact])

    def _target_name(self, target: Stage) -> str:
        """Path or Hub name; a run's folder may have moved since a target was trained in it."""
        return str(target.folder) if self.recipe.target.scratch else target.info["model"]

    def _load(self, target: Stage) -> tuple[PreTrainedModel, Any]:
        """The target on this process's device, and its tokenizer; loaded once."""
        if self._loaded is None:
            name = self._target_name(target)
            how = load_options(self.recipe.target.dtype, self.args.device)
            with loaded_as(self.recipe.target.dtype, name):
                model = load_pretrained(AutoModelForCausalLM, name, **how)
            if "device_map" not in how and not weights_are_sharded():
                model.to(self.args.device)  # type: ignore[arg-type]
            self._loaded = model.eval(), load_pretrained(AutoTokenizer, name)
        return self._loaded
