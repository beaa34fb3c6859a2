"""The stages that make a drafter: from rows of the target's text to a measured artifact."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from headstart.heads import Drafter, DrafterConfig, Manifest, TrainableDrafter, family, fingerprint
from headstart.heads.artifacts.files import ACCEPTANCE, METRICS, PLOT, REPORT, TREE
from headstart.heads.artifacts.manifest import commit_of, tokenizer_hash
from headstart.heads.artifacts.plan import device_name, dtype_name, machine
from headstart.heads.artifacts.saving import write_artifact
from headstart.heads.core import gathered, in_shards, loaded_whole
from headstart.heads.core.files import write_atomically
from headstart.infer import RULES, StaticTree

from .data.documents import Document
from .data.held_out import HeldOutPrompt, Part, held_out_texts, prompt_settings, recipe_prompts
from .data.training_rows import Rows, context_of
from .estimate import training_flops
from .figures.card import training_card
from .figures.plot import draw_metrics
from .figures.report.parts import sample
from .figures.report.training import draw_acceptance, write_training_report
from .fit.feature_files import FeatureFolder
from .fit.joint import adapter_loss_change, training_classes, training_module
from .fit.on_policy import StudentText
from .fit.validate import AS_IT_IS, Validation, tau_table
from .fit.warm_start import start_from
from .processes.agreement import from_process_0, is_process_0, wait_for_all
from .processes.engine import ends_of
from .provenance import training_conditions
from .recipe import Decode, Recipe
from .stages.kept import (
    CHECKPOINTS,
    keep_weights_alone,
    kept_checkpoints,
    learnt_by,
    load_weights,
    read_drafter,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """The target of a run, and what its drafter is judged by."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str  # the target's path or Hub name
    held_out: Sequence[Document]

    def prompts(self, recipe: Recipe, part: Part) -> list[HeldOutPrompt]:
        """The held-out prompts that `recipe` asks for; see `recipe_prompts`."""
        context = context_of(self.target.config)
        return recipe_prompts(recipe, self.tokenizer, self.held_out, part, context)

    def validation(self, recipe: Recipe) -> Validation:
        """The measurement of a drafter that `recipe` asks for."""
        prompts = self.prompts(recipe, "validation")
        decode = recipe.decode
        how = decode.new_tokens, decode.tree, decode.rule, sampling_of(decode)
        return Validation(self.target, prompts, *how)


def sampling_of(decode: Decode) -> dict[str, Any]:
    """The options of `generate` that rules which sample are validated with."""
    given = {"temperature": decode.temperature, "top_k": decode.top_k, "top_p": decode.top_p}
    return AS_IT_IS | {name: value for name, value in given.items() if value is not None}


def make_drafter(recipe: Recipe, target: PreTrainedModel, rows: Rows | None) -> Drafter:
    """A new float32 drafter of the recipe's family, bound to the target and on its device."""
    kind = family(recipe.drafter.family)
    assert kind.config_class is not None and issubclass(kind.config_class, DrafterConfig)
    config = kind.config_class.for_target(target, **recipe.drafter.options)
    counts = rows.token_counts(config.vocab_size) if rows and kind.trainable else None
    devices = [target.device] if target.device.type == "cuda" else []
    # From the seed alone, so that it is the same on all processes and in equal runs.
    with torch.random.fork_rng(devices), loaded_whole(), gathered(*ends_of(target)):
        torch.manual_seed(recipe.seed)
        drafter = kind(config).float().to(target.device).bind(target)  # type: ignore[arg-type]
        if isinstance(drafter, TrainableDrafter):
            drafter.init_from_target(counts)
    if drafter.collects and rows is not None:
        found = (rows[number] for number in range(len(rows)))
        drafter.collect((row["tokens"], row["supervised"]) for row in found)
    return drafter


def evaluation_settings(recipe: Recipe) -> dict[str, Any]:
    """What decides how a drafter is measured in validation, as plain data."""
    decode = recipe.decode
    return {
        "tree": decode.tree, "rule": decode.rule, "new_tokens": decode.new_tokens,
        "validation_prompts": decode.validation_prompts, "prompts": prompt_settings(recipe),
        **({"sampling": sampling_of(decode)} if RULES[decode.rule].samples else {}),
    }  # fmt: skip


def train_drafter(
    recipe: Recipe, args: TrainingArguments, loaded: Loaded, rows: Rows, folder: Path,
    features: FeatureFolder | None = None,
) -> tuple[Drafter, dict[str, Any]]:  # fmt: skip
    """Train a drafter; the best and the last checkpoint stay in the folder's `checkpoints/`.

    Args:
        features: see `DrafterTrainer`.

    Returns:
        The drafter with the best one's weights, and a report: steps, seconds, train_loss, …, and
        `evaluated`, what validation measured at each step by `evaluation`, its settings.
    """
    train, target = recipe.train, loaded.target
    drafter = make_drafter(recipe, target, rows)
    assert isinstance(drafter, TrainableDrafter)
    start = start_from(train.from_, drafter) if train.from_ else None
    flops = training_flops(recipe, target, drafter)  # before the target is adapted
    module = training_module(train, target, drafter)
    module.set_up(train.activation_checkpointing, train.compile)
    student = None
    if train.on_policy:
        student = partial(StudentText, train.on_policy, drafter, rows, recipe.distill, args)
    args.output_dir = str(folder / CHECKPOINTS)
    validation = loaded.validation(recipe)
    _, trainer_class = training_classes(drafter)
    trainer = trainer_class(
        module, args, rows, train, validation,
        student_text=student, flops=flops, features=features,
        evaluation=evaluation_settings(recipe),
    )  # fmt: skip
    report = trainer.fit()
    evaluated = {
        str(entry["step"]): {
            name.removeprefix("eval_"): v for name, v in entry.items() if name.startswith("eval_")
        }
        for entry in trainer.state.log_history
        if "eval_tau" in entry
    }
    best = evaluated[str(report["best_step"])]
    told = {name: value for name, value in report.items() if name not in best}
    told |= {"from": start} if start else {}
    wait_for_all()
    if is_process_0():
        keep_weights_alone(folder / CHECKPOINTS)
    return drafter, told | {"evaluated": evaluated, "evaluation": evaluation_settings(recipe)}


def choose(
    recipe: Recipe, loaded: Loaded, drafter: Drafter | None, folder: Path, trained: dict[str, Any]
) -> tuple[Drafter, dict[str, Any]]:
    """The drafter of the kept checkpoint with the highest τ, and what is told of it.

    Args:
        drafter: as it was trained, if by this process.
        folder: of the training, and `trained` its report: what was validated there by the same
            settings is not measured again.
    """
    known = trained["evaluated"] if trained["evaluation"] == evaluation_settings(recipe) else {}
    checkpoints = kept_checkpoints(folder / CHECKPOINTS)
    loads = trained["best_step"]  # the step whose weights the drafter has
    if drafter is None:
        loads = next(iter(checkpoints))
        kind = family(recipe.drafter.family)
        drafter = read_drafter(kind, loaded.target, checkpoints[loads])
    measured: dict[int, dict[str, Any]] = {}
    validation = None
    for step, checkpoint in checkpoints.items():
        if str(step) in known:
            measured[step] = known[str(step)]
        else:
            load_weights(drafter, loaded.target, checkpoint)
            loads = step
            validation = validation or loaded.validation(recipe)
            with gathered(drafter, *ends_of(loaded.target)):
                measured[step] = from_process_0(validation(drafter.eval()))
    best = max(measured, key=lambda step: (measured[step]["tau"], -step))
    if best != loads:
        load_weights(drafter, loaded.target, checkpoints[best])
    told = {name: value for name, value in trained.items() if not name.startswith("evaluat")}
    return drafter, told | {"best_step": best} | measured[best]


def write_drafter(
    recipe: Recipe,
    loaded: Loaded,
    drafter: Drafter,
    measured: dict[str, Any],
    folder: Path,
    metrics: Path | None = None,
    distilled: Path | None = None,
) -> dict[str, Any]:
    """Write the artifact of a drafter that was measured; returns what its manifest says of it.

    Args:
        metrics: the figures of its training, which are kept and drawn.
        distilled: the folder of the rows that it learnt from; None for one that learns nothing.
    """
    target, tokenizer = loaded.target, loaded.tokenizer
    drafter.eval()
    if drafter.adapter is not None:
        texts = held_out_texts(
            tokenizer, loaded.held_out, recipe.decode.prefix_tokens, recipe.seed,
            recipe.distill.chat, recipe.chat,
        )  # fmt: skip
        with gathered(*ends_of(target)):
            change = adapter_loss_change(target, drafter.adapter, texts)
        measured = measured | {"held_out_loss": change}
    adapter = drafter.adapter
    # Texts are shown in the report, which stays in the run; the manifest is published.
    samples = measured.get("samples", [])
    measured = {name: value for name, value in measured.items() if name != "samples"}
    manifest = Manifest(  # by all processes, each of which may hold a part of the target
        family=recipe.drafter.family,
        target=loaded.name,
        target_fingerprint=fingerprint(target),
        target_revision=commit_of(target),
        tokenizer_hash=tokenizer_hash(tokenizer),
        adapter_base=adapter.digest() if adapter is not None else "",
        recipe=recipe.to_dict(),
        metrics=measured,
    )
    runs = not in_shards(target)  # so that one process alone can run it
    with gathered(*learnt_by(drafter)):
        if is_process_0():
            if distilled is not None:
                if runs:
                    manifest.metrics = measured | _told(recipe, loaded, drafter, measured)
                manifest.trained = training_conditions(
                    recipe, target, tokenizer, drafter, loaded.held_out[:64], distilled, runs
                )
            folder.mkdir(parents=True, exist_ok=True)
            plotted = _keep_metrics(metrics, folder, measured.get("best_step"))
            pictured = draw_acceptance(manifest.metrics, folder / ACCEPTANCE)
            card = training_card(recipe, manifest, plotted, pictured)
            write_artifact(drafter, folder, manifest, card)
            texts = []
            for number, each in enumerate(samples, start=1):
                title, before = f"{number}. {each['source']}", each.get("prompt", ())
                texts.append(sample(title, tokenizer, each["ids"], each["rounds"], before))
            place = device_name(target.device), dtype_name(target)
            write_training_report(
                recipe, manifest, folder / METRICS, texts, *place, folder / REPORT
            )
            write_atomically(folder / TREE, json.dumps(measured["tree"]).encode())
    if adapter is not None:
        adapter.detach()  # later stages use the target without it
    return measured


def _told(
    recipe: Recipe, loaded: Loaded, drafter: Drafter, measured: dict[str, Any]
) -> dict[str, Any]:
    """τ of several trees at two temperatures, and where it was measured."""
    prompts = loaded.prompts(recipe, "validation")
    tree = StaticTree(measured["tree"])
    return {
        "taus": tau_table(loaded.target, drafter, tree, prompts, recipe.decode.new_tokens),
        "machine": machine(loaded.target),
        "dtype": dtype_name(loaded.target),
    }


def _keep_metrics(metrics: Path | None, folder: Path, best: int | None) -> bool:
    """Copy a training's figures beside the drafter and draw them; whether there is a plot."""
    if metrics is None or not metrics.is_file():
        return False
    shutil.copyfile(metrics, folder / METRICS)
    drawn = draw_metrics(folder / METRICS, folder / PLOT, best)
    if not drawn:
        logger.warning("no plot of the training: it needs matplotlib (pip install matplotlib)")
    return drawn
