"""The dialogue: lines of input, commands, and what is printed where."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from headstart.chat.dialogue import Dialogue, _oldest
from headstart.chat.lines import messages_of
from headstart.chat.session import Session
from headstart.cli import main
from headstart.heads import load_drafter
from headstart.infer import Speculator
from headstart.train.data.reading import read_documents
from tests.support.chats import CHATML, chat_tokenizer
from tests.support.talker import talker

END = "<|im_end|>"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("one\n\n  \ntwo\n", ["one", "two"]),
        ('"""\na\n\n b\n"""\nc', ["a\n\n b", "c"]),
        ('"""a\nb"""\n', ["a\nb"]),
        ('"""one line"""\nc\n', ["one line", "c"]),
        ("a \\\nb\\\nc\nd", ["a \nb\nc", "d"]),
        ('"""\nnever closed', ["never closed"]),
        ("ends in \\", ["ends in "]),
        ("", []),
    ],
)
def test_messages(typed: str, expected: list[str]) -> None:
    messages, found = messages_of(io.StringIO(typed)), []
    while (message := messages.next()) is not None:
        found.append(message)
    assert found == expected


def dialogue(typed: str, context: int = 512, drafter: bool = True) -> tuple[Session, str, str]:
    tokenizer = chat_tokenizer(CHATML, END)
    model = talker(tokenizer, END, 1.0, context)
    lookup = load_drafter("lookup", model, tokenizer) if drafter else None
    speculator = Speculator(model, lookup, tokenizer=tokenizer)
    session, out, errors = Session(speculator, None, 16), io.StringIO(), io.StringIO()
    Dialogue(session, messages_of(io.StringIO(typed)), out, errors).run()
    return session, out.getvalue(), errors.getvalue()


def test_a_chat_is_saved_under_a_name_by_which_it_is_read(tmp_path: Path) -> None:
    _, _, said = dialogue(f"who?\n/save {tmp_path / 'chat.json'}\n/save {tmp_path / 'chat'}\n")
    assert said.count("write /save FILE.jsonl") == 2
    assert "no answer to save" in dialogue(f"/save {tmp_path / 'chat.jsonl'}\n")[2]
    assert not [*tmp_path.iterdir()]


def test_a_turn_with_an_empty_answer_is_not_saved(tmp_path: Path) -> None:
    """No reader takes one."""
    session, *_ = dialogue("one\ntwo\nthree\n")
    for turn, answer in zip(session.turns, ("", " \n", "yes"), strict=True):
        turn.answer = answer
    file = tmp_path / "chat.jsonl"
    messages = messages_of(io.StringIO(f"/save {file}\n"))
    Dialogue(session, messages, io.StringIO(), io.StringIO()).run()
    (found,) = read_documents(file)
    assert [m["content"] for m in found.messages or []] == ["three"]  # the answer is to come


def test_commands(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    typed = f"who?\n/plain\n/again\n/fast\nwhy?\n/stats\n/save {file}\n/save {file}\n/nix\n/help\n"
    session, out, said = dialogue(typed)
    first, second = session.turns
    assert out.startswith(f"{first.answer}\n{first.answer}\n{second.answer}\nlast answer ")
    assert [turn.plain for turn in session.answered] == [False, True, False]
    assert json.loads(file.read_text()) == {"messages": session.messages()}
    rows = {row[:21].strip(): row[21:] for row in out.splitlines()}
    assert rows["with the drafter"].startswith("2 answers, ") and rows["plain"].startswith(
        "1 answer,"
    )
    assert rows["context"] == (f"{second.prompt + len(second.ids)} of 512 tokens")
    assert "/save FILE" in out and "is there already" in said and "no command /nix" in said
    assert "decoded without the drafter" in said and "2 turns written" in said
    assert "error: " in said and "Traceback" not in said


def test_what_needs_something_else_first_says_so() -> None:
    typed = "/again\n/stats\n/save\n/fast\n /stats is text\n/reset\n/again\n"
    session, out, said = dialogue(typed, drafter=False)
    assert said.count("error:") == 5 and "nothing drafts" in said and "(a new chat)" in said
    assert len(session.answered) == 1 and session.answered[0].message == "/stats is text"
    assert out.strip() == session.answered[0].answer.strip()


def test_turns_left_out_are_said() -> None:
    session, _, said = dialogue("who are you?\n" * 6, context=120)
    assert session.first > 0 and "left out: the context is full" in said
    assert "(the oldest turn is left out" in said and "1 turns" not in said
    assert _oldest(2) == "the oldest 2 turns are"


def test_one_turn_is_one(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    assert f"(1 turn written to {file})" in dialogue(f"who?\n/save {file}\n")[2]


def test_an_error_is_said_and_the_chat_goes_on() -> None:
    session, _, said = dialogue(f"{'long ' * 200}\nwho?\n", context=120)
    assert "error: the message and what belongs to it have" in said
    assert [turn.message for turn in session.turns] == ["who?"]


def test_ctrl_c_at_the_prompt_does_not_end_the_chat() -> None:
    class Typed:
        def __init__(self) -> None:
            self.lines: list[Any] = [KeyboardInterrupt(), "/reset", None]

        def next(self) -> Any:
            line = self.lines.pop(0)
            if isinstance(line, BaseException):
                raise line
            return line

    session = Session(Speculator(talker(chat_tokenizer(CHATML, END), END)))
    typed: Any = Typed()
    out, errors = io.StringIO(), io.StringIO()
    Dialogue(session, typed, out, errors).run()
    assert "Ctrl-D ends the chat" in errors.getvalue() and "(a new chat)" in errors.getvalue()


def test_the_command_reads_turns_from_stdin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.support.bytewise import save_target

    save_target(tmp_path / "target")
    monkeypatch.setattr("sys.stdin", io.StringIO("ababab\n/stats\n"))
    command = ["chat", "--target", str(tmp_path / "target"), "--drafter", "lookup", "--show"]
    assert main([*command, "--tree", "chain:3", "--max-new-tokens", "9"]) == 0
    printed = capsys.readouterr()
    assert "last answer          9 tokens" in printed.out and "\x1b[" not in printed.out
    assert "no chat template" in printed.err and "tree chain:3" in printed.err
    assert main([*command, "--top-k", "3"]) == 2
