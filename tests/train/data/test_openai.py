"""Rows that a server writes: every chat once, whatever the server and the kills do."""

import json
import logging
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headstart.train.data.distill import distill, summary
from headstart.train.data.documents import Document
from headstart.train.data.prefixes import DistillError
from headstart.train.data.rendering import ChatRenderer
from headstart.train.data.training_rows import Row, Rows
from headstart.train.data.writers import client
from headstart.train.data.writers.openai import ServerWriter
from headstart.train.data.writers.replay import order_of_asked
from headstart.train.data.writers.units import Counts
from headstart.train.recipe import Distill, OpenAI
from headstart.train.recipe.loading import parse_recipe
from tests.support.chat_server import FAULTS, KEY, Chats, answer_to, serving
from tests.support.chats import CHATML, TOOLS, chat_tokenizer
from tests.support.tiny import one_line


def chat(number: int) -> Document:
    messages = []
    for turn in range(1 + number % 3):
        messages += [
            {"role": "user", "content": f"secret question {number}.{turn}"},
            {"role": "assistant", "content": "an answer that is replaced"},
        ]
    return Document.chat(f"chats:{number}", messages)


CHATS = [chat(number) for number in range(30)]


def spec_for(server: Chats, **how: Any) -> Distill:
    settings: dict[str, Any] = {"concurrency": 4, "retries": 12, "timeout": 0.4} | how
    return Distill(
        writer="openai", openai=OpenAI(url=server.url, model="m", **settings), examples=30,
        prefix="prompt", prefix_tokens=200, new_tokens=60, max_length=500, shards=6,
    )  # fmt: skip


def no_target() -> Any:
    raise AssertionError("the target is not needed")


def written(spec: Distill, folder: Path, **how: Any) -> list[Row]:
    tokenizer = chat_tokenizer(CHATML)
    distill(spec, no_target, tokenizer, CHATS, folder, progress=False, **how)
    rows = Rows.load(folder)
    return [replace(rows.row(n), id=rows.id(n)) for n in range(len(rows))]


def check(rows: list[Row]) -> None:
    """Every chat is there once, with the server's answers as its history."""
    assert sorted(row.id for row in rows) == sorted(document.id for document in CHATS)
    tokenizer = chat_tokenizer(CHATML)
    for row in rows:
        document = next(each for each in CHATS if each.id == row.id)
        history: list[dict[str, str]] = []
        for message in document.messages or ():
            if message["role"] == "user":
                history.append(message)
                history.append({"role": "assistant", "content": answer_to(history)})
        (expected,) = ChatRenderer(tokenizer).rows(history)
        assert row.tokens.tolist() == expected.tokens.tolist()
        assert row.supervised.tolist() == expected.supervised.tolist()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_pause", lambda attempt: 0.01)


def test_a_server_that_fails_in_every_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("MY_KEY", KEY)
    with serving(every=3, stall=0.6) as server:
        rows = written(spec_for(server, api_key_env="MY_KEY", extra={"top_k": 5}), tmp_path)
        check(rows)
        assert set(server.faults) == set(FAULTS)
        assert set(server.answered.values()) == {1}  # none was asked for twice
        body = server.bodies[0]
        assert body["key"] == f"Bearer {KEY}" and body["model"] == "m" and body["top_k"] == 5
        assert body["max_tokens"] == 60 and body["temperature"] == 0.0 and "seed" not in body
    assert not list(tmp_path.glob("answers-*"))
    assert KEY not in caplog.text and "secret question" not in caplog.text
    assert all(KEY.encode() not in file.read_bytes() for file in tmp_path.iterdir())
    assert summary(spec_for(server), tmp_path)["kept"] == 30


def _process(spec: Distill, folder: Path, rank: int, world: int) -> None:
    written(spec, folder, rank=rank, world=world)
    os._exit(0)


def test_five_kills_and_other_numbers_of_processes(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    with serving(every=7, stall=0.5) as server:
        spec = spec_for(server)
        for kill, world in enumerate((2, 1, 3, 2, 1)):
            due = 9 * (kill + 1)
            children = [
                fork.Process(target=_process, args=(spec, tmp_path, rank, world))
                for rank in range(world)
            ]
            for child in children:
                child.start()
            limit = time.monotonic() + 60
            while server.answered.total() < due and any(child.is_alive() for child in children):
                assert time.monotonic() < limit
                time.sleep(0.005)
            for child in children:
                assert child.pid is not None
                os.kill(child.pid, signal.SIGKILL)
                child.join()
        before = server.answered.total()
        assert 45 <= before < 60  # of 60 answers in all: some work was left for the end
        assert len(list(tmp_path.glob("train-*.json"))) < 6
        check(written(spec, tmp_path, rank=0, world=1))
        # What was answered is in the journal: only answers on their way at a kill are asked again.
        again = server.answered.total() - 60
        assert 0 <= again <= 5 * 3 * 4
    assert not list(tmp_path.glob("answers-*"))


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "api_key_env"), (404, "it mostly ends in /v1"), (307, "redirects"),
        (400, "refused all"), (503, "after 3 tries"),
    ],
)  # fmt: skip
def test_errors_are_one_line_and_say_what_to_do(tmp_path: Path, status: int, said: str) -> None:
    with serving(status=status) as server, pytest.raises(DistillError) as error:
        written(spec_for(server, retries=2), tmp_path)
    message = one_line(error.value)
    assert said in message and "secret question" not in message


def test_nobody_answers(tmp_path: Path) -> None:
    with serving() as server:
        spec = spec_for(server)
    with pytest.raises(DistillError, match="start the server") as error:
        written(spec, tmp_path)
    one_line(error.value)


def test_settings_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    with serving() as server, pytest.raises(DistillError, match="MY_KEY, which is not set"):
        written(spec_for(server, api_key_env="MY_KEY"), tmp_path)
    recipe = {"name": "r", "target": {"model": "m"}, "drafter": {"family": "medusa"}}
    for url, said in (("ftp://x", "expected an address"), ("http://me:pw@x/v1", "secret")):
        with pytest.raises(ValueError, match=said) as error:
            parse_recipe(recipe | {"distill": {"writer": "openai", "openai": {"url": url}}})
        assert "pw" not in str(error.value)
    with pytest.raises(ValueError, match=r"distill\.openai: the writer is openai"):
        parse_recipe(recipe | {"distill": {"writer": "openai"}})
    with pytest.raises(ValueError, match=r"chat\.date: .* expected a date"):
        parse_recipe(recipe | {"chat": {"date": "yesterday"}})


def test_journals_survive_a_cut_line(tmp_path: Path) -> None:
    from headstart.train.data.writers.openai import Journal

    path = tmp_path / "answers.jsonl"
    journal = Journal(path)
    for turn in range(2):
        journal.add(3, {"text": f"é{turn}", "ended": True, "tokens": 1})
    with open(path, "ab") as file:
        file.write(b'{"unit": 3, "te')
    again = Journal(path)
    assert [answer["text"] for answer in again.answers(3)] == ["é0", "é1"]
    again.add(4, {"text": "x", "ended": False, "tokens": 1})
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["unit"] for line in lines] == [3, 3, 4]


def test_retry_after() -> None:
    assert client._retry_after("2.5") == 2.5 and client._retry_after("9999") == 600
    assert client._retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert client._retry_after("soon") is None and client._retry_after(None) is None


TEA = {"type": "function", "function": {"name": "tea", "arguments": '{"at": 5}'}}
CALLED = {"content": None, "tool_calls": [TEA]}
NOTHING = {"content": None}
THOUGHT = {"content": None, "reasoning_content": "Hm."}


def answered(
    folder: Path, choice: Any, template: str = TOOLS, **how: Any
) -> tuple[list[str], Counts]:
    """What is supervised of two chats, of one and of two questions, and the counts."""
    tokenizer = chat_tokenizer(template, "<|im_end|>")
    with serving(choice=choice) as server:
        made = spec_for(server, **how)
        chats = [chat(0), chat(1)]
        order = order_of_asked(chats, made, 0)
        writer = ServerWriter(ChatRenderer(tokenizer), chats, made, 2, order, "m", folder)
        counts, taught = Counts(), []
        for each in writer.write(range(2), lambda *_: None):
            counts += each.counts
            taught += [str(tokenizer.decode(row.tokens[row.supervised])) for row in each.rows]
    return taught, counts


def ids_of(text: str) -> list[int]:
    return chat_tokenizer(TOOLS, "<|im_end|>")(text)["input_ids"]


CALL_TEXT = '<tool_call>{"name": "tea", "arguments": {"at": 5}}</tool_call><|im_end|>'


@pytest.mark.parametrize("token_ids", [False, True])
def test_an_answer_that_calls_a_tool_is_the_call(tmp_path: Path, token_ids: bool) -> None:
    """The chat ends there: nobody runs the tool."""
    choice = {"message": CALLED, "finish_reason": "tool_calls", "token_ids": ids_of(CALL_TEXT)}
    taught, counts = answered(tmp_path, lambda _: choice, token_ids=token_ids)
    assert taught == [CALL_TEXT] * 2
    assert counts.kept == counts.answers == 2 and not counts.empty


@pytest.mark.parametrize("token_ids", [False, True])
@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (NOTHING, "stop"), ({"content": " \n"}, "stop"), (NOTHING | {"refusal": "no"}, "stop"),
        (NOTHING | {"tool_calls": []}, "tool_calls"), (NOTHING, "content_filter"),
        ({"content": "it is"}, "content_filter"), (NOTHING, "length"),
    ],
)  # fmt: skip
def test_an_answer_of_nothing_is_counted_and_not_written(
    tmp_path: Path, message: dict[str, Any], reason: str, token_ids: bool
) -> None:
    choice = {"message": message, "finish_reason": reason}
    taught, counts = answered(tmp_path, lambda _: choice, token_ids=token_ids)
    assert not taught and (counts.kept, counts.empty) == (0, 2)


@pytest.mark.parametrize("choice", [{}, {"message": {"content": ["x"]}, "finish_reason": "stop"}])
def test_an_answer_of_another_shape_is_refused(tmp_path: Path, choice: dict[str, Any]) -> None:
    with pytest.raises(DistillError, match="JSON that is no chat completion") as error:
        answered(tmp_path, lambda _: choice)
    one_line(error.value)


def test_an_empty_answer_ends_the_chat_before_its_question(tmp_path: Path) -> None:
    def choice(messages: list[dict[str, Any]]) -> dict[str, Any]:
        message = {"content": "yes"} if len(messages) == 1 else NOTHING
        return {"message": message, "finish_reason": "stop"}

    for _ in range(2):  # again from the journal
        taught, counts = answered(tmp_path, choice)
        assert taught == ["yes<|im_end|>"] * 2
        assert (counts.kept, counts.empty, counts.answers) == (2, 1, 2)


def test_what_was_cut_has_no_end_of_a_template(tmp_path: Path) -> None:
    """Of a call or a thought that was cut, the text is not known, but perhaps the ids are."""
    for message in (CALLED, THOUGHT):
        choice = {"message": message, "finish_reason": "length", "token_ids": ids_of("<tool_ca")}
        for token_ids, kept in ((False, []), (True, ["<tool_ca"] * 2)):
            folder = tmp_path / f"{token_ids}-{len(message)}-{message is CALLED}"
            taught, counts = answered(folder, lambda _, c=choice: c, token_ids=token_ids)
            assert taught == kept and counts.empty == 2 - len(kept)
    choice = {"message": THOUGHT, "finish_reason": "stop"}  # the control: it ended there
    taught, _ = answered(tmp_path / "ended", lambda _: choice, CHATML)
    assert taught[0] == "<think>\nHm.\n</think>\n\n<|im_end|>"
