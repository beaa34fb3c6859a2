"""Held-out prompts."""

import pytest
import torch
from torch import Tensor

from headstart.train.data.documents import Document
from headstart.train.data.prefixes import HeldOutError, held_out_prompts
from headstart.train.scratch_target import train_tokenizer

DOCUMENTS = [
    Document(str(n), " ".join(f"word{n} {n * k}" for k in range(12 * (n + 1)))) for n in range(6)
]


def test_prompts_are_disjoint_windows_of_different_documents() -> None:
    tokenizer = train_tokenizer(DOCUMENTS, 270, 128)
    bench = held_out_prompts(tokenizer, DOCUMENTS, 8, 10, seed=1)
    validation = held_out_prompts(tokenizer, DOCUMENTS, 4, 10, seed=1, part="validation")
    texts = {document.id: tokenizer(document.text)["input_ids"] for document in DOCUMENTS}

    def source(prompt: Tensor) -> set[str]:
        ids = prompt.tolist()
        return {
            name for name, t in texts.items() if any(t[i : i + 10] == ids for i in range(len(t)))
        }

    assert all(prompt.shape == (10,) for prompt in bench + validation)
    first, second = (set().union(*map(source, prompts)) for prompts in (bench, validation))
    assert len(first) == 4 and len(second) == 2 and not first & second
    assert len({tuple(prompt.tolist()) for prompt in bench}) == 8
    again = held_out_prompts(tokenizer, DOCUMENTS[::-1], 8, 10, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(bench, again, strict=True))
    other = held_out_prompts(tokenizer, DOCUMENTS, 8, 10, seed=2)
    assert not all(torch.equal(a, b) for a, b in zip(bench, other, strict=True))
    with pytest.raises(HeldOutError, match=r"expected 10000; raise corpus\.held_out"):
        held_out_prompts(tokenizer, DOCUMENTS, 10_000, 10)
