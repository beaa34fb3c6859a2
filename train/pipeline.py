"""Runs a recipe: corpus, target, distill, heads, and the benchmark, each a stage on disk.

Under `accelerate launch` every process runs this file: process 0 owns the stage store, the others
share the work of distillation and training and wait for the rest.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from headstart.heads import Drafter, DrafterConfig, Manifest, family, fingerprint, save_drafter
from headstart.heads.artifacts.files import TREE
from headstart.heads.artifacts.manifest import tokenizer_hash
from headstart.heads.core.files import write_atomically
from headstart.infer import StaticTree, load

from .data.corpus import build_corpus, load_documents
from .data.distill import Rows, distill, summary
from .joint import adapter_loss_change, load_options
from .on_policy import StudentText, check_on_policy
from .recipe import Recipe, load_recipe
from .scratch_target import train_target
from .stages import Stage, StageStore
from .trainer import DraftedTarget, DrafterTrainer, training_arguments
from .validate import Validation, held_out_prompts, held_out_texts

logger = logging.getLogger(__name__)


def train(recipe: Recipe, fresh: bool = False) -> Path:
    """Run the stages up to the trained drafter, reusing finished ones; returns its folder.

    Args:
        fresh: redo every stage.
    """
    return _Run(recipe, fresh).train().folder


def run(recipe: Recipe, fresh: bool = False) -> dict[str, Any]:
    """Train, then measure on held-out prompts; returns the benchmark's report.

    The report is that of `headstart.infer.measure.bench`, with `stage_seconds` and `artifact`
    added, and `held_out`, the file that the prompts came from.
    """
    road = _Run(recipe, fresh)
    artifact = road.train()
    stage = road.bench(artifact)
    return stage.info | {
        "stage_seconds": road.store.seconds(),
        "artifact": str(artifact.folder),
        "held_out": str(road.store.finished["corpus"].folder / "held_out.jsonl"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """`RECIPE [a.b=value …] [--fresh]`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="headstart.train", description="Train a drafter.")
    parser.add_argument("recipe", metavar="RECIPE", help="a path or a shipped name")
    parser.add_argument("overrides", metavar="a.b=value", nargs="*", help="settings of the recipe")
    parser.add_argument("--fresh", action="store_true", help="redo stages that are finished")
    options = parser.parse_intermixed_args(argv)
    recipe = load_recipe(options.recipe, options.overrides)
    folder = train(recipe, options.fresh)
    print(f"The drafter is in {folder}", file=sys.stderr)
    _leave()
    return 0


def _leave() -> None:
    """End the process group while the interpreter still runs: its threads abort a late exit."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        gc.collect()  # the trainer's cycles hold the wrapped model, which holds the group
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


class _Run:
    """One recipe being run by this process."""

    def __init__(self, recipe: Recipe, fresh: bool):
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.recipe = recipe
        # Before anything asks for the processes: these arguments set them up.
        self.args = training_arguments(
            recipe.train, recipe.folder / "heads" / "checkpoints", recipe.seed
        )
        self.rank, self.world = self.args.process_index, self.args.world_size
        self.store = StageStore(recipe.folder, fresh=fresh and self.rank == 0)
        self.shared = StageStore(recipe.folder.with_name(recipe.shares)) if recipe.shares else None
        self._loaded: tuple[PreTrainedModel, Any] | None = None

    def train(self) -> Stage:
        recipe, seed = self.recipe, self.recipe.seed
        taught = is_taught(recipe.drafter.family)  # first: a mistyped family answers at once
        check_on_policy(recipe)
        corpus = self._stage(
            "corpus",
            {"corpus": dataclasses.asdict(recipe.corpus), "seed": seed},
            lambda folder: build_corpus(recipe.corpus, folder, seed),
            shared=True,
        )
        target = self._stage(
            "target",
            {"target": dataclasses.asdict(recipe.target), "seed": seed},
            lambda folder: self._make_target(corpus, folder),
            reads=[corpus] if recipe.target.scratch else [],
            shared=True,
        )
        decode = dataclasses.asdict(recipe.decode)
        del decode["prompts"]  # the benchmark's alone
        settings = {"drafter": dataclasses.asdict(recipe.drafter), "decode": decode, "seed": seed}
        reads, rows = [corpus, target], None
        if taught:
            rows = self._distill(corpus, target)
            settings |= {"train": dataclasses.asdict(recipe.train)}
            reads.append(rows)
        return self._stage(
            "heads",
            settings,
            lambda folder: self._heads(corpus, target, rows, folder),
            reads=reads,
            together=True,
        )

    def _distill(self, corpus: Stage, target: Stage) -> Stage:
        recipe, seed = self.recipe, self.recipe.seed

        def write(folder: Path) -> None:
            model, tokenizer = self._target(target)
            documents = load_documents(corpus.folder, "train")
            distill(
                recipe.distill, model, tokenizer, documents, folder, seed,
                self.rank, self.world, self.rank == 0,
            )  # fmt: skip

        return self._stage(
            "distill",
            {"distill": dataclasses.asdict(recipe.distill), "seed": seed},
            write,
            reads=[corpus, target],
            together=True,
            finish=lambda folder: summary(recipe.distill, folder),
            shared=True,
        )

    def bench(self, artifact: Stage) -> Stage:
        from headstart.infer.measure.bench import bench

        decode = self.recipe.decode
        corpus, target = self.store.finished["corpus"], self.store.finished["target"]

        def measure(folder: Path) -> dict[str, Any]:
            model, tokenizer = self._target(target)
            speculator = load(model, artifact.folder, tokenizer=tokenizer, rule=decode.rule)
            prompts = held_out_prompts(
                tokenizer, load_documents(corpus.folder, "held_out"), decode.prompts,
                decode.prefix_tokens, self.recipe.seed,
            )  # fmt: skip
            prompts = [prompt.to(model.device) for prompt in prompts]
            temperature = 0.0 if decode.rule == "greedy" else 1.0
            return _finite(bench(speculator, prompts, decode.new_tokens, temperature=temperature))

        settings = {"decode": dataclasses.asdict(decode), "seed": self.recipe.seed}
        return self._stage("bench", settings, measure, reads=[corpus, artifact])

    def _make_target(self, corpus: Stage, folder: Path) -> dict[str, Any]:
        spec = self.recipe.target
        if spec.scratch is None:
            assert spec.model is not None
            return {"model": spec.model}
        metrics = train_target(spec.scratch, corpus.folder, folder, self.recipe.seed)
        return {"model": str(folder), **metrics}

    def _target(self, stage: Stage) -> tuple[PreTrainedModel, Any]:
        """The target on this process's device, and its tokenizer; loaded once."""
        if self._loaded is None:
            # A run's folder may have moved since a scratch target was trained in it.
            name = str(stage.folder) if self.recipe.target.scratch else stage.info["model"]
            how = load_options(self.recipe.target.dtype, self.args.device)
            model = AutoModelForCausalLM.from_pretrained(name, **how)
            if "device_map" not in how:
                model.to(self.args.device)  # type: ignore[arg-type]
            self._loaded = model.eval(), AutoTokenizer.from_pretrained(name)
        return self._loaded

    def _heads(
        self, corpus: Stage, target: Stage, rows: Stage | None, folder: Path
    ) -> dict[str, Any]:
        """Train the drafter on `rows`, if it is taught, and write the artifact into `folder`."""
        recipe, decode = self.recipe, self.recipe.decode
        model, tokenizer = self._target(target)
        data = Rows.load(rows.folder) if rows else None
        drafter = make_drafter(recipe, model, data)
        documents = load_documents(corpus.folder, "held_out")
        prompts = held_out_prompts(
            tokenizer, documents, decode.validation_prompts, decode.prefix_tokens, recipe.seed,
            part="validation",
        )  # fmt: skip
        validation = Validation(model, prompts, decode.new_tokens, decode.tree, decode.rule)
        if data is None:
            measured = {"steps": 0, "seconds": 0.0, **validation(drafter)}
        else:
            train = recipe.train
            pair = DraftedTarget(model, drafter, train.head_decay, train.loss, train.feature_weight)
            own = None
            if spec := train.on_policy:
                own = StudentText(spec, drafter, data, recipe.distill, self.args)
            measured = DrafterTrainer(
                pair, self.args, data, train, validation, student_text=own
            ).fit()
        drafter.eval()
        if drafter.adapter is not None:
            texts = held_out_texts(tokenizer, documents, decode.prefix_tokens, recipe.seed)
            measured["held_out_loss"] = adapter_loss_change(
                model, drafter.adapter, texts or prompts
            )
        if self.rank == 0:
            self._write_artifact(drafter, model, tokenizer, target, measured, folder)
        if drafter.adapter is not None:
            drafter.adapter.detach()  # the next stage meets the target as it was
        return measured

    def _write_artifact(
        self, drafter: Drafter, model: PreTrainedModel, tokenizer: Any, target: Stage,
        measured: dict[str, Any], folder: Path,
    ) -> None:  # fmt: skip
        scratch = self.recipe.target.scratch is not None
        manifest = Manifest(
            family=self.recipe.drafter.family,
            target=str(target.folder) if scratch else target.info["model"],
            target_fingerprint=fingerprint(model),
            tokenizer_hash=tokenizer_hash(tokenizer),
            recipe=self.recipe.to_dict(),
            metrics=measured,
        )
        card = model_card(self.recipe, manifest)
        saved = save_drafter(drafter, folder / "artifact", manifest, card)
        write_atomically(saved / TREE, json.dumps(measured["tree"]).encode())
        # The stage's folder is the artifact. Its record, which comes last, says that it is whole.
        for file in saved.iterdir():
            if file.is_dir():  # half moved by a run that was killed
                shutil.rmtree(folder / file.name, ignore_errors=True)
            file.replace(folder / file.name)
        saved.rmdir()
        if (folder / "checkpoints").exists():
            shutil.rmtree(folder / "checkpoints")

    def _stage(
        self,
        name: str,
        settings: dict[str, Any],
        work: Callable[[Path], dict[str, Any] | None],
        reads: Sequence[Stage] = (),
        together: bool = False,
        finish: Callable[[Path], dict[str, Any]] | None = None,
        shared: bool = False,
    ) -> Stage:
        """Run a stage; process 0 decides whether there is work, and the others are told.

        Args:
            together: every process does `work`; else process 0 alone.
            finish: done by process 0 when all have worked; what it returns is recorded.
            shared: the stage may be that of the run which the recipe shares.
        """
        store = self._home(name, settings, reads) if shared else self.store
        folder = store.root / name
        if self.rank:
            if self._tell(None) and together:
                work(folder)
                torch.distributed.barrier()
            self._tell(None)  # the stage is on disk
            return self._note(store.run(name, settings, _unreachable, reads, together))
        worked = False

        def announced(folder: Path) -> dict[str, Any] | None:
            nonlocal worked
            worked = self._tell(True)
            info = work(folder)
            if together and self.world > 1:
                torch.distributed.barrier()
            return finish(folder) if finish else info

        stage = store.run(name, settings, announced, reads, resumable=together)
        if not worked:
            self._tell(False)
        self._tell(True)
        return self._note(stage)

    def _home(self, name: str, settings: dict[str, Any], reads: Sequence[Stage]) -> StageStore:
        """Where a stage that may be shared stands: all that it reads must stand there as well."""
        store = self.shared
        if store is None or any(stage.folder.parent != store.root for stage in reads):
            return self.store
        return store if store.keeps(name, settings, reads) else self.store

    def _note(self, stage: Stage) -> Stage:
        self.store.finished[stage.name] = stage  # a shared one is of this run too
        return stage

    def _tell(self, said: bool | None) -> bool:
        """What process 0 says, on every process."""
        told = [said]
        if self.world > 1:
            torch.distributed.broadcast_object_list(told, src=0)
        return bool(told[0])


def is_taught(name: str) -> bool:
    """Whether drafters of a family are trained: one that is not says nothing of taught depths."""
    return family(name).trainable


def make_drafter(recipe: Recipe, target: PreTrainedModel, rows: Rows | None) -> Drafter:
    """A fresh float32 drafter of the recipe's family, bound to the target and on its device."""
    kind = family(recipe.drafter.family)
    assert kind.config_class is not None and issubclass(kind.config_class, DrafterConfig)
    config = kind.config_class.for_target(target, **recipe.drafter.options)
    drafter = kind(config).float().to(target.device).bind(target)  # type: ignore[arg-type]
    drafter.init_from_target(rows.token_counts(config.vocab_size) if rows else None)
    return drafter


def model_card(recipe: Recipe, manifest: Manifest) -> str:
    """The artifact's README.md: what it is, what was measured, how to load it, its limits."""
    measured = manifest.metrics
    tree = StaticTree(measured["tree"])
    shares = " ".join("–" if s is None else f"{s:.2f}" for s in measured["acceptance_by_depth"])
    decode = recipe.decode
    rows = [
        ("tokens per round, τ", f"{measured['tau']:.2f}"),
        ("acceptance at depth 1, 2, …", shares),
        ("tree", f"{tree}, {tree.nodes} nodes with the root"),
        ("rule", decode.rule),
        ("prompts", f"{decode.validation_prompts} of {decode.prefix_tokens} tokens"),
        ("new tokens a prompt", str(decode.new_tokens)),
    ]
    chosen, unlike = "tree was", f"`{recipe.corpus.source}`"
    if is_taught(manifest.family):
        rows.append(("training", f"{measured['steps']} steps, {measured['seconds']:.0f} s"))
        chosen, unlike = "checkpoint and the tree were", f"{unlike}, which it was trained on"
    whose = "the target's own"
    if loss := measured.get("held_out_loss"):
        share = loss["adapted"] / loss["base"] - 1
        whose = (
            f"that of the\nadapted target: `{manifest.target}` with the LoRA adapter in `adapter/`,"
            " which was trained\nwith the drafter. Loading merges it into the target"
        )
        moved = f"{loss['base']:.4f} to {loss['adapted']:.4f} ({share:+.2%})"
        rows.append((f"target's loss on {loss['tokens']} held-out tokens, base to adapted", moved))
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"""---
library_name: headstart
tags: [speculative-decoding, {manifest.family}]
---

# {recipe.name}: a {manifest.family} drafter for `{manifest.target}`

It drafts several tokens a round, which the target verifies in one forward; the output is {whose}.

| measured on validation prompts | |
|---|---|
{table}

The {chosen} chosen by this τ, so expect slightly less on other text of the
same kind, and less on text unlike {unlike}.

```python
import headstart

speculator = headstart.load({manifest.target!r}, "PATH OF THIS FOLDER")
```

It works with this target alone (fingerprint `{manifest.target_fingerprint[:12]}`), and loading
checks that. How it was trained is in `headstart.json`, the tree in `{TREE}`.
"""


def _unreachable(folder: Path) -> None:
    raise AssertionError(f"{folder} was finished by process 0")


def _finite(value: Any) -> Any:
    """The same report with None for every NaN and infinity, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
