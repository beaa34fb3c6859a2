"""The checks that every run begins with: nothing is spent on what cannot work."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..data.corpus import build_corpus, load_documents
from ..data.documents import Document
from ..data.prefixes import Part, make_prefixes, recipe_prompts
from ..recipe import Recipe
from .needs import Needs, check_needs, needs_of
from .plan import CheckError, Plan, plan_run

_SMALL = 8_000_000  # bytes of a corpus that is read before the first stage
_SAMPLE = 1000  # training documents whose prompts are counted


def check_run(recipe: Recipe, processes: int = 1, parts: Sequence[Part] = ("validation",)) -> Plan:
    """All that can be told of a run before its first stage; what it needs goes to stderr.

    A corpus of few bytes is read at once; of a larger one, prompts are counted after its stage.

    Args:
        parts: the held-out prompts that the run will decode.

    Raises:
        ValueError: one of its kinds, in one line.
    """
    plan = plan_run(recipe)
    needs: Needs = needs_of(recipe, plan)
    check_needs(recipe, needs, processes)
    size = corpus_bytes(recipe)
    if size is not None and size <= _SMALL and plan.tokenizer is not None:
        with tempfile.TemporaryDirectory(prefix="headstart-") as folder:
            build_corpus(recipe.corpus, Path(folder), recipe.seed)
            check_prompts(recipe, plan.tokenizer, Path(folder), parts, plan.drafter.trainable)
    print(f"{recipe.name}: {needs.text}", file=sys.stderr)
    return plan


def corpus_bytes(recipe: Recipe) -> int | None:
    """Bytes of the corpus' files; None where they are not known before they are read.

    Raises:
        CheckError: there is no such file or folder.
    """
    source = recipe.corpus.source
    if (
        source in ("stdlib", "target")
        or source.startswith("hub:")
        or any(c in source for c in "*?[")
    ):
        return None
    path = Path(source).expanduser()
    if not path.exists():
        raise CheckError(f"corpus.source {source}: no such file or folder; check the path")
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def check_prompts(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    corpus: Path,
    parts: Sequence[Part],
    trainable: bool = True,
) -> None:
    """Count the prompts of a corpus' folder; what is left out goes to stderr.

    Raises:
        HeldOutError: too few held-out prompts.
        DistillError: no training document gives a prompt.
    """
    held_out = load_documents(corpus, "held_out")
    for part in parts:
        recipe_prompts(recipe, tokenizer, held_out, part)
    if not trainable:
        return
    documents = load_documents(corpus, "train")
    sample = [documents[i] for i in range(min(len(documents), _SAMPLE))]
    _check_answers(recipe, sample)
    prefixes = make_prefixes(recipe.distill, tokenizer, sample)
    if skipped := prefixes.skipped:
        spec = recipe.distill
        kind = "prompts are empty or longer" if spec.prefix == "prompt" else "documents are shorter"
        print(
            f"{recipe.name}: of {len(sample)} training documents, {skipped} {kind} than "
            f"distill.prefix_tokens {spec.prefix_tokens}, and are left out",
            file=sys.stderr,
        )


def _check_answers(recipe: Recipe, documents: Sequence[Document]) -> None:
    """Raise CheckError where chats hold no turn of an assistant, and prompts are asked for."""
    chats = [document.messages for document in documents if document.messages]
    turns = [m["role"] for messages in chats for m in messages]
    if recipe.distill.prefix == "prompt" and chats and not {"user", "assistant"} & set(turns):
        raise CheckError(
            f"corpus.source {recipe.corpus.source}: its {len(chats)} chats have no turn of a user "
            "or an assistant; expected chats that a model answers"
        )
