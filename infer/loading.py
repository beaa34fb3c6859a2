"""Loading of a target and its drafters for decoding."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from headstart.heads import Drafter, OptionError, load_drafter
from headstart.heads.artifacts.hub import target_options
from headstart.heads.artifacts.shapes import declared_depth
from headstart.heads.artifacts.source import DrafterSource, SourceKind
from headstart.heads.core import (
    Packing,
    device_of,
    has_bfloat16,
    language_model_in,
    load_pretrained,
)

from .rules.registry import find_rule
from .speculator import Speculator, Trees
from .target import AUTO, PACKED, way_to_run
from .tensor_parallel import check_in_parts, load_in_parts
from .trees.adaptive import AdaptiveTree
from .trees.by_request import USUAL, Kind
from .trees.parse import default_tree, parse_tree
from .trees.shapes import ADAPTIVE, AdaptiveShape, check_grown_by

logger = logging.getLogger(__name__)

NamedDrafter = DrafterSource | str | Path

_LARGE = 64 << 20  # bytes of weights, below which a type hardly matters


def load(
    target: PreTrainedModel | str | Path | None = None,
    drafter: Drafter | NamedDrafter | Sequence[Drafter | NamedDrafter] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str | torch.device | None = None,
    tree: Trees = None,
    rule: str | None = None,
    expansion: str | None = None,
    graphs: bool | None = None,
    attention: str = "auto",
    allow_pickle: bool = False,
    compile: bool | str | None = None,
    fused: bool | None = None,
    prefix_caching: bool = False,
    in_place: bool = True,
    tensor_parallel: int = 1,
    **options: Any,
) -> Speculator:
    """Load a model and its drafter, and return the Speculator that decodes with them.

        speculator = headstart.load("ORG/MODEL", "ORG/DRAFTER", dtype="bfloat16")
        inputs = speculator.tokenizer("Hello", return_tensors="pt").to(speculator.device)
        output = speculator.generate(**inputs, max_new_tokens=128)  # [1, P + new]

    Args:
        target: the model to make faster: its folder or Hub name (the tokenizer is then loaded too),
            or a model that transformers or peft has loaded. None takes the one that the drafter was
            trained for.
        drafter: the folder or Hub name (`ORG/NAME` or `ORG/NAME@REVISION`) of a drafter or of a
            smaller language model, also with another tokenizer; `"lookup"`, `"recycling"` or
            `"suffix"`, which have no weights; `"mtp"`, the module for multi-token prediction in the
            target's own files; `"early_exit:8"`, its first 8 layers; or a `Drafter`. A list of
            these decodes with all of them together. None decodes plainly.
        tokenizer: of a target that is passed as a model; for `stop_strings` and checks.
        device: where a target that is given by name is put, such as `"cuda"`. None leaves it on
            the CPU, as transformers does, unless `device_map` says otherwise.
        tree: how many tokens are drafted, and in which form, such as `"chain:4"`, see
            `Speculator`. None takes the plan for this machine that `headstart plan` has saved with
            the drafter (plain decoding where no tree is faster), or else the tree that training
            measured it with; for several drafters the union of theirs.
        rule, expansion, graphs, attention, fused, prefix_caching: see `Speculator`.
        compile: see `Speculator`. None is `auto` where target and drafters are all given by name,
            and False where one of them is passed in, which is then neither changed nor copied.
        allow_pickle: read weights of a drafter from a pickle where there are no safetensors; only
            tensors are read.
        in_place: where forwards on a CPU are made faster, whether the models that are loaded here
            by name are packed in place, so that each weight is in memory once, and plain calls of
            `speculator.model` run packed too. If False, a packed copy is made, as it is of a model
            that is passed in.
        tensor_parallel: among how many processes the layers of a target that is given by name are
            divided, on as many GPUs. This process starts the others, which end with it; drafters
            are whole in this one. Rounds are not captured as graphs then.
        options: of a target that is given by name, passed to
            `AutoModelForCausalLM.from_pretrained`, such as `dtype`, `device_map` or `revision`.
            `trust_remote_code=True` runs code that comes with the target and its tokenizer; a
            drafter's is never run.

    Raises:
        ArtifactError: there is no such target or drafter, its files are damaged, or the drafter was
            trained for another target.
        OptionError: an argument that cannot be used, by name.
        UnsupportedTarget: a model that cannot decode token trees exactly, with the reason.
    """
    single = drafter is None or isinstance(drafter, Drafter | NamedDrafter)
    named: Any = [drafter] if single else drafter
    drafters: list[Any] = [
        each if isinstance(each, Drafter) else DrafterSource.of(each, allow_pickle)
        for each in _known_drafters(named)
    ]
    if target is None:
        target = _own_target(drafters, options)
    _check_dtype(options)
    _check_decoding(tree, rule, expansion, drafters)  # before minutes of loading
    by_name = isinstance(target, str | Path)
    if plans := [name for name in ("tp_plan", "tp_size", "distributed_config") if name in options]:
        raise OptionError(
            f"{plans[0]} divides a target among processes that a launcher starts; give "
            "tensor_parallel=N, with which this process starts the others."
        )
    if tensor_parallel != 1:
        ways = {"compile": compile, "fused": fused, "graphs": graphs}
        check_in_parts(tensor_parallel, by_name, device, options, ways)
    elif device is not None:
        options = _placed(options, device) if by_name else {**options, "device": device}
    if by_name:
        local = target_options(target, options.get("revision"))
        trusted = {**local, "trust_remote_code": options.get("trust_remote_code", False)}
        tokenizer = tokenizer or load_pretrained(AutoTokenizer, target, **trusted)
        options = {**local, **options}
        if tensor_parallel != 1:
            model = load_in_parts(target, tensor_parallel, **options)
        else:
            model = load_pretrained(AutoModelForCausalLM, target, **options).eval()
        if "dtype" not in options and (hint := faster_type(model)) is not None:
            logger.warning(hint)
    else:
        if options:
            raise OptionError(
                f"{' and '.join(options)} given beside a target that is loaded already, where "
                "nothing would read it; load the model with it, or give the target's name."
            )
        model = language_model_in(target)
    if compile is None:
        compile = by_name and not any(isinstance(each, Drafter) for each in drafters) and AUTO
    if compile == AUTO:
        compile = way_to_run(model, compile, in_place and by_name) or False
    ours: list[Any] = [model] if by_name else []  # what nobody else holds
    sources = [*drafters]
    trees: list[dict[Kind, Any]] = [{USUAL: None} for _ in drafters]
    for number, source in enumerate(sources):
        if isinstance(source, Drafter):
            continue
        if tree is None:
            planned = {
                (plan.batch_size, plan.temperature): plan.tree
                for plan in source.plans(model, bool(compile))
                # A plan's tree is empty where only plain decoding pays; one of several drafts on.
                if plan.tree or len(drafters) == 1
            }
            trees[number] = {USUAL: source.tree} | planned
        drafters[number] = load_drafter(source, model, tokenizer)
        ours.append(drafters[number])
    if in_place and way_to_run(model, compile) == PACKED:
        packing = Packing()
        for module in ours:
            packing.pack_in_place(module)
    chosen: Any = tree
    if tree is None and len(drafters) == 1:
        chosen = trees[0]
        if all(each == [] for each in chosen.values()):
            drafters = []  # it was loaded because it may have adapted the target
    elif tree is None:
        chosen = default_tree(drafters, [each[USUAL] for each in trees])
    elif tree == ADAPTIVE:
        chosen = adaptive_tree(drafters, sources)
    return Speculator(
        model,
        drafters,
        tree=chosen,
        rule=rule,
        expansion=expansion,
        tokenizer=tokenizer,
        graphs=graphs,
        attention=attention,
        compile=compile,
        fused=fused,
        prefix_caching=prefix_caching,
    )


def adaptive_tree(drafters: Sequence[Drafter], sources: Sequence[Any]) -> AdaptiveTree:
    """That of drafters which were trained with one, or the deepest chain, as an adaptive tree.

    Args:
        sources: of the drafters, each a `DrafterSource`, or the drafter itself.
    """
    own = [each.tree if isinstance(each, DrafterSource) else None for each in sources]
    return AdaptiveTree(default_tree(drafters, own))


def _placed(options: dict[str, Any], device: str | torch.device) -> dict[str, Any]:
    """The options of `from_pretrained` that put a whole model on a device."""
    if "device_map" in options:
        raise OptionError("device and device_map are given, and each says where; leave one out.")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise OptionError(f"device is {device!r}; expected cpu, cuda, cuda:1, …") from error
    gpus = torch.cuda.device_count()
    if place.type == "cuda" and (place.index or 0) >= gpus:
        raise OptionError(
            f"device is {str(place)!r}, and torch {torch.__version__} finds {gpus} GPUs here; give "
            "'cpu', or another GPU."
        )
    return options if place.type == "cpu" else {**options, "device_map": {"": place}}


def _check_decoding(
    trees: Trees, rule: str | None, expansion: str | None, drafters: Sequence[Any]
) -> None:
    """Refuse what their names and configs show to be wrong, before any weights are read.

    Raises:
        ArtifactError: there is no such drafter.
        OptionError: no such rule, expansion or tree, or one that does not suit the others.
    """
    record = find_rule(rule)
    record.check_expansion(expansion)
    depths = [
        each.max_depth if isinstance(each, Drafter) else declared_depth(each) for each in drafters
    ]
    for tree in trees.values() if isinstance(trees, Mapping) else [trees]:
        if tree is not None:
            policy: Any = AdaptiveShape() if tree == ADAPTIVE else parse_tree(tree)
            record.check_tree(policy)
            check_grown_by(policy, depths)


def _known_drafters(named: Any) -> list[Any]:
    """What is named as drafters, but for None; an OptionError for anything else."""
    found = list(named) if isinstance(named, Iterable) else [named]
    for each in found:
        if not isinstance(each, Drafter | NamedDrafter | None):
            raise OptionError(
                f"drafter is of type {type(each).__name__}; expected the folder or Hub name of a "
                "drafter or of a smaller model, 'lookup', 'recycling', 'suffix', 'mtp', "
                "'early_exit', or a Drafter."
            )
    return [each for each in found if each is not None]


def _own_target(drafters: list[Any], options: dict[str, Any]) -> str:
    """The target that the first artifact among drafters was trained for."""
    if options.get("trust_remote_code"):  # a drafter may name any model as its target
        raise OptionError("trust_remote_code=True trusts the code of a target; name the target.")
    for each in drafters:
        if isinstance(each, DrafterSource) and each.kind is SourceKind.ARTIFACT:
            return each.own_target
    raise OptionError("no target is given, and no drafter that was trained for one; give a target.")


def _check_dtype(options: dict[str, Any]) -> None:
    """Refuse the name of a type that torch does not have."""
    name = options.get("dtype", options.get("torch_dtype"))
    if isinstance(name, str) and name != "auto":
        known = getattr(torch, name, None)
        if not isinstance(known, torch.dtype) or not known.is_floating_point:
            raise OptionError(
                f"dtype is {name!r}; expected 'auto', 'float32', 'bfloat16' or 'float16'."
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
