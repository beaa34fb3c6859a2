"""Export of drafters to other engines and projects, each file read back and compared.

| to | what reads it |
|---|---|
| `vllm` | vLLM; for an MLP speculator with the plugin Arctic Inference |
| `sglang` | SGLang |
| `tensorrt-llm` | TensorRT-LLM, with its PyTorch backend |
| `llama.cpp` | llama.cpp's converter to GGUF |
| `speculators` | the speculators library, and vLLM through it |
| `transformers` | transformers' `assistant_model` |
| `original` | the code of the method's authors |

A family says what it can be written as in `StoredDrafter.exports`; an ordinary language model, as
a draft model is, can be read by all engines as it is. A module for multi-token prediction is
written into a copy of its target's checkpoint, which engines and `--drafter mtp` read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..core import ArtifactError
from ..core.files import new_folder
from ..drafter import Drafter
from ..families import FAMILIES, family, with_article
from ..parts.published.checkpoint import TargetModule
from ..translated_draft_model import TranslatedDraftModel
from .engines import FORMATS, TOKEN_MAP, serve_line
from .files import CONFIG, check_is_free, read_json, write_json
from .foreign_checkpoints import load_checkpoint
from .source import DrafterSource
from .target_files import in_folder, save_tensors, write_with_module

_AS_LANGUAGE_MODEL = ("vllm", "sglang", "tensorrt-llm", "llama.cpp", "transformers")


def check_format(form: str) -> None:
    """An ArtifactError for a format that no drafter is written in."""
    if form not in FORMATS:
        raise ArtifactError(f"found format {form!r}, expected one of: {', '.join(FORMATS)}.")


def formats_of(name: str) -> list[str]:
    """The formats that drafters of a family can be written in."""
    kind = family(name)
    return list(_AS_LANGUAGE_MODEL if kind.saved_as_language_model else kind.exports)


def is_copy_of_target(name: str, form: str) -> bool:
    """Whether an export of a family is a copy of its whole target with the drafter in it."""
    return family(name).in_target and form != "speculators"


def export_drafter(
    drafter: Drafter | None,
    form: str,
    folder: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> str | None:
    """Write a drafter for another engine, read it back, and compare the logits of both.

    Args:
        drafter: bound to its target.
        form: one of `FORMATS`.
        folder: where to write; it must be empty, or not exist.
        tokenizer: saved beside a draft model.

    Returns:
        The line that starts the engine with it; None where there is no engine.

    Raises:
        ArtifactError: the family has no such format, the engine would run it wrongly, the folder
            holds something, or what was read back gives other logits. Nothing is written then.
    """
    check_format(form)
    if drafter is None:
        raise ArtifactError("there is no drafter to export; name an artifact or a checkpoint.")
    folder, name = Path(folder), drafter.config.family_name()
    if form not in formats_of(name):
        able = [each for each in FAMILIES if form in formats_of(each)]
        raise ArtifactError(
            f"{with_article(name)} drafter cannot be exported to {form!r}, which takes "
            f"{', '.join(able) or 'nothing known here'}; expected one of: "
            f"{', '.join(formats_of(name)) or 'none for this family'}."
        )
    check_is_free(folder)
    with new_folder(folder, "the export") as new:
        _write(drafter, form, new, tokenizer)
        coarsest = torch.finfo(drafter.dtype).eps
        if is_copy_of_target(name, form):
            kind: Any = type(drafter)
            again = kind.of_target(in_folder(drafter.target, new)).to(drafter.dtype)
            coarsest = max(coarsest, torch.finfo(drafter.target.dtype).eps)  # as it is written
        else:
            options = {"dtype": drafter.dtype}
            again = load_checkpoint(
                DrafterSource(new), drafter.target, tokenizer, options, target_is_known=True
            )
        again = again.to(drafter.device).eval().bind(drafter.target)  # type: ignore[arg-type]
        worst = largest_difference(drafter, again)
        if not worst <= 1e-5 * max(1.0, coarsest / 1e-7):
            raise ArtifactError(
                f"what was written as {form} gives other logits when it is read back (by "
                f"{worst:.2g} of their size); nothing was exported: please report this."
            )
    return serve_line(drafter, form, str(folder))


def _write(
    drafter: Any, form: str, folder: Path, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    if drafter.saved_as_language_model:
        if drafter.config.feature_layers:
            raise ArtifactError(
                f"the drafter reads features of its target, which {form} gives to no language "
                "model; train one without drafter.feature_layers."
            )
        if isinstance(drafter, TranslatedDraftModel):
            raise ArtifactError(
                f"the draft model has a tokenizer of its own, whose tokens {form} does not "
                "translate as headstart does; name the model itself there, if it can translate."
            )
        if drafter.trimmed:
            raise ArtifactError(
                f"the drafter proposes {len(drafter.draft_vocabulary):,} of "
                f"{drafter.config.vocab_size:,} tokens, which {form} asks of no language model; "
                "export the drafter that it was trimmed from."
            )
        drafter.save_pretrained(folder)
        write_json(folder / CONFIG, with_older_names(read_json(folder / CONFIG)))
        drafter.model.generation_config.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        return
    written = drafter.exports[form](drafter)
    if isinstance(written, TargetModule):
        write_with_module(drafter.target, written, folder)
        return
    save_tensors(written.tensors, folder / written.file)
    if written.token_map:
        torch.save(list(written.token_map), folder / TOKEN_MAP)
    write_json(folder / CONFIG, written.config)


def with_older_names(config: dict[str, Any]) -> dict[str, Any]:
    """A model's config that also says by their older names what transformers 5 renamed.

    Engines with transformers 4 would take defaults instead.

    >>> theirs = with_older_names({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    >>> theirs["rope_theta"], theirs["rope_scaling"]
    (500000.0, None)
    """
    older = {"torch_dtype": config["dtype"]} if config.get("dtype") else {}
    rope = dict(config.get("rope_parameters") or {})
    if "rope_theta" in rope:  # else there are none, or some for each type of layers
        older["rope_theta"] = rope.pop("rope_theta")
        if (part := rope.pop("partial_rotary_factor", None)) is not None:
            older["partial_rotary_factor"] = part
        older["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
    return config | older


@torch.no_grad()
def largest_difference(one: Drafter, other: Drafter, seed: int = 0) -> float:
    """How far the logits of two drafters of one target differ, as a share of their size.

    Both draft two tokens in a row, or the one that they can, after 12 random tokens and features.
    """
    generator = torch.Generator().manual_seed(seed)
    layers = len(one.config.feature_layers)
    size = one.target.config.get_text_config(decoder=True).hidden_size
    tokens = torch.randint(one.config.vocab_size, (1, 12), generator=generator)
    features = torch.randn(1, 12, layers * size, generator=generator)
    found = [_drafts(each, features, tokens) for each in (one, other)]
    worst = 0.0
    for first, second in zip(*found, strict=True):
        if first.shape != second.shape:
            return float("inf")
        first, second = first.double(), second.double()
        worst = max(worst, ((first - second).abs().max() / first.abs().max().clamp(min=1)).item())
    return worst


def _drafts(drafter: Any, features: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The logits [1, W, Vd] of two levels after a text's features [1, T, F] and tokens [1, T]."""
    place, length = drafter.device, tokens.shape[1]
    features, tokens = features.to(place, drafter.dtype), tokens.to(place)
    state = drafter.start(1, length + 8)
    drafter.reserve(state, length + 1, 8)
    drafter.prefill(state, features, tokens, torch.tensor([length], device=place))
    last, one = (features[:, -1:], tokens[:, -1:]), torch.ones(1, dtype=torch.long, device=place)
    steps = [drafter.begin(state, *last, one)]
    if not drafter.independent and drafter.max_depth != 1:
        steps.append(drafter.extend(state, tokens[:, :1], torch.full((1, 1), -1, device=place)))
    return [step.logits for step in steps]
