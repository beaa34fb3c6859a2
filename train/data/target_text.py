"""A corpus without data: texts that a model writes from its start token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from headstart.heads.artifacts.hub import folder_or_repository
from headstart.heads.core import load_pretrained, row_seeds
from headstart.infer import Speculator

from ..recipe import Distill
from .documents import CorpusError, Document
from .training_rows import write_rows

_BATCH = 64  # texts that a model samples at once


def sample_documents(name: str, tokens: int, seed: int) -> Iterator[Document]:
    """Different texts of `tokens` tokens that a model writes, without end.

    It ends only where the model repeats itself. Text i is sampled at temperature 1 after the start
    token, which is left out, with a seed made of (seed, i), and cut at an end-of-text or a second
    start token. Of texts that agree in their first three quarters one is kept, so that held-out
    prefixes of that length are not those that were trained on.

    Args:
        name: a folder, or NAME or NAME@REVISION on the Hub.

    Raises:
        CorpusError: the tokenizer has no start token.
    """
    place, revision = folder_or_repository(name)
    how = {"revision": revision} if revision else {}
    tokenizer = load_pretrained(AutoTokenizer, place, **how)
    start = tokenizer.bos_token_id
    if start is None:
        raise CorpusError(
            f"corpus.source is target, but the tokenizer of {name} has no start token to write "
            "from; give a text file instead"
        )
    model: PreTrainedModel = load_pretrained(AutoModelForCausalLM, place, **how).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
    speculator = Speculator(model)
    spec = Distill(prefix_tokens=1, new_tokens=tokens, temperature=1.0)
    ends = {start, tokenizer.eos_token_id}
    seen: set[str] = set()
    for first in itertools.count(0, _BATCH):
        seeds = row_seeds(seed, first + _BATCH).tolist()[first:]
        text, *_ = write_rows(speculator, [torch.tensor([start])] * _BATCH, seeds, spec)
        known = len(seen)
        for row, ids in enumerate(text[:, 1:].tolist(), start=first):
            end = next((at for at, token in enumerate(ids) if token in ends), tokens)
            begun, words = tokenizer.batch_decode(
                [ids[: min(end, tokens * 3 // 4)], ids[:end]], skip_special_tokens=True
            )
            if words.strip() and begun not in seen:
                seen.add(begun)
                yield Document(f"target:{row}", words, source="target")
        if len(seen) == known:
            return
