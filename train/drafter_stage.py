"""The stage that makes a drafter: from rows of the target's text to a measured artifact."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from headstart.heads import Drafter, DrafterConfig, Manifest, TrainableDrafter, family, fingerprint
from headstart.heads.artifacts.files import TREE
from headstart.heads.artifacts.manifest import tokenizer_hash
from headstart.heads.artifacts.saving import model_card, write_artifact
from headstart.heads.core import gathered, output_layer
from headstart.heads.core.files import write_atomically
from headstart.infer import StaticTree

from .data.documents import Document
from .data.prefixes import held_out_prompts, held_out_texts
from .data.training_rows import Rows
from .engine import loaded_whole
from .joint import adapter_loss_change, training_classes
from .on_policy import StudentText
from .processes import is_process_0
from .recipe import Recipe
from .validate import Validation


def make_drafter(recipe: Recipe, target: PreTrainedModel, rows: Rows | None) -> Drafter:
    """A new float32 drafter of the recipe's family, bound to the target and on its device."""
    kind = family(recipe.drafter.family)
    assert kind.config_class is not None and issubclass(kind.config_class, DrafterConfig)
    config = kind.config_class.for_target(target, **recipe.drafter.options)
    counts = rows.token_counts(config.vocab_size) if rows else None
    devices = [target.device] if target.device.type == "cuda" else []
    # From the seed alone, so that it is the same on all processes and in equal runs.
    with torch.random.fork_rng(devices), loaded_whole(), gathered(*_read_at_start(target)):
        torch.manual_seed(recipe.seed)
        drafter = kind(config).float().to(target.device).bind(target)  # type: ignore[arg-type]
        if isinstance(drafter, TrainableDrafter):
            drafter.init_from_target(counts)
    return drafter


def _read_at_start(target: PreTrainedModel) -> list[Any]:
    """What drafters call of a target when they are made; its layers are read one by one."""
    norm = getattr(target.get_decoder(), "norm", None)
    return [target.get_input_embeddings(), output_layer(target), norm]


def train_drafter(
    recipe: Recipe,
    args: TrainingArguments,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    held_out: Sequence[Document],
    rows: Rows | None,
    folder: Path,
) -> dict[str, Any]:
    """Train a drafter, measure it on prompts of held-out documents, and write the artifact.

    Args:
        name: the target's path or Hub name.
        rows: None for a family that is not trained.
        folder: the stage's, whose checkpoints are removed at the end.

    Returns:
        What was measured: steps, seconds, tau, acceptance_by_depth, tree, and held_out_loss where
        the target was adapted.
    """
    decode, train = recipe.decode, recipe.train
    drafter = make_drafter(recipe, target, rows)
    sizes = decode.validation_prompts, decode.prefix_tokens, recipe.seed
    prompts = held_out_prompts(tokenizer, held_out, *sizes, part="validation")
    validation = Validation(target, prompts, decode.new_tokens, decode.tree, decode.rule)
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
    if drafter.adapter is not None:
        texts = held_out_texts(tokenizer, held_out, decode.prefix_tokens, recipe.seed)[:512]
        measured["held_out_loss"] = adapter_loss_change(target, drafter.adapter, texts or prompts)
    adapter = drafter.adapter
    manifest = Manifest(  # by all processes, each of which may hold a part of the target
        family=recipe.drafter.family,
        target=name,
        target_fingerprint=fingerprint(target),
        tokenizer_hash=tokenizer_hash(tokenizer),
        adapter_base=adapter.digest() if adapter is not None else "",
        recipe=recipe.to_dict(),
        metrics=measured,
    )
    learnt = [drafter, nn.ParameterList(adapter.parameters() if adapter is not None else [])]
    with gathered(*learnt):
        if is_process_0():
            write_artifact(drafter, folder, manifest, training_card(recipe, manifest))
            write_atomically(folder / TREE, json.dumps(measured["tree"]).encode())
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    if adapter is not None:
        adapter.detach()  # later stages use the target without it
    return measured


def training_card(recipe: Recipe, manifest: Manifest) -> str:
    """The README.md of the artifact that `recipe` made, from the measurements in its manifest."""
    measured, decode = manifest.metrics, recipe.decode
    tree = StaticTree(measured["tree"])
    shares = " ".join("–" if s is None else f"{s:.2f}" for s in measured["acceptance_by_depth"])
    rows = [
        ("tokens per round, τ", f"{measured['tau']:.2f}"),
        ("acceptance at depth 1, 2, …", shares),
        ("tree", f"{tree}, {tree.nodes} nodes with the root"),
        ("rule", decode.rule),
        ("prompts", f"{decode.validation_prompts} of {decode.prefix_tokens} tokens"),
        ("new tokens a prompt", str(decode.new_tokens)),
    ]
    chosen, other_text = "tree was", f"`{recipe.corpus.source}`"
    if family(manifest.family).trainable:
        rows.append(("training", f"{measured['steps']} steps, {measured['seconds']:.0f} s"))
        chosen = "checkpoint and the tree were"
        other_text += ", which it was trained on"
    output = "The output is the\ntarget's own."
    if loss := measured.get("held_out_loss"):
        output = (
            f"The output is that of\nthe adapted target: `{manifest.target}` with the LoRA adapter "
            "in `adapter/`, which was\ntrained with the drafter. Loading merges it into the target."
        )
        change = f"{loss['adapted'] / loss['base'] - 1:+.2%}"
        rows.append((
            f"target's loss on {loss['tokens']} held-out tokens, base to adapted",
            f"{loss['base']:.4f} to {loss['adapted']:.4f} ({change})",
        ))  # fmt: skip
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    body = f"""{output}

| measured on validation prompts | |
|---|---|
{table}

The {chosen} chosen by this τ, so expect slightly less on other text of the
same kind, and less on text unlike {other_text}."""
    return model_card(
        manifest,
        f"{recipe.name}: a {manifest.family} drafter for `{manifest.target}`",
        body,
        "How it was trained is in `headstart.json`, the tree\nin `tree.json`.",
    )
