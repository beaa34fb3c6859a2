"""Stop strings are in no answer, however the text is cut into pieces."""

import random

import pytest

from headstart.serving.stops import UntilStop, before_stop


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
    assert said == before_stop(text, [stop]) == text.partition(stop)[0]


def test_no_more_is_held_back_than_may_begin_a_stop_string() -> None:
    until = UntilStop(["abc", "bd"])
    assert [until.add(piece) for piece in ("xa", "b", "x", "b")] == ["x", "", "abx", ""]
    assert until.end() == "b" and until.end() == ""


def test_nothing_follows_a_stop_string() -> None:
    until = UntilStop(["\n", "END"])
    assert [until.add(piece) for piece in ("one\ntwo", "three")] == ["one", ""]
    assert until.end() == ""


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert UntilStop([]).add("all of it") == before_stop("all of it", []) == "all of it"
