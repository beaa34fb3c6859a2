"""Who writes the text that drafters are trained on: the target, a server, or nobody."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...recipe import Chat, Distill
from ..documents import Document
from ..prefixes import DistillError, chat_renderer, make_prefixes
from ..training_rows import check_context, context_of
from .counting import LOOKED_AT, look
from .drafting import Drafting
from .given import GivenWriter
from .openai import ServerWriter
from .own import PrefixWriter, ReplayWriter
from .replay import order_of_asked
from .units import Writer

logger = logging.getLogger(__name__)


def make_writer(
    spec: Distill,
    target: PreTrainedModel | Callable[[], PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    folder: Path,
    seed: int = 0,
    chat: Chat | None = None,
    name: str = "",
) -> Writer:
    """The writer that a recipe names; arguments and errors as for `distill`."""
    renderer = chat_renderer(tokenizer, chat, spec.chat)
    if not documents:
        raise DistillError("there is no training document; give corpus.source more text.")
    length = spec.row_tokens
    if spec.writer == "given":
        length = spec.max_length or context_of(_loaded(target).config)
    if spec.writer != "own" or spec.prefix == "prompt":
        first = [documents[at] for at in range(min(len(documents), LOOKED_AT))]
        for line in look(spec, tokenizer, first, chat, length).left_out(spec):
            logger.info("distill: of the first %d texts, %s", len(first), line)
    if spec.writer == "given":
        examples = _examples(spec, len(documents))
        return GivenWriter(renderer, documents, spec, length, examples, seed)
    if spec.writer == "openai":
        order = order_of_asked(documents, spec, seed)
        examples = _examples(spec, len(order[0]))
        return ServerWriter(renderer, documents, spec, examples, order, name, folder, seed)
    prefixes = None
    if spec.prefix != "prompt":
        prefixes = make_prefixes(spec, tokenizer, documents, chat)
    model = _loaded(target)
    check_context(spec, model)
    drafting = Drafting(spec, model, tokenizer, folder)
    if prefixes is None:
        order = order_of_asked(documents, spec, seed)
        examples = _examples(spec, len(order[0]))
        return ReplayWriter(drafting, renderer, documents, spec, examples, order, seed)
    return PrefixWriter(drafting, prefixes, spec, _examples(spec, len(prefixes)), seed)


def examples_of(spec: Distill, found: int) -> int:
    """How many units there are: `spec.examples`; at most `found` where repeats would be equal."""
    repeats = spec.writer != "given" and (_windows(spec) or spec.temperature > 0)
    return spec.examples if repeats else min(spec.examples, found)


def not_taken(spec: Distill, found: int) -> int:
    """How many of `found` documents `spec.examples` leaves out; 0 where windows are drawn."""
    return 0 if _windows(spec) else max(found - spec.examples, 0)


def taken(spec: Distill, found: int) -> str:
    """A line that says how many of `found` documents are taken; empty where all are."""
    if not not_taken(spec, found):
        return ""
    return f"{spec.examples:,} of {found:,} documents are taken (distill.examples)"


def _windows(spec: Distill) -> bool:
    return spec.writer == "own" and spec.prefix == "window"


def _examples(spec: Distill, found: int) -> int:
    examples = examples_of(spec, found)
    if examples < spec.examples:
        logger.warning(
            "distill: %d examples of %d documents, each of which is taken once",
            spec.examples, found,
        )  # fmt: skip
    return examples


def _loaded(target: PreTrainedModel | Callable[[], PreTrainedModel]) -> PreTrainedModel:
    return target if isinstance(target, PreTrainedModel) else target()
