"""Pieces: whole characters, whose text together is that of all tokens, with the depths' rule."""

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from headstart.show.drafted_text import DraftedText
from headstart.train.figures.pieces import PieceReader

TEXT = "def f(x):\n\treturn 'Zürich 東京 👩‍👩‍👧 e\u0301'\n"


def bytewise() -> PreTrainedTokenizerFast:
    """Token i is the byte i; every character beyond ASCII spans several."""
    names = _byte_names()
    tokenizer = Tokenizer(models.BPE({names[i]: i for i in range(256)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _byte_names() -> list[str]:
    """The character that byte-level tokenizers write for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names, more = {}, 256
    for byte in range(256):
        names[byte] = chr(byte) if byte in printable else chr(more)
        more += byte not in printable
    return [names[byte] for byte in range(256)]


def sentences() -> PreTrainedTokenizerFast:
    """Words that carry the space before them, as SentencePiece writes them; and bytes."""
    words = ["▁a", "▁the", "▁", "b", "▁cat", "s", *(f"<0x{i:02X}>" for i in range(256))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def text_of(tokenizer: Any, ids: list[int]) -> list[str]:
    reader = PieceReader(tokenizer)
    found = [piece for token in ids for piece in reader.add([token], [0])]
    return [piece.text for piece in found + reader.end()]


def test_characters_are_whole() -> None:
    ids = list(TEXT.encode())
    pieces = text_of(bytewise(), ids)
    assert "".join(pieces) == TEXT
    assert [piece for piece in pieces if len(piece) > 1] == []  # one character each, none halved


def test_joined_they_are_the_text_of_all_tokens() -> None:
    """Also where bytes are no character."""
    tokenizer, draw, valid = bytewise(), random.Random(1), list(TEXT.encode())
    for _ in range(200):
        ids = [draw.randrange(256) for _ in range(draw.randrange(1, 30))]
        if draw.random() < 0.5:
            at = draw.randrange(len(valid))
            ids[len(ids) // 2 :] = valid[at : at + 9]
        assert "".join(text_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_spaces_that_belong_to_words_and_bytes_among_words() -> None:
    tokenizer, draw = sentences(), random.Random(2)
    words = [[i] for i in range(6)] + [[6 + byte for byte in c.encode()] for c in "é東👧z"]
    for _ in range(200):
        ids = [token for _ in range(draw.randrange(1, 12)) for token in draw.choice(words)]
        assert "".join(text_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_text_that_is_continued_keeps_the_space_before_it() -> None:
    """SentencePiece's decoders take it for that of the first word."""
    tokenizer, draw = sentences(), random.Random(3)
    for _ in range(100):
        ids = [draw.randrange(6) for _ in range(20)]
        at = draw.randrange(1, 19)
        reader = PieceReader(tokenizer, ids[:at])
        pieces = [*reader.add(ids[at:], [0] * (20 - at)), *reader.end()]
        new = "".join(piece.text for piece in pieces)
        assert f"{tokenizer.decode(ids[:at])}{new}" == tokenizer.decode(ids)
    for before, expected in (([0], " cat"), ([], "cat")):
        (piece,) = PieceReader(tokenizer, before).add([4], [0])
        assert piece.text == expected


def test_half_a_character_before_a_text_is_passed_over() -> None:
    first, *rest = "é".encode()
    reader = PieceReader(bytewise(), [*b"a", first])
    pieces = [*reader.add([*rest, *b"b"], [0, 0]), *reader.end()]
    assert "".join(piece.text for piece in pieces) == bytewise().decode([*rest, *b"b"])


def test_special_tokens_have_no_text_unless_they_are_asked_for() -> None:
    tokenizer = bytewise()
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    end: Any = tokenizer.eos_token_id
    assert text_of(tokenizer, [*b"a", end, *b"b", end]) == ["a", "b"]
    found = PieceReader(tokenizer, special=True).add([*b"a", end, *b"b"], [0, 0, 0])
    assert [piece.text for piece in found] == ["a", "<end>", "b"]


@pytest.mark.parametrize(
    ("depths", "expected"), [([1, 2, 3], 3), ([2, 0, 1], 0), ([1, 1, 1], 1), ([0, 0, 0], 0)]
)
def test_a_character_of_several_tokens_is_drafted_where_all_of_them_are(
    depths: list[int], expected: int
) -> None:
    text = DraftedText.of(bytewise(), [*"a東b".encode()], [1, *depths, 0])
    assert [(p.text, p.depth, p.tokens) for p in text.pieces] == [
        ("a", 1, 1), ("東", expected, 3), ("b", 0, 1),
    ]  # fmt: skip
    assert text.tokens == 5 and text.drafted == 1 + 3 * (expected > 0)


def test_padding_is_left_out() -> None:
    assert str(DraftedText.of(bytewise(), [*b"ab", 0, 0], [1, 0, -1, -1])) == "ab"
    assert str(DraftedText.of(bytewise(), [], [])) == ""


def test_html_escapes_and_tints() -> None:
    text = DraftedText.of(bytewise(), [*b"<b>\x1b&"], [0, 1, 0, 2, 3])
    page = text._repr_html_()
    assert "<b>" not in page.replace("<b></b>", "") and "&lt;" in page and "&amp;" in page
    assert "\x1b" not in page and "\\x1b" in page
    assert page.count('title="drafted at depth 1"') == 2  # the token, and the legend
    assert "http" not in page and "<script" not in page
