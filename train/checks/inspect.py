"""`headstart check`: a recipe tried on its real target, before any stage runs.

A few texts are written, a few steps are trained and one text is learnt by heart.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from headstart.heads import family
from headstart.heads.core import load_pretrained
from headstart.infer.measure.own_text import write_texts

from ..data.corpus import build_corpus, cut_short, load_documents
from ..data.documents import Document
from ..data.held_out import available_prompts, prompt_settings
from ..data.prefixes import encode
from ..data.writers import examples_of, make_writer, taken
from ..data.writers.counting import LOOKED_AT, per_document
from ..drafter_stage import make_drafter
from ..fit.arguments import load_options
from ..fit.epochs import packs_rows
from ..fit.joint import training_module
from ..processes.memory import TRAINING, enough_memory, peak_memory
from ..recipe import Recipe
from ..scratch_target import build_model, train_tokenizer
from ..sizes import packed_tokens
from .alignment import features_fit, labels_fit
from .early import corpus_bytes
from .findings import Finding
from .masks import ShownRow, masks_fit, template_fits, tokenizer_fits
from .needs import Needs, check_needs, needs_of
from .overfit import Sample, learns_by_heart
from .pace import Measured, Pace, measure_steps, measure_writing, pace_of
from .plan import Plan, plan_run

_READ = 4_000_000  # bytes of a corpus that are read
_ROWS = 4  # rows that are made and shown
_WRITTEN = 64  # tokens that the target writes at most in each text


Told = Callable[[str], object]


@dataclass
class Inspection:
    """What was found; `fine` where nothing speaks against the run."""

    plan: Plan
    needs: Needs
    findings: list[Finding] = field(default_factory=list)
    rows: list[ShownRow] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)  # documents, and held-out prompts
    tokenizer: Any = None
    pace: Pace | None = None

    @property
    def fine(self) -> bool:
        return all(finding.fine is not False for finding in self.findings)


def inspect_run(recipe: Recipe, told: Told = lambda said: None) -> Inspection:
    """Check all of a recipe that can be told from a few texts.

    Args:
        told: called with what is done next, before it begins.

    Raises:
        ValueError: one of its kinds, in one line, for what makes the run impossible; what it would
            do badly is among the findings.
    """
    plan = plan_run(recipe)
    found = Inspection(plan, needs_of(recipe, plan))
    check_needs(recipe, found.needs)
    told("reading the corpus")
    with tempfile.TemporaryDirectory(prefix="headstart-") as folder:
        part = min(recipe.corpus.max_bytes, _READ)
        spec = replace(recipe.corpus, max_bytes=part)
        read = build_corpus(spec, Path(folder), recipe.seed, first_rows=True)
        # Read while the folder is there.
        documents = {
            "train": list(load_documents(Path(folder), "train")),
            "held_out": list(load_documents(Path(folder), "held_out")),
        }
    told("loading the target")
    target, tokenizer = _load(recipe, plan, documents["train"])
    found.tokenizer = tokenizer
    found.findings.append(_prompts(recipe, tokenizer, documents, found.counts, plan.context))
    found.findings += _noted("corpus", _corpus_ends(recipe, part, read))
    ids = _ids(recipe, tokenizer, documents["train"])
    some = sorted(ids, key=len, reverse=True)[:8]
    texts = [torch.tensor(row[: recipe.distill.row_tokens], dtype=torch.int64) for row in some]
    trained_here = recipe.target.scratch is not None
    found.findings.append(
        Finding("tokenizer", None, "the target is trained here")
        if trained_here
        else tokenizer_fits(tokenizer, target, texts)
    )
    if not plan.drafter.learns():
        return found
    said = taken(recipe.distill, found.counts["training documents"])
    found.findings += _noted("examples", said)
    told("making a few rows")
    found.rows = training_rows(recipe, target, tokenizer, documents["train"])
    found.findings += [
        masks_fit(tokenizer, found.rows),
        template_fits(tokenizer, target, found.rows),
    ]
    length = recipe.distill.row_tokens
    if recipe.distill.writer == "given":  # as long as the corpus' own texts
        length = min(len(some[0]), recipe.distill.max_length or plan.context or len(some[0]))
    first = [documents["train"][i] for i in range(min(len(documents["train"]), LOOKED_AT))]
    each = per_document(recipe.distill, tokenizer, first, recipe.chat, plan.context)
    _try_training(recipe, target, texts, length, each, found, told)
    return found


def _load(recipe: Recipe, plan: Plan, documents: Sequence[Document]) -> tuple[Any, Any]:
    """The real target; of one that is trained by the run, one of its shape with random weights."""
    if recipe.target.scratch is not None:
        spec = recipe.target.scratch
        tokenizer = train_tokenizer(list(documents), spec.vocab_size, spec.context)
        return build_model(spec, tokenizer, recipe.seed).eval(), tokenizer
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    how = load_options(recipe.target, device)
    model = load_pretrained(AutoModelForCausalLM, recipe.target.model, **how)
    if "device_map" not in how:
        model.to(device)
    return model.eval(), plan.tokenizer or load_pretrained(AutoTokenizer, recipe.target.model)


def _prompts(
    recipe: Recipe, tokenizer: Any, documents: dict[str, Any], counts: dict[str, int],
    context: int | None,
) -> Finding:  # fmt: skip
    """Held-out prompts against those that are asked for; of a part of the corpus, by its share."""
    read = sum(document.size for split in documents.values() for document in split)
    there = min(recipe.corpus.max_bytes, corpus_bytes(recipe) or recipe.corpus.max_bytes)
    whole = read < 0.95 * _READ or there <= _READ
    given, remedy = available_prompts(recipe, tokenizer, documents["held_out"], context)
    wanted = {"validation": recipe.decode.validation_prompts, "bench": recipe.decode.prompts}
    grows = 1.0 if whole else there / read
    for split, name in (("train", "training"), ("held_out", "held-out")):
        counts[f"{name} documents"] = round(len(documents[split]) * grows)
    said = []
    for part, count in given.items():
        about = "" if whole else "about "
        counts[f"{part} prompts"] = round(count * grows)
        said.append(f"{about}{round(count * grows)} for {part}, {wanted[part]} wanted")
    fine = all(count * grows >= wanted[part] for part, count in given.items())
    return Finding("held-out prompts", fine, "; ".join([*said, *([] if fine else [remedy])]))


def _corpus_ends(recipe: Recipe, part: int, counts: dict[str, Any]) -> str:
    """Says that `corpus.max_bytes` leaves documents out, or may do so; empty otherwise.

    Args:
        part: bytes of text that were read at most.
        counts: what `build_corpus` counted in them.
    """
    bound, size = recipe.corpus.max_bytes, corpus_bytes(recipe)
    if part == bound:
        return cut_short(recipe.corpus, counts)
    # What was read ends earlier, and a document's text is shorter than its row.
    if size is None or size <= bound:
        return ""
    return f"corpus.max_bytes {bound:,} may end the corpus, of {size:,} bytes"


def _noted(name: str, said: str) -> list[Finding]:
    return [Finding(name, None, said)] if said else []


def _ids(recipe: Recipe, tokenizer: Any, documents: Sequence[Document]) -> list[Any]:
    """The token ids of some whole documents."""
    some = [documents[i] for i in range(min(len(documents), 64))]
    rows = encode(tokenizer, some, recipe.distill.chat, recipe.chat)
    return [
        row if document.text or not document.ids else [*document.ids[0], *document.ids[1]]
        for document, row in zip(some, rows, strict=True)
    ]


def training_rows(
    recipe: Recipe, target: Any, tokenizer: Any, documents: Sequence[Document]
) -> list[ShownRow]:
    """Some rows as the run would make them, with shorter answers."""
    spec = recipe.distill
    short = min(spec.new_tokens, _WRITTEN)
    writer = "given" if spec.writer == "given" else "own"  # no server is asked
    prefix = spec.prefix if spec.writer == "own" else "prompt"
    examples = min(_ROWS, len(documents))
    spec = replace(
        spec, writer=writer, prefix=prefix, new_tokens=short, examples=examples, drafter=None
    )
    with tempfile.TemporaryDirectory(prefix="headstart-") as folder:
        some = [documents[i] for i in range(min(len(documents), 16 * _ROWS))]
        made = make_writer(spec, target, tokenizer, some, Path(folder), recipe.seed, recipe.chat)
        units = range(min(_ROWS, made.units))
        rows = [row for unit in made.write(units, lambda *_: None) for row in unit.rows]
    by_id = {document.id: document for document in documents}
    return [
        ShownRow(row.tokens.tolist(), row.supervised.tolist(), by_id.get(row.id)) for row in rows
    ]


def _try_training(
    recipe: Recipe, target: Any, texts: list[Tensor], length: int, each: tuple[float, float],
    found: Inspection, told: Told,
) -> None:  # fmt: skip
    """Alignment, the pace of a few steps on rows of `length` tokens, and a text learnt by heart.

    Of a drafter that is not trained, the pace of writing alone.

    Args:
        each: rows and answers of a document.
    """
    documents = found.counts["training documents"]
    sample: Any = Sample(torch.cat(texts)) if family(recipe.drafter.family).trainable else None
    drafter: Any = make_drafter(recipe, target, sample)
    short = min(prompt_settings(recipe)["tokens"] or 32, 32)
    prompts = [text[: max(min(short, len(text) // 2), 1)] for text in texts]
    told("the target writes a few texts")
    written = write_texts(target, drafter, prompts, min(recipe.distill.new_tokens, _WRITTEN))
    wrote = measure_writing(target, prompts, recipe.distill, documents)
    if not drafter.trainable:
        step = Measured(0.0, peak_memory())
        found.pace = pace_of(recipe, wrote, step, documents, each)
        return
    longest = max(written, key=lambda text: len(text.tokens) - text.prompt)
    drafter = make_drafter(recipe, target, Sample(longest.tokens))  # type: ignore[arg-type]
    told("training a few steps")
    train = recipe.train
    module = training_module(train, target, drafter)
    found.findings += [labels_fit(module, written), features_fit(module, written)]
    module.set_up(train.activation_checkpointing, False)
    room = packed_tokens(train, length) if packs_rows(module, train) else None
    tokens = examples_of(recipe.distill, documents) * each[0] * length
    kept = module.megabytes(tokens) <= train.feature_cache_mb
    with enough_memory(TRAINING):
        step = measure_steps(module, recipe, len(found.tokenizer), length, room, kept)
    packed = (room or length) / length
    found.pace = pace_of(recipe, wrote, step, documents, each, packed)
    module.release()
    if drafter.adapter is not None:
        drafter.adapter.detach()
    told("learning one text by heart")
    hard = type(module)(target, drafter, train.head_decay, "cross_entropy", 0.0)
    found.findings.append(learns_by_heart(hard, longest))
    hard.release()
    if drafter.adapter is not None:
        drafter.adapter.detach()
