"""The recipe by which a drafter is trained further on recorded requests."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from headstart.heads import family
from headstart.heads.artifacts.files import CONFIG, WEIGHTS, read_header, read_json
from headstart.heads.artifacts.loading import is_translated
from headstart.heads.artifacts.source import DrafterSource, SourceKind
from headstart.heads.core import load_pretrained
from headstart.heads.families import with_article
from headstart.heads.parts.student import KEPT
from headstart.infer.rules.registry import choose_rule

from ..data.corpus import build_corpus, load_documents
from ..data.held_out import available_prompts, prompt_settings
from ..data.training_rows import context_of
from ..fit.warm_start import going_on
from ..recipe import Recipe, family_keys, keys_of, parse_recipe, recipe_of
from .earlier import Earlier
from .traffic import AdaptError, Traffic, longest

FEWEST = 6
"""Held-out prompts below which nothing can be told from noise."""

_MOST = {"prompts": 64, "validation_prompts": 32}  # so that measuring takes little time
_NEW_TOKENS, _ROW = 128, 2048  # of an answer, and with its prompt, where no length is known
_LONGEST_ANSWER = 256  # tokens that are decoded of an answer, to measure
_EPOCHS, _EVALUATIONS = 3, 6


def compose(
    source: DrafterSource,
    traffic: Traffic,
    earlier: Earlier,
    target: str | None = None,
    out: Path | None = None,
    rewrite: bool = False,
    overrides: Sequence[str] = (),
) -> Recipe:
    """The recipe of an adaptation: the drafter's own, on the traffic, from the drafter's weights.

    Args:
        target: another than the drafter's own, such as a later version of it.
        out: the folder of the run; by default beside the drafter's run.
        rewrite: whether the target answers the prompts anew.

    Raises:
        AdaptError: the drafter cannot be adapted, or there are too few prompts.
        ValueError: an override that cannot be used.
    """
    check_adaptable(source)
    name = target or source.own_target
    keys = _own_recipe(source)
    keys["drafter"] |= _output_of(source)
    drafter, start = going_on(parse_recipe(keys).drafter, source.name)
    keys["drafter"] = {"family": drafter.family, **drafter.options}
    if drafter.options.get("model") == source.name:  # perhaps ORG/NAME@REVISION
        keys["drafter"]["model"] = str(source.folder)
    place = out or _place(source)
    if place.resolve() == _run_of(source):
        raise AdaptError(
            f"{place} is the folder of the drafter's own run, whose {source.name} stays as it is; "
            "choose another --out"
        )
    keys |= {"name": place.name, "output": str(place.parent), "shares": None}
    keys["target"] = {**keys["target"], "model": name, "scratch": None} | _dtype(source, target)
    if target is not None:
        keys["target"]["revision"] = None
    context = context_of(load_pretrained(AutoConfig, name))
    keys["corpus"] = _corpus(traffic)
    rows = earlier.rows if target is None else None  # another target would write otherwise
    keys["distill"] = _distill(keys, traffic, rows, rewrite, context)
    keys["decode"] = _decode(keys, source, traffic)
    keys["train"] = _train(keys, traffic, start)
    return _with_prompts(keys, recipe_of(keys, overrides), traffic, overrides, context)


def check_adaptable(source: DrafterSource) -> None:
    """Raise AdaptError for a drafter that cannot be trained further, with the reason."""
    if source.kind is SourceKind.CHECKPOINT:
        raise AdaptError(
            f"{source} is a checkpoint of another project; make an artifact of it (headstart "
            "convert), or train on the traffic with headstart train"
        )
    if source.kind is not SourceKind.ARTIFACT:
        raise AdaptError(f"{source} is {source.kind}; expected a drafter that headstart saved")
    name = source.manifest.family
    kind: Any = family(name)
    if not kind.trainable:
        learns = ", which learns nothing"
        if kind.collects:
            learns = "; make a new one of the answers (headstart train, corpus.source=RECORDS)"
        raise AdaptError(f"{source} is {with_article(name)} drafter{learns}")
    if source.manifest.adapter_sha256:
        raise AdaptError(
            f"{source} is {with_article(name)} drafter, which is trained together with an adapter "
            "of its target, and training that further would change the text; write the adapted "
            "target as a model of its own (headstart merge), and adapt the drafter beside it"
        )
    if is_translated(source):
        raise AdaptError(f"{source} has a tokenizer of its own, and no such draft model is trained")
    if kind.saved_as_language_model and KEPT in read_header(source.folder / WEIGHTS):
        raise AdaptError(
            f"{source} proposes only some of its tokens, and a draft model is trained with all; "
            "adapt the one that it was made from, and trim that again (headstart trim)"
        )


def _own_recipe(source: DrafterSource) -> dict[str, Any]:
    """The keys of the recipe that trained a drafter; of its family where nobody noted it."""
    manifest = source.manifest
    if manifest.recipe:
        return keys_of(manifest.recipe)
    kind: Any = family(manifest.family)
    keys = family_keys(manifest.family)
    config = kind.config_class.from_dict(read_json(source.folder / CONFIG))
    options = {name: getattr(config, name) for name in kind.config_class.OPTIONS}
    if kind.saved_as_language_model:  # it is the model to go on from
        options |= {"model": source.name, "layers": None}
    keys["drafter"] = {"family": manifest.family, **options}
    return keys


def _output_of(source: DrafterSource) -> dict[str, Any]:
    """The options that give a drafter the trimmed vocabulary that an artifact has."""
    config = read_json(source.folder / CONFIG)
    if config.get("output") != "trimmed":
        return {}
    return {name: config[name] for name in ("output", "draft_vocab_size")}


def _run_of(source: DrafterSource) -> Path | None:
    """The folder of the run that a drafter stands in; None where it stands alone."""
    folder = source.folder.resolve()
    return folder.parent if re.match(r"heads(-|$)", folder.name) else None


def _place(source: DrafterSource) -> Path:
    """Where an adaptation goes: `runs/x` to `runs/x-adapted`, that to `runs/x-adapted-2`, …"""
    run = _run_of(source)
    name = run.name if run else Path(source.name).name.partition("@")[0]
    found = re.fullmatch(r"(.*-adapted)(?:-(\d+))?", name)
    name = f"{found[1]}-{int(found[2] or 1) + 1}" if found else f"{name}-adapted"
    return Path(source.name).parent.parent / name if run else Path("runs") / name


def _dtype(source: DrafterSource, target: str | None) -> dict[str, Any]:
    """The type that the target had in training, which a model that was trained there lacks."""
    dtype = (source.manifest.trained.get("target") or {}).get("dtype")
    quantized = (source.manifest.trained.get("target") or {}).get("quantization")
    return {"dtype": dtype} if dtype and not quantized and target is None else {}


def _corpus(traffic: Traffic) -> dict[str, Any]:
    # A killed process may have left half a line; broken rows are counted.
    return {
        "source": traffic.source, "max_bytes": traffic.size, "held_out": 0.2, "on_error": "skip"
    }  # fmt: skip


def _distill(
    keys: dict[str, Any], traffic: Traffic, rows: Path | None, rewrite: bool, context: int | None
) -> dict[str, Any]:
    before = parse_recipe(keys).distill
    answer = longest(traffic.answers) or before.new_tokens
    length = max(longest(traffic.wholes) or _ROW, before.row_tokens)
    length = min(length, context or length)
    answer = min(answer, length // 2)
    found = {
        "examples": traffic.requests, "prefix": "prompt", "chat": before.chat, "shards": 8,
        "batch_size": before.batch_size, "new_tokens": answer, "prefix_tokens": length - answer,
        "max_length": length, "earlier": rows and str(rows),
    }  # fmt: skip
    if not rewrite:
        return found | {"writer": "given"}
    temperature = float(traffic.sampling.get("temperature", 0.0))
    return found | {"writer": "own", "temperature": temperature}


def _decode(keys: dict[str, Any], source: DrafterSource, traffic: Traffic) -> dict[str, Any]:
    """The drafter's tree, and the settings of the traffic."""
    tree = source.tree or keys.get("decode", {}).get("tree") or "chain:4"
    answer = longest(traffic.answers) or _NEW_TOKENS
    answer = max(2, min(answer, _LONGEST_ANSWER, keys["distill"]["new_tokens"]))
    sampling = traffic.sampling
    warm = sampling.get("temperature", 0) > 0
    rule = choose_rule(None, warm).name
    how: dict[str, Any] = {"tree": tree, "rule": rule, "prefix": "same", "new_tokens": answer}
    if warm:
        how["temperature"] = float(sampling["temperature"])
        how |= {name: sampling[name] for name in ("top_p", "top_k") if sampling.get(name)}
    return how


def _train(keys: dict[str, Any], traffic: Traffic, start: str | None) -> dict[str, Any]:
    found = copy.deepcopy(keys.get("train", {})) | {"from": start, "extend": False}
    if found.get("packed_length"):  # no row may be longer
        found["packed_length"] = max(found["packed_length"], keys["distill"]["max_length"])
    spec = parse_recipe({**keys, "train": found}).train
    step = spec.rows_per_step or spec.batch_size * spec.gradient_accumulation
    steps = traffic.requests * _EPOCHS // step
    return found | {
        "epochs": float(_EPOCHS), "max_steps": 1_000_000,  # epochs end it
        "eval_every": max(steps // _EVALUATIONS, 1),
    }  # fmt: skip


def _with_prompts(
    keys: dict[str, Any], recipe: Recipe, traffic: Traffic, overrides: Sequence[str],
    context: int | None,
) -> Recipe:  # fmt: skip
    """The recipe with as many held-out prompts as there are, up to `_MOST`."""
    with tempfile.TemporaryDirectory(prefix="headstart-") as folder:
        build_corpus(recipe.corpus, Path(folder), recipe.seed, quiet=True)  # the run says it
        tokenizer: Any = load_pretrained(AutoTokenizer, str(recipe.target.model))
        held_out = load_documents(Path(folder), "held_out")
        keys["distill"]["examples"] = max(len(load_documents(Path(folder), "train")), 1)
        there, _ = available_prompts(recipe, tokenizer, held_out, context)
    few = min(there["bench"], there["validation"] * 2)
    if few < FEWEST:
        raise AdaptError(
            f"{traffic.source}: {len(held_out)} of {traffic.requests} requests are "
            f"held out, and give {there['bench']} prompts to compare the drafters by and "
            f"{there['validation']} to choose a checkpoint by, of at most "
            f"{prompt_settings(recipe, context)['tokens']} tokens; expected at least {FEWEST} and "
            f"{FEWEST // 2}: record more, or raise corpus.held_out or distill.max_length"
        )
    keys["decode"] |= {
        "prompts": min(there["bench"], _MOST["prompts"]),
        "validation_prompts": min(there["validation"], _MOST["validation_prompts"]),
    }
    return recipe_of(keys, overrides)
