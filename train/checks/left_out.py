"""What of a corpus a run leaves out, since its settings bound it."""

from __future__ import annotations

from typing import Any

from ..data.corpus import cut_short
from ..data.writers import taken
from ..recipe import Recipe
from .findings import Finding


def corpus_ends(
    recipe: Recipe, size: int | None, part: int, counts: dict[str, Any]
) -> list[Finding]:
    """A note where `corpus.max_bytes` leaves documents out, or may do so.

    Args:
        size: bytes of the corpus' files, where they are known.
        part: bytes of text that a sample has at most.
        counts: what `build_corpus` counted in that sample.
    """
    bound = recipe.corpus.max_bytes
    if part == bound:
        said = cut_short(recipe.corpus, counts)
    else:  # the sample ends earlier, and a document's text is shorter than its row
        more = size is not None and size > bound
        said = f"corpus.max_bytes {bound:,} may end the corpus, of {size:,} bytes" if more else ""
    return [Finding("corpus", None, said)] if said else []


def examples_taken(recipe: Recipe, documents: int) -> list[Finding]:
    """A note where fewer than all training documents are taken."""
    said = taken(recipe.distill, documents)
    return [Finding("examples", None, said)] if said else []
