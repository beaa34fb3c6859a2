"""Stop strings end an answer and are not in it, however the text is cut into pieces."""

import random

import pytest
import torch

from headstart.serving.stops import AtStop, UntilStop
from tests.support.chats import chat_tokenizer


def pieces_of(text: str, seed: int) -> list[str]:
    """A text in pieces of one to four characters."""
    draw, found = random.Random(seed), list[str]()
    while text:
        count = draw.randint(1, 4)
        found, text = [*found, text[:count]], text[count:]
    return found


@pytest.mark.parametrize("seed", range(50))
def test_the_text_before_a_stop_string_is_that_of_the_whole(seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choices("ab", k=20))
    stop = "".join(draw.choices("ab", k=draw.randint(1, 6)))
    until = UntilStop([stop])
    said = "".join(map(until.add, pieces_of(text, seed))) + until.end()
    assert said == text.partition(stop)[0]


def test_no_more_is_held_back_than_may_begin_a_stop_string() -> None:
    until = UntilStop(["abc", "bd"])
    assert [until.add(piece) for piece in ("xa", "b", "x", "b")] == ["x", "", "abx", ""]
    assert until.end() == "b" and until.end() == ""


def test_nothing_follows_a_stop_string() -> None:
    until = UntilStop(["\n", "END"])
    assert [until.add(piece) for piece in ("one\ntwo", "three")] == ["one", ""]
    assert until.end() == ""


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert UntilStop([]).add("all of it") == "all of it"


@pytest.mark.parametrize(
    ("prompt", "answer", "stop", "after"),
    [
        ("ab", "xyEND", "END", 5),
        ("ab\n", "\n x\n\n", "\n\n", 4),  # the two line ends of the answer are one token
        ("abE", "NDx", "END", None),
        ("ab", "x" * 50 + "é", "é", 52),  # two tokens
        ("ab", "xy<|end|>", "<|end|>", 3),  # one, which is no part of a text
        ("ab", "the end", "h", 2),  # `he` is one
        ("ab", "é", "\ufffd\ufffd", None),
    ],
)
def test_an_answer_ends_with_the_token_that_completes_a_stop_string(
    prompt: str, answer: str, stop: str, after: int | None
) -> None:
    tokenizer = chat_tokenizer(None)
    before, ids = (tokenizer(each, add_special_tokens=False).input_ids for each in (prompt, answer))
    ends = AtStop(tokenizer, ["nowhere", stop], len(before), before[-8:])
    text = torch.tensor([[*before, *ids]])
    met = [n for n in range(1, len(ids) + 1) if ends(text[:, : len(before) + n], None)]
    assert met[:1] == ([] if after is None else [after])


def test_a_stop_string_may_begin_with_the_space_before_an_answer() -> None:
    tokenizer = chat_tokenizer(None, pieces=True)  # whose decoder leaves it out of a text alone
    before, ids = (tokenizer(each, add_special_tokens=False).input_ids for each in ("ab", "so"))
    ends = AtStop(tokenizer, [" s"], len(before), before)
    assert ends(torch.tensor([[*before, *ids]])[:, : len(before) + 2], None)
