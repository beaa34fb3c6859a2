"""A run without weights: its models on the `meta` device and its tokenizer, and what must hold.

Of a target on the Hub only the config and the tokenizer are fetched.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from headstart.heads import Drafter, DrafterConfig, OptionError, TrainableDrafter, family
from headstart.heads.artifacts.files import MALFORMED, brief
from headstart.heads.artifacts.hub import model_commit, target_options
from headstart.heads.core import (
    FeatureTap,
    causal_class,
    decoder_layers,
    load_pretrained,
    whole_plan,
)
from headstart.heads.families import with_article
from headstart.infer import parse_static
from headstart.infer.trees.texts import sparse_nodes

from ..data.held_out import prompt_settings
from ..data.training_rows import check_context, context_of
from ..fit.arguments import load_options
from ..fit.feature_files import check_feature_files
from ..fit.on_policy import check_on_policy
from ..fit.packing_trial import check_packing
from ..fit.target_with_drafter import checkpoint_activations
from ..fit.warm_start import start_from
from ..losses.draft_loss import DraftLoss
from ..processes.engine import under_fsdp
from ..processes.tensor_parallel import WORDS
from ..recipe import Recipe
from ..scratch_target import model_config
from .unused import unused_settings

logger = logging.getLogger(__name__)


class CheckError(ValueError):
    """A recipe that cannot work, found out before any stage ran."""


@dataclass(frozen=True)
class Plan:
    """What a run is made of, as far as it is known before it begins."""

    target: PreTrainedModel  # on `meta`
    drafter: Drafter  # on `meta`, bound to it, float32
    tokenizer: PreTrainedTokenizerBase | None  # None where the target is trained here
    counted: bool = False  # whether the corpus was read, and its prompts were counted

    @property
    def context(self) -> int | None:
        """See `context_of`; of the target."""
        return context_of(self.target.config)


def plan_run(recipe: Recipe, processes: int = 1) -> Plan:
    """Build a run's models without weights, and check its options, tree, template and context.

    Args:
        processes: among which `target.tp_plan` divides the target.

    Raises:
        ValueError: one of its kinds, in one line: the target is not there or has no tokenizer, an
            option of the drafter is unknown or does not fit the target, there is no chat template,
            the context is too short, …
    """
    kind = family(recipe.drafter.family)  # a mistyped name fails first
    check_on_policy(recipe)
    load_options(recipe.target, torch.device("cpu"))
    config, tokenizer = _config_and_tokenizer(recipe)
    for line in unused_settings(recipe, tokenizer):
        logger.warning("%s: %s", recipe.name, line)
    target = _target(recipe, config)
    check_packing(recipe.train.packing, target)
    drafter = _drafter(recipe, kind, target)
    check_feature_files(recipe, drafter.adapter is not None)
    _check_whole_layers(recipe, drafter, target)
    if (parts := recipe.target.tp_plan) is not None:
        whole_plan(target, parts, processes, **WORDS)
        _check_parts(recipe, drafter)
    if isinstance(drafter, TrainableDrafter):
        if recipe.train.from_ is not None:
            start_from(recipe.train.from_, drafter)
        if recipe.train.activation_checkpointing and drafter.adapter is None:
            checkpoint_activations(drafter)
    if tokenizer is not None and recipe.distill.chat == "template" and not tokenizer.chat_template:
        raise CheckError(
            f"distill.chat is template, but the tokenizer of {recipe.target.model} has no chat "
            "template; set distill.chat to plain or auto"
        )
    if recipe.distill.rounds > 1 and (drafter.adapter is not None or not drafter.trainable):
        what = "changes the target's text" if drafter.adapter is not None else "is not trained"
        raise CheckError(
            f"distill.rounds is {recipe.distill.rounds}, but "
            f"{with_article(recipe.drafter.family)} drafter, "
            f"which would write the later ones, {what}; set distill.rounds=1"
        )
    _check_tree(recipe, drafter)
    _check_lengths(recipe, target, drafter)
    return Plan(target, drafter, tokenizer)


def _config_and_tokenizer(
    recipe: Recipe,
) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase | None]:
    spec = recipe.target
    if spec.scratch is not None:
        with _made_of("target.scratch", "model"):
            return model_config(spec.scratch, spec.scratch.vocab_size), None
    name = str(spec.model)
    if Path(name).expanduser().is_dir():
        if spec.revision is not None:
            raise CheckError(
                f"target.revision is {spec.revision!r}, but target.model {name} is a folder here, "
                "which has no revisions; set target.revision=null"
            )
    else:
        model_commit(name, spec.revision)  # one line at once; transformers would try for a while
    how = {"revision": spec.revision} if spec.revision else {}
    return _read(AutoConfig, name, "config.json", how), _read(AutoTokenizer, name, "tokenizer", how)


def _target(recipe: Recipe, config: PreTrainedConfig) -> PreTrainedModel:
    """The target without weights; an OptionError where it cannot attend as it is told."""
    attention = recipe.target.attn_implementation
    how = {} if attention is None else {"attn_implementation": attention}
    section = "target.model" if recipe.target.scratch is None else "target.scratch"
    try:
        with _made_of(section, "model"), torch.device("meta"):
            return causal_class(config).from_config(config, trust_remote_code=False, **how).eval()
    except (ImportError, ValueError) as error:
        if attention is None:
            raise
        raise OptionError(
            f"target.attn_implementation is {attention}, with which this target cannot be made "
            f"({brief(error)}); expected sdpa, eager, or one whose package is installed."
        ) from error


@contextmanager
def _made_of(section: str, what: str) -> Iterator[None]:
    """A CheckError where torch or transformers cannot make anything of a section's sizes."""
    try:
        yield
    except (ImportError, ValueError):
        raise
    except (*MALFORMED, StrictDataclassError) as error:
        raise CheckError(
            f"{section}: no {what} can be made of these settings ({brief(error)}); correct them"
        ) from error


def _read(kind: Any, name: str, what: str, how: dict[str, str]) -> Any:
    if Path(name).is_dir():
        target_options(name)  # the folder of a drafter or of a run
    try:
        return load_pretrained(kind, name, **how)
    except OptionError:  # it needs code of its own
        raise
    except (OSError, KeyError, ValueError) as error:
        raise CheckError(
            f"target.model {name}: its {what} cannot be read ({brief(error)}); expected the folder "
            "or the Hub name of a causal language model"
        ) from error


def _drafter(recipe: Recipe, kind: type[Drafter], target: PreTrainedModel) -> Drafter:
    """The recipe's drafter, with all that can be refused of its options refused."""
    assert kind.config_class is not None and issubclass(kind.config_class, DrafterConfig)
    with _made_of("drafter", recipe.drafter.family):
        config = kind.config_class.for_target(target, **recipe.drafter.options)
        with torch.device("meta"):
            drafter = kind(config)  # type: ignore[arg-type]
    drafter.float().bind(target)
    FeatureTap(target, config.feature_layers).close()
    if isinstance(drafter, TrainableDrafter):
        if not drafter.has_weights:
            raise CheckError(
                f"drafter: with these options {recipe.drafter.family} has no weights to train; set "
                "drafter.layers to 1 or more, or decode with --drafter early_exit"
            )
        # The loss that is asked for reads the target's weights, which are not there.
        DraftLoss(drafter, recipe.train.head_decay, "cross_entropy", recipe.train.feature_weight)
    if drafter.adapter is not None:
        drafter.adapter.attach(target)
        drafter.adapter.detach()
    return drafter


def _check_whole_layers(recipe: Recipe, drafter: Drafter, target: PreTrainedModel) -> None:
    """Raise OptionError where layers that the drafter shares with its target are not whole."""
    ways = {"target.tp_plan": recipe.target.tp_plan is not None, "FSDP": under_fsdp(os.environ)}
    for way in (name for name, asked in ways.items() if asked):
        if not {*drafter.shared_modules(target)}.isdisjoint(decoder_layers(target)):
            raise OptionError(
                f"{way} divides the target's layers among processes, and {recipe.drafter.family} "
                "drafts with the first of them; use the launch file ddp or zero3, without "
                "target.tp_plan."
            )


def _check_parts(recipe: Recipe, drafter: Drafter) -> None:
    """Raise OptionError for what a target in parts cannot do."""
    if drafter.adapter is not None:
        raise OptionError(
            f"target.tp_plan divides the target's layers, and {recipe.drafter.family} trains an "
            "adapter of them; set it to null, and use the launch file ddp or zero3."
        )
    spec = recipe.distill
    if spec.writer == "own" and (spec.drafter is not None or spec.rounds > 1):
        raise OptionError(
            "target.tp_plan has all processes write each row together, without a drafter; set "
            "distill.drafter to null and distill.rounds to 1, or write the rows with one process "
            "before."
        )


def _check_tree(recipe: Recipe, drafter: Drafter) -> None:
    tree = recipe.decode.tree
    if sparse_nodes(tree):
        return
    depth, bound = parse_static(tree).max_depth, drafter.max_depth
    if bound is not None and depth > bound:
        raise OptionError(
            f"decode.tree is {depth} deep, but "
            f"{with_article(recipe.drafter.family)} drafter with these "
            f"options proposes {bound} tokens; use a tree of at most {bound}, or another drafter"
        )


def _check_lengths(recipe: Recipe, target: PreTrainedModel, drafter: Drafter) -> None:
    """Rows must fit where they are packed; and texts that validation writes, into the context."""
    room, row = recipe.train.packed_length, recipe.distill.row_tokens
    packs = drafter.trainable and recipe.train.packing is not False
    if packs and room is not None and recipe.distill.writer != "given" and room < row:
        raise CheckError(
            f"train.packed_length is {room}, but a training row may have {row} tokens; raise it, "
            "or set it to null, or lower distill.max_length"
        )
    if drafter.learns() and recipe.distill.writer != "given":  # whose rows are cut
        check_context(recipe.distill, target)
        if isinstance(drafter, TrainableDrafter) and drafter.language_model is not None:
            check_context(recipe.distill, drafter.language_model, "draft model")
    if isinstance(drafter, TrainableDrafter):
        depths, row = drafter.train_depths, recipe.distill.row_tokens
        if depths >= row:
            key = "heads" if drafter.max_depth is not None else "depths"
            raise CheckError(
                f"drafter.{key} is {depths}, but a training row has at most {row} tokens, and none "
                f"so far ahead to learn from; lower it"
            )
    context, new = context_of(target.config), recipe.decode.new_tokens
    kind = prompt_settings(recipe, context)
    prompt = kind["tokens"]
    if context is not None and prompt + new > context:
        key = "distill" if kind["prefix"] == "prompt" else "decode"
        what = f"{key}.prefix_tokens {prompt}"
        if kind.get("decoded") and kind["prefix"] == "prompt":
            what = f"prompts of {prompt} tokens, as distill.max_length allows them,"
        raise CheckError(
            f"{what} and decode.new_tokens {new} make {prompt + new} tokens, "
            f"but the target's context is {context}; lower one of them"
        )
