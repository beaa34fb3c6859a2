"""The stage that makes a drafter: from rows of the target's text to a measured artifact."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from headstart.heads import (
    Drafter,
    DrafterConfig,
    Manifest,
    TrainableDrafter,
    family,
    fingerprint,
)
from headstart.heads.artifacts.files import TREE
from headstart.heads.artifacts.manifest import tokenizer_hash
from headstart.heads.artifacts.saving import write_artifact
from headstart.heads.core.files import write_atomically

from .card import training_card
from .data.documents import Document
from .data.prefixes import held_out_prompts, held_out_texts
from .data.training_rows import Rows
from .joint import adapter_loss_change, training_classes
from .on_policy import StudentText
from .recipe import Recipe
from .validate import Validation


def make_drafter(recipe: Recipe, target: PreTrainedModel, rows: Rows | None) -> Drafter:
    """A new float32 drafter of the recipe's family, bound to the target and on its device."""
    kind = family(recipe.drafter.family)
    assert kind.config_class is not None and issubclass(kind.config_class, DrafterConfig)
    config = kind.config_class.for_target(target, **recipe.drafter.options)
    drafter = kind(config).float().to(target.device).bind(target)  # type: ignore[arg-type]
    if isinstance(drafter, TrainableDrafter):
        drafter.init_from_target(rows.token_counts(config.vocab_size) if rows else None)
    return drafter


def train_drafter(
    recipe: Recipe,
    args: TrainingArguments,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    held_out: Sequence[Document],
    rows: Rows | None,
) -> tuple[Drafter, dict[str, Any]]:
    """Train a drafter on `rows`, and measure it by decoding prompts of held-out documents.

    Args:
        rows: None for a family that is not trained.

    Returns:
        The drafter, and what was measured: steps, seconds, tau, acceptance_by_depth, tree, and
        held_out_loss where the target was adapted.
    """
    decode, train = recipe.decode, recipe.train
    drafter = make_drafter(recipe, target, rows)
    prompts = held_out_prompts(
        tokenizer, held_out, decode.validation_prompts, decode.prefix_tokens, recipe.seed,
        part="validation",
    )  # fmt: skip
    adapter = drafter.adapter  # of a target that is trained with the drafter
    validation = Validation(
        target, prompts, decode.new_tokens, decode.tree, decode.rule,
        target_changes=adapter is not None,
    )  # fmt: skip
    if rows is None or not isinstance(drafter, TrainableDrafter):
        measured = {"steps": 0, "seconds": 0.0, **validation(drafter)}
    else:
        module_class, trainer_class = training_classes(drafter)
        module = module_class(target, drafter, train.head_decay, train.loss, train.feature_weight)
        student = None
        if train.on_policy:
            student = StudentText(train.on_policy, drafter, rows, recipe.distill, args)
        measured = trainer_class(module, args, rows, train, validation, student_text=student).fit()
    drafter.eval()
    if adapter is not None:
        texts = held_out_texts(tokenizer, held_out, decode.prefix_tokens, recipe.seed)[:512]
        measured["held_out_loss"] = adapter_loss_change(target, adapter, texts or prompts)
    return drafter, measured


def write_drafter(
    recipe: Recipe,
    drafter: Drafter,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    measured: dict[str, Any],
    folder: Path,
) -> None:
    """Write the artifact into the stage's folder and remove the checkpoints there.

    Args:
        name: the target's path or Hub name.
    """
    manifest = Manifest(
        family=recipe.drafter.family,
        target=name,
        target_fingerprint=fingerprint(target),
        tokenizer_hash=tokenizer_hash(tokenizer),
        recipe=recipe.to_dict(),
        metrics=measured,
    )
    write_artifact(drafter, folder, manifest, training_card(recipe, manifest))
    write_atomically(folder / TREE, json.dumps(measured["tree"]).encode())
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
