"""A drafter that has been trained, made to propose the most frequent tokens alone.

An output layer over all of a vocabulary of 128,000 tokens takes a good part of the time of many
drafters, and rare tokens are seldom drafted right. Rows of the output layer are left out for them
(FR-Spec, Zhao et al. 2025, arXiv 2502.14856; VocabTrim, Goel et al. 2025, arXiv 2506.22694). The
target still writes any token, so the text stays exact.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..core import ArtifactError, OptionError, output_layer, output_rows
from ..draft_model import DraftModel
from ..drafter import Drafter
from ..families import with_article
from ..parts.vocabulary import TrimmedVocabulary
from ..translated_draft_model import TranslatedDraftModel
from .conditions import drafter_conditions
from .files import MALFORMED, MANIFEST, check_is_free, unreadable
from .license import license_of
from .manifest import Manifest, manifest_of
from .saving import model_card, save_drafter
from .source import DrafterSource, SourceKind
from .training_table import training_table

_BODY = """The output is the
target's own. It has the weights of {base}, and proposes
{size:,} of {whole:,} tokens, the most frequent ones of some text.

**Nothing was measured** after the others were left out: `headstart plan` and `headstart bench` do
that."""


def check_can_be_trimmed(drafter: Drafter, size: int) -> None:
    """Refuse a drafter whose output layer cannot be left with `size` tokens.

    Raises:
        ArtifactError: it has none, or is trained together with its target.
        OptionError: these are not fewer tokens than it proposes now; or heads that share an output
            layer would have more rows of their own.
    """
    name, config = with_article(drafter.config.family_name()), drafter.config
    if drafter.adapter is not None:
        raise ArtifactError(
            f"{name} drafter belongs to an adapted target; write both as ordinary models first "
            "(headstart merge), and trim the drafter among them."
        )
    own = isinstance(drafter, TrimmedVocabulary | DraftModel)
    if not own or not drafter.has_weights:
        raise ArtifactError(
            f"{name} drafter has no output layer that could be trimmed; expected trained heads, "
            "decoder layers or a draft model, such as medusa, eagle3 or draft_model."
        )
    if isinstance(drafter, TranslatedDraftModel):
        raise ArtifactError(
            "the draft model has a tokenizer of its own, and proposes the tokens alone that the "
            "target has, too; it is not trimmed further."
        )
    now = drafter.draft_vocabulary
    known = config.vocab_size if now is None else len(now)
    if not 0 < size < known:
        raise OptionError(
            f"a vocabulary of {size:,} tokens for a drafter that proposes {known:,}; expected "
            f"1 … {known - 1:,}."
        )
    if isinstance(drafter, DraftModel):
        return
    whole, rows = config.vocab_size, drafter.own_rows(size)
    if config.output == "shared" and rows >= whole:
        heads = rows // size
        raise OptionError(
            f"{heads} heads share an output layer of {whole:,} rows, and would have {rows:,} of "
            f"their own for {size:,} tokens; expected fewer than {-(-whole // heads):,} tokens."
        )


def trimmed(drafter: Drafter, ids: Tensor) -> Any:
    """A drafter with the same weights that proposes some of the tokens alone.

    Args:
        drafter: bound to its target; it stays what it is.
        ids: [Vd] the target ids of these tokens, ascending, of those that the drafter proposes now.

    Returns:
        It, bound to the same target. Its logits are those of the drafter for these tokens.

    Raises:
        ArtifactError, OptionError: see `check_can_be_trimmed`; or it proposes other tokens; or the
            target's output layer, from which rows are taken, has a bias that this family has no
            place for.
    """
    check_can_be_trimmed(drafter, len(ids))
    now = drafter.draft_vocabulary
    known = torch.arange(drafter.config.vocab_size) if now is None else now.cpu()
    ids = ids.cpu().contiguous()
    if len(unknown := ids[~torch.isin(ids, known)]):
        raise OptionError(
            f"the token {unknown[0].item()} for a drafter that does not propose it; expected "
            "tokens that it proposes."
        )
    if isinstance(drafter, DraftModel):
        return _with_tokens(drafter, ids)
    config: Any = copy.deepcopy(drafter.config)
    config.output, config.draft_vocab_size = "trimmed", len(ids)
    kind: Any = type(drafter)
    new = kind(config)
    rows, place = torch.searchsorted(known, ids).to(drafter.device), drafter.device
    state, shapes = dict(drafter.state_dict()), {k: t.shape for k, t in new.state_dict().items()}
    state["vocabulary"] = ids.to(place)
    borrowed = _rows_of_target(drafter, ids, [name for name in shapes if name not in state])
    for name, shape in shapes.items():
        if name in borrowed:
            state[name] = borrowed[name].expand(shape).clone()
        elif state[name].shape != shape:
            (dim,) = [d for d, size in enumerate(shape) if size != state[name].shape[d]]
            state[name] = state[name].index_select(dim, rows)
    new.load_state_dict(state, assign=True)
    return new.to(place).eval().bind(drafter.target)


def _with_tokens(drafter: DraftModel, ids: Tensor) -> DraftModel:
    """A draft model that shares all weights with another, and proposes tokens [Vd] alone."""
    shared = (*drafter.parameters(), *drafter.buffers(), drafter.target)
    new = copy.deepcopy(drafter, {id(each): each for each in shared})
    new.keep_tokens(ids)
    return new.eval().bind(drafter.target)


def _rows_of_target(drafter: Drafter, ids: Tensor, names: list[str]) -> dict[str, Tensor]:
    """What a shared output layer has for some tokens, by the names of the drafter's own: weights
    [Vd, D] and biases [Vd]."""
    layer: Any = output_layer(drafter.target)
    weight, bias = output_rows(drafter.target), getattr(layer, "bias", None)
    biases = [name for name in names if name.endswith("bias")]
    if names and not biases and bias is not None and bias.any():
        raise ArtifactError(
            "the target's output layer has a bias, which the drafter's own would not have; "
            "expected a target without one."
        )
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    rows = ids.to(weight.device)
    taken = {name: (bias if name in biases else weight)[rows] for name in names}
    return {name: each.detach().to(drafter.device, drafter.dtype) for name, each in taken.items()}


def save_trimmed(
    drafter: Drafter,
    source: DrafterSource,
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    folder: str | Path,
) -> Path:
    """Write an artifact of a drafter that proposes some of the tokens alone.

    What was measured of the whole drafter is left out.

    Args:
        drafter: loaded from the source, in the dtype that is to be written.
        ids: see `trimmed`.
        folder: must be empty, or not exist.

    Raises:
        ArtifactError, OptionError: see `trimmed`; or the folder holds something; or the source's
            manifest is damaged.
    """
    folder = Path(folder)
    check_is_free(folder)
    new, target = trimmed(drafter, ids), drafter.target
    there = source.kind is SourceKind.ARTIFACT
    manifest = source.manifest if there else manifest_of(new, tokenizer)
    origin = target.name_or_path if source.kind is SourceKind.IN_TARGET else source.origin
    trained = {**manifest.trained, "drafter": drafter_conditions(new)} if manifest.trained else {}
    manifest = replace(manifest, origin=origin, metrics={}, trained=trained)
    return save_drafter(new, folder, manifest, _card(source, manifest, new))


def _card(source: DrafterSource, manifest: Manifest, drafter: Drafter) -> str:
    """A trimmed drafter's model card, with what its base was trained with."""
    known = drafter.draft_vocabulary
    assert known is not None  # it is trimmed
    base = f"the drafter `{manifest.origin}`"
    if source.kind is SourceKind.IN_TARGET:
        base = f"the module in the files of `{manifest.origin}`"
    body = _BODY.format(base=base, size=len(known), whole=drafter.config.vocab_size)
    title = f"{with_article(manifest.family).capitalize()} drafter for `{manifest.target}`"
    try:
        license = license_of(source, drafter.target)
        return model_card(manifest, title, body + training_table(manifest), "", license=license)
    except MALFORMED as error:
        raise unreadable(source.folder / MANIFEST, f"`trained` is malformed: {error}") from error
