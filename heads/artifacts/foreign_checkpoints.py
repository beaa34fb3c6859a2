"""Loading of what headstart did not save: other trainers' checkpoints, and language models.

A checkpoint is a folder or Hub repository with a `config.json` and one file of weights
(see `HEADS`), or a whole model that holds the heads, in one or several files. The first family
whose `Drafter.from_checkpoint` knows the tensors loads it. Nothing in it proves which target it was
trained for, so only its shapes are checked: with another target of the same shapes it drafts
badly, and the output is the target's all the same. What no family knows may be a language model,
which then is the draft model.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..core import FINAL, ArtifactError, OptionError, load_pretrained
from ..declared.pard import PARALLEL
from ..draft_model import DraftModel
from ..drafter import Drafter, DrafterConfig
from ..pard import DRAFTING, PROJECTION, PROJECTION_BIAS, Pard
from ..parts.published.layer_ids import check_layer_ids
from ..parts.translation import Translation
from ..translated_draft_model import TranslatedDraftModel
from .files import (
    CONFIG,
    HEADS,
    MALFORMED,
    PARALLEL_FEATURES,
    PICKLE,
    WEIGHTS,
    brief,
    check_settings,
    read_json,
)
from .foreign_files import HEADS_INSIDE, known_families, read_tensors, recognise
from .manifest import tokenizer_hash
from .settings import language_model_config
from .shapes import expected_shapes, first_difference
from .source import DrafterSource

logger = logging.getLogger(__name__)


def load_checkpoint(
    source: DrafterSource,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    options: dict[str, Any],
    target_is_known: bool = False,
) -> Drafter:
    """Load another trainer's drafter, or a language model as the draft model; neither is bound yet.

    Args:
        target_is_known: leave out the warning that shapes alone show which target it is for.

    Raises:
        ArtifactError: it is neither, does not fit the target, or is pickled and not allowed.
    """
    config = read_json(source.folder / CONFIG)
    files, found = recognise(source, config)
    if found is None:
        check_model(source, config, files)
        # A model of a known type may name code too, which is then not run; or it is quantized.
        check_settings(source.folder, config, allowed=("auto_map", "quantization_config"))
        return _load_language_model(source, target, tokenizer, options)
    kind, fields, tensors = found
    names_layers = "feature_layers" in fields
    text = target.config.get_text_config(decoder=True)
    _check_sizes(fields, text, source)
    try:
        fields, tensors = kind.completed((fields, tensors), target)
        drafter_config = _config(kind, fields, target, source)
        check_layer_ids(drafter_config.feature_layers, text.num_hidden_layers)
    except (ArtifactError, OptionError) as error:
        raise ArtifactError(f"{source} is not read: {error}") from error
    tensors = _apart(tensors)
    _check_shapes(drafter_config, tensors, source, config)
    try:
        drafter: Any = kind.from_pretrained(
            None, config=drafter_config, state_dict=tensors, **options
        )
    except torch.OutOfMemoryError:
        raise
    except (*MALFORMED, StrictDataclassError) as error:
        config_class: Any = kind.config_class
        raise ArtifactError(
            f"{source} cannot be read as {config_class.family_name()} ({brief(error)}); "
            "download it again."
        ) from error
    if not names_layers and FINAL not in (layers := drafter_config.feature_layers):
        logger.warning(
            f"{source} names no layers of the target, so it reads the inputs of layers "
            f"{', '.join(map(str, layers))}, those that engines take for it or its authors give."
        )
    base = _named_target(config)
    if target_is_known or (base and base == target.name_or_path):
        return drafter
    named = f"; its config names {brief(repr(base), 100)}" if base else ""
    logger.warning(
        f"Only shapes show that {source} was trained for this target{named}: where it was not, τ "
        "stays near 1, and the output is the target's all the same."
    )
    return drafter


def _named_target(config: dict[str, Any]) -> str:
    """The target that a checkpoint's config names, as Medusa's and those of speculators do."""
    name, place = config.get("base_model_name_or_path"), config.get("speculators_config")
    for key in ("verifier", "name_or_path"):
        place = place.get(key) if isinstance(place, dict) else None
    return next((each for each in (name, place) if isinstance(each, str)), "")


def _check_sizes(fields: dict[str, Any], text: Any, source: DrafterSource) -> None:
    """An ArtifactError where the target, by its text config, is of another size than expected."""
    for field, what in (("hidden_size", "hidden size"), ("vocab_size", "vocabulary")):
        found, expected = fields.get(field), getattr(text, field)
        if found is not None and found != expected:
            raise ArtifactError(
                f"{source} was trained for a target of {what} {found}, and this one's is "
                f"{expected}; load the target that it was trained for."
            )


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, each with memory of its own: pickles may hold one under several names."""
    seen, found = set[int](), {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return found


def _config(
    kind: type[Drafter], fields: dict[str, Any], target: PreTrainedModel, source: DrafterSource
) -> DrafterConfig:
    """The family's config for a target, with the fields that the checkpoint sets."""
    config_class: Any = kind.config_class
    options = {field: fields[field] for field in fields if field in config_class.OPTIONS}
    config = config_class.for_target(target, **options)
    for field in fields.keys() - options.keys():
        try:
            setattr(config, field, fields[field])
        except (*MALFORMED, StrictDataclassError) as error:
            raise ArtifactError(
                f"it says {field} {brief(repr(fields[field]), 80)}, which is of another kind "
                "than expected; correct its config.json."
            ) from error
    return config


def _check_shapes(
    config: DrafterConfig, tensors: dict[str, Tensor], source: DrafterSource, said: dict[str, Any]
) -> None:
    """Refuse a tensor that is missing, unknown or of another shape, the first by name."""
    found = {key: list(tensor.shape) for key, tensor in tensors.items()}
    try:
        wrong = first_difference(expected_shapes(config.family_name(), config), found)
    except (*MALFORMED, StrictDataclassError) as error:
        raise ArtifactError(
            f"{source} has a config that describes no {config.family_name()} ({brief(error)}); "
            "download it again."
        ) from error
    if wrong is not None:
        name, has, wanted = wrong
        remedy = "its tensors do not fit together: download it again"
        if wanted == "none":
            remedy = "it has a part that is not run here: look for a head without it"
        if quantized := said.get("quantization_config") or said.get("compression_config"):
            method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
            remedy = f"it is quantized ({brief(method, 40)}): look for it in full precision"
        raise ArtifactError(
            f"{source} does not fit as {config.family_name()}: found {name} {has}, expected "
            f"{wanted}; {remedy}."
        )


def check_model(source: DrafterSource, config: dict[str, Any], files: list[Path]) -> None:
    """Refuse what no family knows, unless it may be a language model."""
    if any(file.name in HEADS and file.name not in (WEIGHTS, PICKLE) for file in files):
        what = f"its {files[0].name} has tensors that no family here knows"
    elif inside := [key for key in HEADS_INSIDE if key in config]:
        what = f"its config has {inside[0]}, and no weights of such heads were found in safetensors"
    elif str(config.get("model_type")) not in CONFIG_MAPPING:
        found = f"a {files[0].name} of another kind" if files else "no file of weights"
        what = f"its model type is {config.get('model_type')!r}, with {found}"
    else:
        return
    raise ArtifactError(
        f"{source} is no drafter that can be read: {what}; expected an artifact of headstart, a "
        f"language model, or another's checkpoint of one of: {known_families()}."
    )


def _load_language_model(
    source: DrafterSource, target: PreTrainedModel, tokenizer: Any, options: dict[str, Any]
) -> DraftModel:
    """A causal language model as the target's draft model."""
    own = _load_tokenizer(
        source.folder,
        f"{source} holds no tokenizer that can be loaded, so nobody knows whether its ids are the "
        "target's; save the tokenizer beside the model.",
    )
    expected = tokenizer or _load_tokenizer(
        target.name_or_path,
        f"{source} is compared with the target by their tokenizers, and the target's was not "
        "found; pass tokenizer=….",
    )
    translated = tokenizer_hash(own) != tokenizer_hash(expected)
    config, left_out = language_model_config(source.folder)
    if left_out := [key for key in left_out if key not in DRAFTING]:
        logger.warning(
            f"{source}: settings of its config that a {config.model_type} does not have are left "
            f"out: {brief(', '.join(left_out))}."
        )
    options |= {"use_safetensors": True, "config": config, "output_loading_info": True}
    kind: Any = TranslatedDraftModel if translated else DraftModel
    if PARALLEL in read_json(source.folder / CONFIG):
        if translated:
            raise ArtifactError(
                f"{source} drafts in parallel, and has another tokenizer than the target "
                f"({len(own)} tokens, expected those of the target's {len(expected)}); use a "
                "drafter of the target's own family."
            )
        kind, options["projection"] = Pard, _projection(source)
    try:
        drafter, report = kind.from_pretrained(source.folder, **options)
    except torch.OutOfMemoryError:
        raise
    except (*MALFORMED, StrictDataclassError, OSError) as error:
        raise ArtifactError(
            f"{source} cannot be loaded as a causal language model ({brief(error)}); expected one "
            "with weights in safetensors."
        ) from error
    if missing := sorted(report["missing_keys"]):  # which transformers fills at random
        raise ArtifactError(
            f"{source} cannot be loaded as a causal language model: {missing[0]} of "
            f"{config.model_type} is missing from its weights; download it again, unless it is a "
            "drafter of a kind that is not known here."
        )
    if translated:
        _translate(drafter, source, target, expected, own)
    return drafter


def _translate(
    drafter: TranslatedDraftModel,
    source: DrafterSource,
    target: PreTrainedModel,
    expected: Any,
    own: Any,
) -> None:
    """Let a draft model with a tokenizer of its own draft the tokens that the target has, too."""
    vocabulary = target.config.get_text_config(decoder=True).vocab_size
    outputs = drafter.whole_output.weight.shape[0]
    drafter.translate(Translation.between(expected, own, vocabulary, outputs))
    count = len(drafter.draft_vocabulary)
    logger.warning(
        f"{source} has another tokenizer than the target: it drafts the {count:,} of the target's "
        f"{len(expected):,} tokens that both have, and reads the others in pieces."
    )


def _projection(source: DrafterSource) -> Tensor | None:
    """The tensor that PARD-2's authors publish beside the language model, in a pickle."""
    if PARALLEL_FEATURES not in source.files:
        return None
    if source.allow_pickle:
        tensors = read_tensors(source.folder / PARALLEL_FEATURES)
        if PROJECTION_BIAS in tensors:
            raise ArtifactError(
                f"{source} has {PROJECTION_BIAS} in {PARALLEL_FEATURES}, and a projection with a "
                "bias is not run here; load it without allow_pickle, to draft from tokens alone."
            )
        return tensors.get(PROJECTION)
    logger.warning(
        f"{source} drafts from tokens alone: its projection of the target's features is in "
        f"{PARALLEL_FEATURES}, a pickle; have its tensors read with allow_pickle=True "
        "(--allow-pickle)."
    )
    return None


def _load_tokenizer(place: Any, otherwise: str) -> Any:
    try:
        return load_pretrained(AutoTokenizer, place)
    except OptionError:  # it needs code of its own
        raise
    except (*MALFORMED, OSError) as error:
        raise ArtifactError(otherwise) from error
