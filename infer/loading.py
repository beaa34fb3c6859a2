"""Loading of a target and its drafters for decoding."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from headstart.heads import Drafter, load_drafter
from headstart.heads.artifacts.hub import target_options
from headstart.heads.artifacts.source import DrafterSource
from headstart.heads.core import (
    Packing,
    device_of,
    has_bfloat16,
    language_model_in,
    load_pretrained,
)

from .speculator import Speculator
from .target import AUTO, PACKED, way_to_run
from .trees.parse import default_tree
from .trees.policy import Policy

logger = logging.getLogger(__name__)

NamedDrafter = DrafterSource | str | Path

_LARGE = 64 << 20  # bytes of weights, below which a type hardly matters


def load(
    target: PreTrainedModel | str | Path,
    drafter: Drafter | NamedDrafter | Sequence[Drafter | NamedDrafter] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    tree: Policy | str | Sequence[Sequence[int]] | None = None,
    rule: str | None = None,
    expansion: str | None = None,
    graphs: bool | None = None,
    attention: str = "auto",
    allow_pickle: bool = False,
    compile: bool | str = False,
    in_place: bool = True,
    **options: Any,
) -> Speculator:
    """Load target and drafter and return the Speculator over them.

    Args:
        target: a model, such as transformers or peft load it, or the folder or Hub name of one (its
            tokenizer is then loaded too).
        drafter: a drafter, or the name or source of one, see `load_drafter`; None decodes plainly;
            several decode together, see `Union`.
        tree: see `Speculator`; None takes the artifact's plan for this machine, which decodes
            plainly where no tree is faster, or else the tree that it was measured with; for several
            drafters the union of theirs.
        rule, expansion, graphs, attention, compile: see `Speculator`.
        allow_pickle: see `DrafterSource`.
        in_place: where weights are packed, whether what is loaded here by name is packed as it is,
            so that each weight is in memory once, and plain calls of `speculator.model` run packed
            too; if not, a copy is, as of a model that was passed in.
        options: passed to `AutoModelForCausalLM.from_pretrained`, such as `dtype`.
            `trust_remote_code=True` runs code that comes with the target and its tokenizer; a
            drafter's is never run.

    Raises:
        ArtifactError: there is no such target; the drafter is damaged or was trained for another.
        UnsupportedTarget: the target cannot be driven by a token tree.
    """
    if isinstance(target, str | Path):
        local = target_options(target, options.get("revision"))
        model = load_pretrained(AutoModelForCausalLM, target, **{**local, **options}).eval()
        local["trust_remote_code"] = options.get("trust_remote_code", False)
        tokenizer = tokenizer or load_pretrained(AutoTokenizer, target, **local)
        if "dtype" not in options and (hint := faster_type(model)) is not None:
            logger.warning(hint)
    else:
        model = language_model_in(target)
    if compile == AUTO:
        compile = way_to_run(model, compile) or False
    single = drafter is None or isinstance(drafter, Drafter | NamedDrafter)
    named: Any = [drafter] if single else drafter
    drafters: list[Any] = [each for each in named if each is not None]
    ours = [] if not isinstance(target, str | Path) else [model]  # what nobody else holds
    trees: list[Any] = [None] * len(drafters)
    for number, each in enumerate(drafters):
        if isinstance(each, Drafter):
            continue
        source = DrafterSource.of(each, allow_pickle)
        if tree is None:
            # A plan's tree is empty where only plain decoding pays; one of several drafters stays.
            plan = source.plan(model, compiled=bool(compile))
            planned = plan is not None and (plan.tree or len(drafters) == 1)
            trees[number] = plan.tree if plan is not None and planned else source.tree
        drafters[number] = load_drafter(source, model, tokenizer)
        ours.append(drafters[number])
    if in_place and way_to_run(model, compile) == PACKED:
        packing = Packing()
        for module in ours:
            packing.pack_in_place(module)
    if trees == [[]]:
        drafters = []  # no tree pays; the drafter was loaded because it may have adapted the target
    return Speculator(
        model,
        drafters,
        tree=default_tree(drafters, trees) if tree is None else tree,
        rule=rule,
        expansion=expansion,
        tokenizer=tokenizer,
        graphs=graphs,
        attention=attention,
        compile=compile,
    )


def faster_type(model: PreTrainedModel) -> str | None:
    """A sentence where another type than the model's is much faster on this machine; else None.

    The type is never changed unasked: it rounds otherwise, and so may write another text.
    """
    if device_of(model).type != "cpu" or not has_bfloat16():
        return None
    size = sum(weight.nbytes for weight in model.parameters() if weight.dtype == torch.float32)
    if size < _LARGE:
        return None
    return (
        f"The target's weights are float32, {size / 1e6:.0f} MB; in bfloat16 this processor reads "
        "half as much and is about 3 times as fast, rounding more: --dtype bfloat16 "
        "(dtype='bfloat16')."
    )
