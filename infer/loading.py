"""Loading of a target and its drafters for decoding."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from headstart.heads import Drafter, load_drafter
from headstart.heads.artifacts.hub import target_options
from headstart.heads.artifacts.source import DrafterSource
from headstart.heads.core import language_model_in, load_pretrained

from .speculator import Speculator
from .trees.parse import default_tree
from .trees.policy import Policy

NamedDrafter = DrafterSource | str | Path


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
    else:
        model = language_model_in(target)
    single = drafter is None or isinstance(drafter, Drafter | NamedDrafter)
    given: Any = [drafter] if single else drafter
    drafters: list[Any] = [each for each in given if each is not None]
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
