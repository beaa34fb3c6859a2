"""Chats: the same answers with a drafter and without, the context, and how an answer ends."""

import os
import signal
from typing import Any

import pytest
import torch

from headstart.chat.session import Session
from headstart.chat.streamer import ChatStreamer, Stopped, ctrl_c
from headstart.heads import load_drafter
from headstart.infer import Speculator
from headstart.terminal import UsageError
from headstart.train.data.documents import render_chat
from tests.support.chats import CHATML, chat_tokenizer
from tests.support.talker import talker

END = "<|im_end|>"
WORDS = ("who", "what", "why", "abc")
QUESTIONS = [f"{word} {n}?" * (1 + n % 3) for n in range(5) for word in WORDS]


def speculator_of(template: str | None = CHATML, context: int = 512, **how: Any) -> Speculator:
    tokenizer = chat_tokenizer(template, END)
    model = talker(tokenizer, END, how.pop("eagerness", 1.0), context)
    return Speculator(model, load_drafter("lookup", model, tokenizer), tokenizer=tokenizer, **how)


class Quiet:
    """A view that keeps what is shown."""

    def __init__(self) -> None:
        self.text, self.closed = "", 0

    def show(self, pieces: Any, figures: Any) -> None:
        self.text += "".join(piece.text for piece in pieces)

    def close(self, figures: Any) -> None:
        self.closed += 1


def shower(session: Session, view: Quiet, stop: Any = lambda: False) -> Any:
    return lambda end: ChatStreamer(session.tokenizer, stop, end, view=view)


def answers(session: Session) -> list[list[int]]:
    return [session.ask(question, shower(session, Quiet())).ids for question in QUESTIONS]


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.9, "seed": 3}])
def test_twenty_turns_are_those_of_plain_decoding(sampling: dict[str, Any]) -> None:
    """Token for token, also after the oldest turns were left out, and answered by `generate`."""
    fast = Session(speculator_of(tree="chain:4"), None, 24, sampling)
    plain = Session(speculator_of(tree="chain:4"), None, 24, sampling)
    plain.plain = True
    expected = answers(plain)
    assert answers(fast) == expected and len(expected) == 20
    assert fast.first == plain.first > 0  # the context did not hold all
    drafted = [turn.figures.drafted for turn in fast.turns]
    assert sum(drafted) > 20 and not any(turn.figures.drafted for turn in plain.turns)
    assert [turn.plain for turn in fast.turns + plain.turns] == [False] * 20 + [True] * 20
    if not sampling:  # the last answer, by transformers alone
        messages = fast.messages(fast.first)[:-1]
        model: Any = fast.speculator.model
        text = render_chat(fast.tokenizer, messages)
        tokenizer: Any = fast.tokenizer
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        out = model.generate(ids, max_new_tokens=24, do_sample=False)
        assert out[0, ids.shape[1] :].tolist() == expected[-1]


def test_plain_and_fast_answer_alike_within_one_chat() -> None:
    session = Session(speculator_of(tree="chain:4"), "be kind", 20)
    first = session.ask("who?", shower(session, Quiet()))
    session.plain = True
    assert session.again() == "who?" and not session.turns
    again = session.ask("who?", shower(session, Quiet()))
    assert again.ids == first.ids and again.plain and not first.plain
    assert [m["role"] for m in session.messages()] == ["system", "user", "assistant"]
    assert session.answered == [first, again]
    session.reset()
    assert session.again() is None and len(session.messages()) == 1


def test_the_oldest_turns_are_left_out_and_the_answer_has_room() -> None:
    session = Session(speculator_of(context=200), None, 30)
    firsts = []
    for question in QUESTIONS[:8]:
        turn = session.ask(question, shower(session, Quiet()))
        firsts.append(session.first)
        assert turn.prompt + 30 <= 200
    assert firsts == sorted(firsts) and firsts[0] == 0 < firsts[-1]
    assert len(session.turns) == 8  # all of them are kept for /save


def test_a_message_too_long_for_the_context_is_refused_and_forgotten() -> None:
    session = Session(speculator_of(context=100), None, 30)
    kept = session.ask("who?", shower(session, Quiet()))
    with pytest.raises(UsageError, match=r"have \d+ tokens.*made for 100.*shorten"):
        session.ask("why " * 40, shower(session, Quiet()))
    assert session.turns == [kept] and session.first == 0
    long = session.ask("w" * 70, shower(session, Quiet()))  # fits, with a shorter answer
    assert long.prompt + len(long.ids) <= 100


def test_without_a_template_an_answer_ends_where_the_user_s_turn_begins() -> None:
    session, view = Session(speculator_of(None), None, 12), Quiet()
    assert not session.templated
    text = [*"\nUse it.\nUser: more"]

    class Says(ChatStreamer):
        """Hears other text than the target's."""

        def put_round(self, emitted: Any) -> None:
            self._read_text(text)

        def _read_text(self, text: list[str]) -> None:
            from headstart.train.figures.pieces import Piece

            for letter in text:
                self.ids.append(ord(letter))
                self._show([Piece(letter, 1)])
            if self.ended:
                raise Stopped

    def show(end: str | None) -> Any:
        assert end == "\nUser:"
        return Says(session.tokenizer, lambda: False, end, view=view)

    turn = session.ask("who?", show)
    assert turn.answer == "Use it." and view.text == "\nUse it." and not turn.stopped
    assert turn.ids == [ord(c) for c in "\nUse it.\nUser:"]
    assert view.closed == 1


def test_what_only_looks_like_the_end_is_shown() -> None:
    from headstart.train.figures.pieces import Piece

    view = Quiet()
    streamer = ChatStreamer(chat_tokenizer(None), lambda: False, "\nUser:", view=view)
    for part in ("a\n", "\nUs", "e\nUser", "\n", "\nUsed\nU"):
        streamer._show([Piece(part, 1)])
    assert view.text == "a\n\nUse\nUser\n\nUsed" and not streamer.ended
    streamer.close()
    assert str(streamer.text) == view.text == "a\n\nUse\nUser\n\nUsed\nU"


def test_ctrl_c_stops_the_answer_and_a_later_one_is_whole() -> None:
    session = Session(speculator_of(tree="chain:2", eagerness=0.0), None, 60)
    view, pressed = Quiet(), []

    with ctrl_c() as stop:

        def asked() -> bool:
            pressed.append(1)
            if len(pressed) == 3:
                os.kill(os.getpid(), signal.SIGINT)
            return stop()

        turn = session.ask("who?", shower(session, view, asked))
    assert turn.stopped and 3 <= len(turn.ids) <= 9 and view.closed == 1
    assert session.turns == [turn]  # the model has read what was shown
    whole = session.ask("what?", shower(session, Quiet()))
    fresh = Session(speculator_of(tree="chain:2", eagerness=0.0), None, 60)
    fresh.turns = [turn]
    assert fresh.ask("what?", shower(fresh, Quiet())).ids == whole.ids and len(whole.ids) == 60
    with pytest.raises(KeyboardInterrupt), ctrl_c():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_device_is_not_asked_for_more_than_the_rounds() -> None:
    """An answer decodes under graphs' runner as well, which criteria would forbid."""
    session = Session(speculator_of(None, graphs=True, tree="chain:3"), None, 16)
    turn = session.ask("who?", shower(session, Quiet()))
    other = Session(speculator_of(None, tree="chain:3"), None, 16)
    assert other.ask("who?", shower(other, Quiet())).ids == turn.ids and torch.is_grad_enabled()


def test_answers_are_recorded_with_the_turns_before_them_but_not_stopped_ones() -> None:
    found: list[Any] = []

    class Kept:
        def add(self, prompt: Any, answer: Any, setting: Any, tau: Any, chat: Any) -> None:
            found.append((prompt, answer, setting("temperature"), tau, [*chat]))

    recorder: Any = Kept()
    sampling = {"do_sample": True, "temperature": 0.9, "seed": 3}
    session = Session(speculator_of(tree="chain:4"), "be brief", 24, sampling, recorder)
    first = session.ask("who?", shower(session, Quiet()))
    session.ask("what?", shower(session, Quiet(), stop=lambda: True))
    session.again()
    last = session.ask("why?", shower(session, Quiet()))
    assert [each[1] for each in found] == [first.ids, last.ids]
    assert [len(each[0]) for each in found] == [first.prompt, last.prompt]
    assert all(each[2] == 0.9 for each in found) and found[0][3] == first.figures.tau
    roles = [[message["role"] for message in each[4]] for each in found]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"]]
