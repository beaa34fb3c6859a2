"""Tokenising: the ids that the tokenizer itself gives, in order, and little memory for them."""

import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from headstart.train.data import tokenising
from headstart.train.data.documents import Document
from headstart.train.data.tokenising import Encoder, Ragged, prompt_tokens, tokenise
from headstart.train.scratch_target import train_tokenizer
from tests.support.chats import CHATML, chat_tokenizer

TEXTS = [f"{word} of text {number}" * (number % 5) for number, word in enumerate("abcdefghij")]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One that adds a start token."""
    made = train_tokenizer([Document(str(i), text) for i, text in enumerate(TEXTS)], 270, 8)
    start: Any = made.eos_token_id
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", start)]
    )
    return made


@pytest.mark.parametrize("in_memory", [1 << 24, 100])
@pytest.mark.parametrize("together", [1 << 20, 30])
def test_ids_are_the_tokenizers_own(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, in_memory: int,
    together: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(tokenising, "_IN_MEMORY", in_memory)
    monkeypatch.setattr(tokenising, "_TOGETHER", together)
    texts = [(text, at % 3 == 0) for at, text in enumerate(TEXTS * 4)]
    expected = [
        tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        for text, special in texts
    ]
    tokenizer("x y z", padding="max_length", truncation=True, max_length=2)  # is not remembered
    found = tokenise(tokenizer, iter(texts))
    assert found.tolist() == expected and len(found) == len(expected)
    assert found[3].dtype == np.int32 and found.lengths.tolist() == [len(row) for row in expected]
    assert not len(tokenise(tokenizer, []))


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("fast", [True, False])
def test_tokens_behind_a_text_are_left_out(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, before: bool, fast: bool
) -> None:
    """What is written next would follow the end-of-text token."""
    first = "<|endoftext|> " if before else ""
    end: Any = tokenizer.eos_token_id
    appending = TemplateProcessing(
        single=f"{first}$A <|endoftext|>", special_tokens=[("<|endoftext|>", end)]
    )
    monkeypatch.setattr(tokenizer.backend_tokenizer, "post_processor", appending)
    encoder = Encoder(tokenizer)
    if not fast:
        encoder.backend = None
    for text in ("", *TEXTS):
        own = tokenizer(text)["input_ids"]
        assert own[-1] == end
        with_it, without = (ids.tolist() for ids in encoder([(text, True), (text, False)]))
        assert with_it == own[:-1] == [end] * before + without
        prompt = prompt_tokens(tokenizer, text, True)
        assert prompt.input_ids[0].tolist() == with_it
        assert prompt.attention_mask[0].tolist() == [1] * len(with_it)
        assert prompt_tokens(tokenizer, text, False).input_ids[0].tolist() == without


PIECES = [
    "<|im_start|>user\n", "<|im_end|>", "\n", "Hi the Tea", " ", "  a", "</s>", "<s>", "[INST] ",
    "<think>", "\n\n", "<|user|>", "<|im_st", "Té", "é\n", "</", "<end>", "<end>x",
]  # fmt: skip
WHOLE: dict[str, list[AddedToken]] = {
    "special ones": [],
    "one that begins as another": [AddedToken("<end>", special=True), AddedToken("<end>x")],
    "spaces before": [AddedToken("<end>", lstrip=True, normalized=False)],
    "spaces after": [AddedToken("<end>", rstrip=True, normalized=False)],
    "spaces after, and of spaces": [
        AddedToken("<end>", rstrip=True, normalized=False), AddedToken("\n\n", normalized=False),
    ],
    "a word of its own": [AddedToken("<end>", single_word=True, normalized=False)],
    "in normalized text": [AddedToken("<end>", normalized=True)],
}  # fmt: skip


@pytest.mark.parametrize("whole", WHOLE)
@pytest.mark.parametrize("kind", ["bytes", "gpt2", "pieces"])
def test_texts_in_parts_have_the_ids_of_whole_texts(kind: str, whole: str) -> None:
    draw = random.Random(f"{kind} {whole}")
    tokenizer: Any = chat_tokenizer(CHATML, pieces=kind == "pieces", gpt2=kind == "gpt2")
    for token in WHOLE[whole]:
        tokenizer.backend_tokenizer.add_tokens([token])
    texts = ["", *("".join(draw.choices(PIECES, k=draw.randint(1, 12))) for _ in range(300))]
    for text in texts[1:100]:  # others that begin with the one before them, as the turns of a chat
        places = sorted(draw.choices(range(len(text) + 1), k=3))
        texts += [text[:place] for place in places]
    expected = tokenizer(texts, add_special_tokens=False)["input_ids"]
    encoder = Encoder(tokenizer)
    assert [row.tolist() for row in encoder([(text, False) for text in texts])] == expected
    cut = encoder.whole is not None
    assert cut is (whole != "spaces after, and of spaces")
    if encoder.whole is not None:
        assert max(len(parts) for parts in encoder.whole.parts(texts)) > 5


def test_parts_that_are_equal_are_tokenised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, asked = Encoder(chat_tokenizer(CHATML)), []
    each = encoder._each
    monkeypatch.setattr(
        encoder, "_each", lambda texts, *how: asked.extend(texts) or each(texts, *how)
    )
    first = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    encoder([(first, False), (f"{first}Hello<|im_end|>", False)])
    assert asked == [
        "<|im_start|>user\nHi", "<|im_end|>\n", "<|im_start|>assistant\n",
        "<|im_start|>assistant\nHello", "<|im_end|>",
    ]  # fmt: skip


def test_another_tokenizer_is_called_as_it_is() -> None:
    class Letters:
        def __call__(self, texts: list[str], add_special_tokens: bool, verbose: bool) -> Any:
            first = [0] if add_special_tokens else []
            return {"input_ids": [[*first, *map(ord, text)] for text in texts]}

    letters: Any = Letters()
    assert tokenise(letters, [("ab", True), ("c", False)]).tolist() == [[0, 97, 98], [99]]


def test_an_error_while_texts_are_made_is_raised(tokenizer: PreTrainedTokenizerFast) -> None:
    def texts() -> Iterator[tuple[str, bool]]:
        yield "a", True
        raise KeyError("b")

    with pytest.raises(KeyError):
        tokenise(tokenizer, texts())


def test_rows_are_parts_of_one_array() -> None:
    rows = Ragged(np.arange(9, dtype=np.int32), np.array([0, 2, 2, 5]), np.array([2, 0, 3, 4]))
    assert rows.tolist() == [[0, 1], [], [2, 3, 4], [5, 6, 7, 8]]
    assert rows.first(3).tolist() == [[], [], [2, 3, 4], [5, 6, 7]]
    assert rows.select(rows.lengths > 2).tolist() == rows[2:].tolist() == [[2, 3, 4], [5, 6, 7, 8]]
    assert np.shares_memory(rows[3], rows.ids)


def test_many_ids_take_no_memory_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def many(*_: Any) -> Iterator[np.ndarray]:
        return (np.full(50_000, row, np.int32) for row in range(300))  # 60 MB

    monkeypatch.setattr(tokenising, "_encoded", many)
    found = []
    tracemalloc.start()
    try:
        for limit in (1 << 24, 1 << 30):
            monkeypatch.setattr(tokenising, "_IN_MEMORY", limit)
            before = tracemalloc.get_traced_memory()[0]
            rows = tokenise(None, [])  # type: ignore[arg-type]
            assert [int(row[7]) for row in rows] == list(range(300))
            found.append((tracemalloc.get_traced_memory()[0] - before) / 1e6)
            del rows
    finally:
        tracemalloc.stop()
    assert found[0] < 25 and found[1] > 50, found
