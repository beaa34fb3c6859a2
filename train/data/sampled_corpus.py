"""Text from the target alone: what it writes after its start token, sampled at temperature 1."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from headstart.heads.core import row_seeds
from headstart.infer import Speculator

from .documents import CorpusError, Document

_BATCH = 64


def sample_documents(name: str, tokens: int, seed: int) -> Iterator[Document]:
    """Different texts of `tokens` tokens each, without end, or until the model repeats itself.

    Text i is sampled with a seed of its own, made of (seed, i), and cut at an end-of-text or a
    second start token; the start token itself is left out, since tokenizers put it back. Of texts
    that agree in their first three quarters one is kept, so that held-out prefixes of that length
    are not those that were trained on.

    Args:
        name: a folder or Hub name of a model whose tokenizer has a start token.

    Raises:
        CorpusError: it has none.
    """
    tokenizer = AutoTokenizer.from_pretrained(name)
    start = tokenizer.bos_token_id
    if start is None:
        raise CorpusError(
            f"corpus.source is target, but the tokenizer of {name} has no start token to write "
            "from; give a text file instead"
        )
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
    speculator = Speculator(model)
    ends = {start, tokenizer.eos_token_id}
    seen: set[str] = set()
    number, fresh = 0, True
    while fresh:
        numbers = range(number, number + _BATCH)
        number += _BATCH
        fresh = False
        prompt = torch.full((_BATCH, 1), start, device=model.device)
        text = speculator.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            seed=row_seeds(seed, numbers.stop).tolist()[numbers.start :],
        )
        for row, ids in zip(numbers, text[:, 1:].tolist(), strict=True):
            end = next((at for at, token in enumerate(ids) if token in ends), tokens)
            begun, words = tokenizer.batch_decode(
                [ids[: min(end, tokens * 3 // 4)], ids[:end]], skip_special_tokens=True
            )
            if words.strip() and begun not in seen:
                seen.add(begun)
                fresh = True
                yield Document(f"target:{row}", words)
