"""Words tokenised apart: the ids of the whole text, for every known pattern and no other."""

import itertools
import random
import re
import sys
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from headstart.train.data import words
from headstart.train.data.words import Words, are_apart
from tests.support.chats import CHATML, chat_tokenizer

PIECES = [
    "the", "The", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u2028", "\x1c", "\x85", "\u3000",
    "\u200b", "'s", "'", "we're", "I'M", "12", "3456", "٣", "²", ",", "...", "?!/", "(", "naïve",
    "e\u0301", "\u0301", "日本語", "и", "ǅ", "ʰ", "\u0e31", "🙂", "x_1", "<|end|>", "\ud7ff",
]  # fmt: skip


def texts(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(PIECES, k=draw.randint(0, 30))) for _ in range(count)]


def trained(*steps: Any, normalizer: Any = None, **how: Any) -> Tokenizer:
    """A tokenizer of bytes that learnt merges from such texts, white space among them."""
    made = Tokenizer(models.BPE(**how))
    made.normalizer, made.pre_tokenizer = normalizer, pre_tokenizers.Sequence(list(steps))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(texts(0, 400), trainer)
    made.add_tokens([AddedToken("<|end|>", special=True)])
    return made


def split(pattern: str) -> list[Any]:
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [pre_tokenizers.Split(Regex(pattern), "isolated"), plain]


def bytes_of() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def in_words(made: Tokenizer) -> Words:
    return Words(
        lambda some: [
            np.array(each.ids, np.int32).tobytes()
            for each in made.encode_batch_fast(some, add_special_tokens=False)
        ]
    )


def ids_of(apart: Words, given: list[str]) -> list[list[int]]:
    return [np.frombuffer(row, np.int32).tolist() for row in apart(given)]


def both(made: Tokenizer, given: list[str]) -> tuple[list[list[int]], list[list[int]]]:
    """The ids of texts in words, and as a whole."""
    whole = [made.encode(text, add_special_tokens=False).ids for text in given]
    return ids_of(in_words(made), given), whole


KNOWN: dict[str, list[Any]] = {
    **{f"pattern {n}": split(pattern) for n, pattern in enumerate(sorted(words._PATTERNS))},
    "bytes": [bytes_of()],
    "digits": [pre_tokenizers.Digits(individual_digits=True), bytes_of()],
}


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()], ids=["as it is", "NFC"])
@pytest.mark.parametrize("steps", KNOWN)
def test_ids_are_those_of_the_whole_text(steps: str, normalizer: Any) -> None:
    made = trained(*KNOWN[steps], normalizer=normalizer)
    assert are_apart(made)
    found, whole = both(made, texts(1, 400))
    assert found == whole
    assert any(len(text) > 2 for text in in_words(made)(["a b"]))


def test_the_patterns_are_those_of_well_known_models() -> None:
    from transformers.models.qwen2 import tokenization_qwen2

    assert tokenization_qwen2.PRETOKENIZE_REGEX in words._PATTERNS
    llama3 = tokenization_qwen2.PRETOKENIZE_REGEX.replace(r"\p{N}|", r"\p{N}{1,3}|")
    assert llama3 in words._PATTERNS
    assert any(r"[\p{L}\p{M}]+" in pattern for pattern in words._PATTERNS)
    assert len(words._PATTERNS) == 8
    assert are_apart(chat_tokenizer(CHATML, gpt2=True).backend_tokenizer)  # type: ignore[attr-defined]


REFUSED: dict[str, Any] = {
    "no words at all": lambda: trained(pre_tokenizers.ByteLevel(False, use_regex=False)),
    "another pattern": lambda: trained(*split(r"\w+ ?|\W")),
    "spaces taken from the text": lambda: trained(bytes_of(), normalizer=normalizers.Strip()),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_others_are_not_cut(kind: str) -> None:
    made = REFUSED[kind]()
    assert not are_apart(made)
    found, whole = both(made, texts(1, 400))
    assert found != whole, "cut all the same, the ids would be others"


@pytest.mark.parametrize("token", [AddedToken("<x>", rstrip=True), AddedToken("the The")])
def test_tokens_that_take_spaces_are_not_cut_from_them(token: AddedToken) -> None:
    made = trained(bytes_of())
    assert are_apart(made)
    made.add_tokens([token])
    assert not are_apart(made)
    found, whole = both(made, ["the The", "a <x> b"])
    assert found != whole


def test_random_merges_are_not_kept() -> None:
    assert not are_apart(trained(bytes_of(), dropout=0.5))


def test_words_end_before_spaces_alone() -> None:
    """Whatever white space is to a tokenizer is white space here, so nothing is cut after it."""
    unicode = [0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000]
    space = {*range(9, 14), 32, 0x85, 0xA0, *unicode}
    here = {code for code in range(sys.maxunicode + 1) if re.match(r"\s", chr(code))}
    assert space <= here
    cut = words._WORD.findall("It is  so.\nIt is \n x  ")
    assert cut == ["It", " is", "  so.\nIt", " is", " \n x", "  "]
    quick = 0
    for text in texts(2, 300):
        found = words._WORD.findall(text)
        assert words._words(text) == (found or [""])
        quick += not words._UNCUT.search(text)
        assert "".join(found) == text
        assert all(
            not before[-1].isspace() and after[0] == " "
            for before, after in itertools.pairwise(found)
        )
    assert words._words("a\0 b") == ["a\0", " b"] and 0 < quick < 300


def test_each_word_is_tokenised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def encode(some: list[str]) -> list[bytes]:
        asked.append(sorted(some))
        return [np.array([len(word)][: len(word)], np.int32).tobytes() for word in some]

    apart = Words(encode)
    assert ids_of(apart, ["a bc a bc", "", "a"]) == [[1, 3, 2, 3], [], [1]]
    assert ids_of(apart, ["a bc d"]) == [[1, 3, 2]]
    assert asked == [["", " a", " bc", "a"], [" d"]]
    monkeypatch.setattr(words, "_KEPT", 400)
    apart = Words(encode)
    for _ in range(2):  # forgotten, once they are too many
        assert ids_of(apart, ["a bc d"]) == [[1, 3, 2]]
    assert asked[2] == asked[3] == [" bc", " d", "a"]
