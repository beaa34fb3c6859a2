"""A server writes: chats are answered through the OpenAI protocol, turn by turn.

Answers are kept in a journal beside the shards as they come, so that a run that is killed asks for
none of them again.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from headstart.heads.core import row_seeds

from ...recipe import Distill
from ..documents import ChatTemplateError, Document
from ..prefixes import DistillError, leave_out
from ..rendering import ChatRenderer
from ..tool_calls import with_objects
from .client import Client, RefusedError
from .replay import Asked, Order, Replay
from .units import Counts, Tick, Writer, Written, written


class ServerWriter(Writer):
    """Answers the chats of documents through a server.

    Rows are the ids that the server wrote, where it returns them, after the prompt as it is
    rendered here; or else the whole chat, rendered here.

    Args:
        model: the target's name, which the server is asked for unless the recipe names another.
        journal: the folder of the journals.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        documents: Sequence[Document],
        spec: Distill,
        examples: int,
        order: Order,
        model: str,
        journal: Path,
        seed: int = 0,
    ):
        assert spec.openai is not None
        self.renderer, self.spec, self.server = renderer, spec, spec.openai
        self.documents, self.units = documents, examples
        self._order, self.skipped = order
        self.journal = journal
        self.model = spec.openai.model or model
        self._stop = threading.Event()
        self.client = Client(spec.openai, self._stop)
        self._seeds = row_seeds(seed, examples).tolist()

    def choose(self) -> None:
        """See that somebody answers, so that a wrong address fails at once."""
        self.client.greet()

    def write(self, numbers: range, tick: Tick) -> Iterator[Written]:
        journal = Journal(self._journal_of(numbers))
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        events: queue.SimpleQueue[int | Replay | BaseException] = queue.SimpleQueue()
        for number in numbers:
            todo.put(number)
        # Daemons, so that a request on its way keeps no interrupted run alive.
        for _ in range(min(self.server.concurrency, len(numbers))):
            worker = threading.Thread(target=self._work, args=(todo, journal, events), daemon=True)
            worker.start()
        found: dict[int, Replay] = {}
        try:
            while len(found) < len(numbers):
                event = events.get()
                if isinstance(event, BaseException):
                    raise event
                if isinstance(event, int):
                    tick(0, event)
                else:
                    tick(1, 0)
                    found[event.number] = event
        except BaseException:
            self._stop.set()
            raise
        journal.close()
        refused = self.client.refusal and all(r.counts.refused for r in found.values())
        if found and not self.client.answered and refused:
            raise DistillError(
                f"the server refused all {len(numbers)} chats of a shard with status "
                f"{self.client.refusal}; check distill.openai.model and the length of its context."
            )
        yield from (self._rows(found[number]) for number in numbers)

    def done(self, numbers: range) -> None:
        """Remove the journal of a shard that is whole."""
        self._journal_of(numbers).unlink(missing_ok=True)

    def _journal_of(self, numbers: range) -> Path:
        return self.journal / f"answers-{numbers.start}-{numbers.stop}.jsonl"

    def _work(
        self,
        todo: queue.SimpleQueue[int],
        journal: Journal,
        events: queue.SimpleQueue[int | Replay | BaseException],
    ) -> None:
        """Answer chats, until there is none left; what is done, and what goes wrong, are events."""
        while not self._stop.is_set():
            try:
                number = todo.get_nowait()
            except queue.Empty:
                return
            try:
                events.put(self._answered(number, journal, events.put))
            except BaseException as error:
                events.put(error)
                return

    def _answered(self, number: int, journal: Journal, count: Callable[[int], Any]) -> Replay:
        document = self.documents[self._order[number % len(self._order)]]
        replay = Replay(document, self.renderer, self.spec, set(), number)
        if not document.messages:
            raise DistillError(
                f"{document.id}: not a chat, and distill.writer is openai; use distill.writer=own, "
                "or a corpus of chats."
            )
        for answer in journal.answers(number):
            if replay.ask() is not None:
                _take(replay, answer)
        while not self._stop.is_set() and (asked := replay.ask()) is not None:
            try:
                answer = self._answer(asked, document, self._seeds[number] & (2**31 - 1))
            except RefusedError:
                replay.counts.refused = 1
                replay.history.pop()
                break
            journal.add(number, answer)
            count(answer["tokens"])
            _take(replay, answer)
        return replay

    def _answer(self, asked: Asked, document: Document, seed: int) -> dict[str, Any]:
        """The server's answer: `text`, `ended`, how many `tokens`, and their `ids` if it says.

        One that calls tools has `calls`; one with neither text nor calls is left out.
        """
        spec = self.spec
        body: dict[str, Any] = {
            "model": self.model,
            "messages": asked.messages,
            "max_tokens": asked.room,
            "temperature": spec.temperature,
            "stream": False,
        }
        if spec.temperature:
            body |= {"seed": seed, "top_p": 1.0}
        if options := self.renderer.server_options:
            body["chat_template_kwargs"] = options
        if tools := document.tools or self.renderer.chat.tools:
            body["tools"] = tools
        if self.server.token_ids:
            body["return_token_ids"] = True
        found = self.client.post("chat/completions", body | self.server.extra)
        return self._read(found, asked)

    def _read(self, found: Any, asked: Asked) -> dict[str, Any]:
        try:
            choice = found["choices"][0]
            message, reason = choice["message"], choice["finish_reason"]
            text = message.get("content") or ""
            said = bool(text.strip())
            thought = message.get("reasoning_content") or message.get("reasoning")
            calls = message.get("tool_calls")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise DistillError(
                f"{self.client.name} answered with JSON that is no chat completion; expected an "
                "OpenAI-compatible server at distill.openai.url."
            ) from None
        ended = reason != "length"
        if not ended and not self.server.token_ids:  # the end of what was cut would be written too
            calls, thought = None, thought if said else None
        answer: dict[str, Any] = {"text": "", "ended": ended, "tokens": 0}
        if reason == "content_filter" or not (said or thought or calls):
            return answer  # a filter cuts or replaces what the target wrote
        if thought:
            text = f"<think>\n{thought}\n</think>\n\n{text.lstrip()}"
        answer |= {"text": text} | ({"calls": with_objects(calls)} if calls else {})
        ids = choice.get("token_ids") or found.get("token_ids")
        if self.server.token_ids:
            answer["ids"] = self._checked(ids, found, choice, asked)
        usage = found.get("usage") or {}
        answer["tokens"] = len(ids or ()) or usage.get("completion_tokens") or len(text) // 4
        return answer

    def _checked(self, ids: Any, found: Any, choice: Any, asked: Asked) -> list[int]:
        """An answer's ids, if there are any, and the prompt's are those of the renderer."""
        given = found.get("prompt_token_ids") or choice.get("prompt_token_ids")
        if not ids or (given is not None and list(given) != asked.tokens):
            what = "renders chats otherwise than they are here" if ids else "gave no token ids"
            raise DistillError(
                f"{self.client.name} {what}; set distill.openai.token_ids=false, or serve the "
                "same model and template."
            )
        return list(ids)

    def _rows(self, replay: Replay) -> Written:
        if self.server.token_ids:
            return replay.result()
        try:
            tools = replay.document.tools
            rows = self.renderer.rows(replay.history, not replay.finished, tools)
        except ChatTemplateError as error:
            leave_out(self.renderer, replay.document, error)
            return written(replay.document.id, [], Counts(refused=1))
        limit = self.spec.row_tokens
        rows = [row.cut(limit) for row in rows]
        return written(replay.document.id, [row for row in rows if row.answers], replay.counts)


def _take(replay: Replay, answer: dict[str, Any]) -> None:
    calls = answer.get("calls")
    if not answer["text"].strip() and not calls:
        replay.leave_unanswered()
        return
    if "ids" in answer:
        replay.add(answer["ids"])
    said = {"content": answer["text"]} | ({"tool_calls": calls} if calls else {})
    replay.go_on(said, answer["ended"])


class Journal:
    """The answers of one shard as they came: a line of JSON each; safe for several threads."""

    def __init__(self, path: Path):
        self.path, self._lock = path, threading.Lock()
        self._known: dict[int, list[dict[str, Any]]] = {}
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        for line in lines:
            if not line.endswith(b"\n"):
                continue  # a kill cut it
            entry = json.loads(line)
            self._known.setdefault(entry.pop("unit"), []).append(entry)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = open(path, "ab")  # noqa: SIM115 (see `close`)
        if lines and not lines[-1].endswith(b"\n"):
            self._file.truncate(sum(map(len, lines[:-1])))

    def answers(self, unit: int) -> list[dict[str, Any]]:
        """The answers that a unit already has, in order."""
        return self._known.get(unit, [])

    def add(self, unit: int, answer: dict[str, Any]) -> None:
        """Keep an answer."""
        line = json.dumps({"unit": unit} | answer).encode() + b"\n"
        with self._lock:
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        """No answer is coming any more."""
        self._file.close()
