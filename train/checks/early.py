"""The checks that every run begins with: nothing is spent on what cannot work."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from headstart.heads.core import finish_of_sharded, load_pretrained

from ..data.corpus import build_corpus, load_documents
from ..data.earlier import earlier_rows
from ..data.held_out import Part, recipe_prompts
from ..data.hub import commit_of, hub_source
from ..data.prefixes import make_prefixes
from ..data.reading import source_bytes
from ..data.writers.counting import LOOKED_AT, look
from ..data.writers.drafting import drafter_source
from ..losses import loss_of
from ..recipe import Recipe
from .needs import Needs, check_needs, needs_of
from .plan import CheckError, Plan, plan_run

_SMALL = 8_000_000  # bytes of a corpus that is read before the first stage
_WHOLE = 64  # training documents that are tokenised to see that they are long enough
_SAME = 0.9  # share of the target's tokens that a student has to know by the same ids
_FEW = 0.05  # share of them that may be too short without a word


def check_run(
    recipe: Recipe,
    processes: int = 1,
    parts: Sequence[Part] = ("validation",),
    sharded: bool = False,
) -> Plan:
    """All that can be told of a run before its first stage; what it needs goes to stderr.

    A corpus of few bytes is read at once; of a larger one, prompts are counted after its stage.

    Args:
        parts: the held-out prompts that the run will decode.
        sharded: whether processes hold parts of the target from the start, as under ZeRO-3.

    Raises:
        ValueError: one of its kinds, in one line.
    """
    plan = plan_run(recipe, processes)
    teaches = loss_of(recipe.train.loss).divergence is not None or plan.drafter.adapter is not None
    if sharded and teaches:  # which needs the target's distribution
        finish_of_sharded(plan.target.config.get_text_config(decoder=True))
    needs: Needs = needs_of(recipe, plan)
    check_needs(recipe, needs, processes)
    if plan.drafter.learns():
        earlier_rows(recipe.distill, plan.tokenizer)
        if recipe.distill.writer == "own" and recipe.distill.drafter is not None:
            drafter_source(recipe.distill.drafter)
    if plan.tokenizer is not None and (student := recipe.drafter.options.get("model")) is not None:
        _check_tokens(student, plan.tokenizer)
    size = corpus_bytes(recipe)
    if size is not None and size <= _SMALL and plan.tokenizer is not None:
        with tempfile.TemporaryDirectory(prefix="headstart-") as folder:
            build_corpus(recipe.corpus, Path(folder), recipe.seed)
            learns = plan.drafter.learns()
            check_prompts(recipe, plan.tokenizer, Path(folder), parts, learns, plan.context)
            plan = replace(plan, counted=learns)
    print(f"{recipe.name}: {needs.text}", file=sys.stderr)
    return plan


def _check_tokens(student: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise CheckError for a student to which the ids that it is trained on are other tokens."""
    try:
        own = load_pretrained(AutoTokenizer, student).get_vocab()
    except (OSError, ValueError):  # there is none beside the weights
        return
    known = tokenizer.get_vocab()
    same = sum(own.get(token) == number for token, number in known.items())
    if same < _SAME * len(known):
        raise CheckError(
            f"drafter.model {student} has another tokenizer than the target, whose tokens it is "
            f"trained on ({same:,} of {len(known):,} have the same ids); choose a model of the "
            f"target's family, or decode with this one as it is (--drafter {student})"
        )


def corpus_bytes(recipe: Recipe) -> int | None:
    """Bytes of the corpus' files; None where they are not known before they are read.

    Raises:
        CorpusError: a source is missing, here or on the Hub.
    """
    for part in recipe.corpus.parts():
        if (hub := hub_source(part)) is not None:
            commit_of(hub)
    sizes = [source_bytes(part) for part in recipe.corpus.parts()]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def check_prompts(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    corpus: Path,
    parts: Sequence[Part],
    learns: bool = True,
    context: int | None = None,
) -> None:
    """Count the prompts of a corpus' folder; what is left out goes to stderr.

    Args:
        context: of the target, where it is known.

    Raises:
        HeldOutError: too few held-out prompts.
        DistillError: no training document gives a prompt.
    """
    held_out = load_documents(corpus, "held_out")
    for part in parts:
        recipe_prompts(recipe, tokenizer, held_out, part, context)
    if not learns:
        return
    spec, documents = recipe.distill, load_documents(corpus, "train")
    windows = spec.writer == "own" and spec.prefix != "prompt"
    looked_at = _WHOLE if windows else LOOKED_AT
    sample = [documents[i] for i in range(min(len(documents), looked_at))]
    if windows:
        prefixes = make_prefixes(spec, tokenizer, sample, recipe.chat)
        told = [f"{prefixes.skipped} are shorter than distill.prefix_tokens {spec.prefix_tokens}"]
        told = told if prefixes.skipped > len(sample) * _FEW else []
    else:
        told = look(spec, tokenizer, sample, recipe.chat, context).left_out(spec)
    for line in told:
        print(f"{recipe.name}: of the first {len(sample)} texts, {line}", file=sys.stderr)
