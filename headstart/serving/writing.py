"""How an answer is written: by a batcher, in a thread of its request, until its client leaves."""

from __future__ import annotations

import asyncio
import atexit
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers.cli.serving.utils import GenerateManager, GenerationState

from headstart.heads.core import counted, end_tokens, trained_context
from headstart.terminal import one_line
from headstart.train.figures.pieces import context_of

from .metrics import Metrics
from .probabilities import Log, Spelling, Told
from .reading import reader_of
from .shapes import Refused
from .stops import AtStop
from .streamers import Cut, Left

if TYPE_CHECKING:
    from headstart.infer import Batcher, Grammar, Recorder, Stats

ASKED = "headstart_asked"
"""An attribute of a request's generation config, of the type `Asked`."""

_OPTIONS = ("seed", "grammar", "logprobs", "presence_penalty", "frequency_penalty")


class Asked(NamedTuple):
    """What of a request its generation config does not say."""

    seed: int | None = None
    chat: list[dict[str, Any]] | None = None
    continues: bool = False  # the prompt's text, rather than answer a chat
    prompt: str = "prompt"  # the field that has it
    stops: tuple[str, ...] = ()  # strings that end the answer, none of them empty
    logprobs: int | None = None  # of how many likely tokens; None without any probabilities
    of_text: bool = False  # whether they are those of the text alone, rather than of thoughts too
    grammar: Grammar | None = None  # the answer's form
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    tools: Sequence[dict[str, Any]] = ()  # that it may call
    must_call: bool = False  # whether its form is that of calls

    @property
    def options(self) -> dict[str, Any]:
        """What of it are options of `generate`."""
        found = {name: getattr(self, name) for name in _OPTIONS}
        return {name: value for name, value in found.items() if value is not None}


def asked_of(config: Any) -> Asked:
    """What a request's generation config does not say."""
    return getattr(config, ASKED, Asked())


def said_of(error: Exception) -> dict[str, Any]:
    """An error as clients of the protocol read it; of the server's own failures, the kind alone."""
    if isinstance(error, Refused):
        return refusal(one_line(error), error.param, error.code)
    if isinstance(error, ValueError):
        return refusal(one_line(error))
    failed = f"the server could not write this answer ({type(error).__name__})"
    return refusal(failed) | {"type": "server_error"}


def refusal(message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """A request that is not answered, as clients of the protocol read it; see `Refused`."""
    said = {"message": message, "type": "invalid_request_error"}
    return said | {"param": param, "code": code}


def log_failure(error: Exception) -> None:
    """Print where the server failed, but not in the words of an error, which may quote a text."""
    if not isinstance(error, ValueError):
        place = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{place.filename}:{place.lineno}"
        print(f"error: an answer failed with {type(error).__name__} at {at}", file=sys.stderr)


_WAITS = 5.0  # seconds in which answers end when the interpreter ends

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_lefts: weakref.WeakSet[threading.Event] = weakref.WeakSet()


@atexit.register
def _end_answers() -> None:
    """End what is written before the interpreter ends, which would abort it amid torch's code."""
    for left in [*_lefts]:
        left.set()
    limit = time.monotonic() + _WAITS
    for thread in [*_threads]:
        thread.join(max(limit - time.monotonic(), 0))


def in_thread(run: Callable[[], Any]) -> Future[Any]:
    """What a function returns or raises in a thread of its own."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # who waits for it may leave, and it goes on

    def work() -> None:
        try:
            future.set_result(run())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=work, name="headstart-answers", daemon=True)
    _threads.add(thread)
    thread.start()
    return future


def returned(work: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns that waits for nothing, without an event loop and its open files."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    raise RuntimeError(f"{work} waits for something, which no event loop ends")


class Writer:
    """What `generate` is called of: writes with the batcher, and says how fast that was.

    Attributes:
        metrics: of the model; spelling: of the target's tokens.
    """

    def __init__(self, batcher: Batcher, name: str, recorder: Recorder | None):
        self._batcher, self._context = batcher, trained_context(batcher.model)
        self._recorder, self.metrics = recorder, Metrics(name, batcher)

    @property
    def stats(self) -> Stats:
        """What the calling thread's last answer took."""
        return self._batcher.stats

    @cached_property
    def spelling(self) -> Spelling:
        return Spelling(self._batcher.tokenizer)

    def limit(self, inputs: Any, config: Any) -> None:
        """Let a request write no more than the target's context has room for.

        Raises:
            ValueError: there is no prompt, or room for no token.
        """
        length = inputs["input_ids"].shape[-1]
        if length == 0:
            raise Refused("the prompt is empty; give at least one token.", asked_of(config).prompt)
        if self._context is None:
            return
        if (room := self._context - length) < 1:
            raise Refused(
                f"the prompt has {counted(length, 'token')}, and the target was made for "
                f"{self._context} in all; shorten it.",
                asked_of(config).prompt,
                "context_length_exceeded",
            )
        config.max_new_tokens = min(config.max_new_tokens or room, room)

    def ends(self, config: Any) -> set[int]:
        """The tokens that end an answer."""
        return end_tokens(self._batcher.model, config)

    def generate(self, *, generation_config: Any, **inputs: Any) -> Any:
        """The text [1, P + new] of a request, which may have waited for others before."""
        asked: Asked = vars(generation_config).pop(ASKED, Asked())
        decode: Any = self._batcher.generate
        if self._recorder is not None:
            decode = self._recorder.generate
            inputs["chats"] = None if asked.chat is None else [asked.chat]
        inputs |= asked.options
        # A request's stop strings, or the model's own, are among its criteria.
        found = decode(generation_config=generation_config, stop_strings=None, **inputs)
        stats = self.stats
        seconds = stats.prefill_seconds + stats.decode_seconds
        tokens = found.shape[-1] - inputs["input_ids"].shape[-1]
        tau = f", τ {stats.tau:.2f}" if stats.rounds else ""
        written = f"{counted(tokens, 'token')} in {seconds:.2f} s"
        kept = f", {counted(stats.kept_tokens, 'token')} of the prompt kept"
        kept = kept if stats.kept_tokens else ""
        print(f"{written} ({tokens / seconds:.0f}/s){tau}{kept}", file=sys.stderr)
        return found


class Answer(NamedTuple):
    """What a whole answer consists of, as it is streamed; its prompt's length, its token ids."""

    items: list[Any]
    prompt: int
    ids: list[int]

    @property
    def written(self) -> int:
        return len(self.ids)


class Manager(GenerateManager):
    """Generates what the handler of one request asks for.

    Args:
        loop: the one that sends the answer.

    Attributes:
        told: the tokens of an answer that is not streamed, if their probabilities are asked for.
        cached: so many tokens of the prompt were not run; thoughts: so many of the answer are of
            thoughts; both known once the answer has ended.
    """

    def __init__(self, writer: Writer, loop: asyncio.AbstractEventLoop):
        self.pieces, self.told = Pieces(), list[Told]()
        self.cached = self.thoughts = 0
        self._writer, self._loop, self._left = writer, loop, threading.Event()
        _lefts.add(self._left)

    def cancel(self) -> None:
        """End the answer, whose client has left, with the round that is decoded now."""
        self._left.set()

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: Any,
        request_id: str,
        response_parser: Any = None,
    ) -> Any:
        """The pieces of an answer that is written meanwhile, and its streamer.

        The parser of transformers is not used: it would lose what it cannot read.
        """

        def say(item: Any) -> None:
            self._loop.call_soon_threadsafe(self.pieces.put_nowait, item)

        streamer, run = self._generation(model, processor, inputs, gen_config, say)

        def work() -> None:
            last = None
            try:
                run()
            except Left:
                pass
            except Exception as error:
                last = error
            say(last)

        in_thread(work)
        return self.pieces, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, Any]:
        """A whole answer: its text before any stop string, the prompt's length, its token ids."""
        items, prompt, ids = await self.answer(model, processor, inputs, gen_config)
        return "".join(items), prompt, ids

    async def answer(self, model: Any, processor: Any, inputs: Any, config: Any) -> Answer:
        """A whole answer."""
        items = list[Any]()
        _, run = self._generation(model, processor, inputs, config, items.append)
        prompt, ids = inputs["input_ids"].shape[-1], run()[0].tolist()
        self.told = [told for item in items for told in getattr(item, "told", ())]
        return Answer(items, prompt, ids[prompt:])

    def spelled(self, tokens: Sequence[Told], chat: bool) -> dict[str, Any]:
        """The `logprobs` of a choice."""
        spelling = self._writer.spelling
        return spelling.of_chat(tokens) if chat else spelling.of_completion(tokens)

    def _generation(
        self, model: Any, processor: Any, inputs: Any, config: Any, say: Callable[[Any], None]
    ) -> tuple[Cut, Callable[[], Any]]:
        """What is told of an answer as it is written, and what writes it."""
        self._writer.limit(inputs, config)
        asked, prompt = asked_of(config), inputs["input_ids"]
        reader, log, criteria = None, None, list[AtStop]()
        ends = self._writer.ends(config)
        before = prompt[0].tolist() if asked.continues else []
        if not asked.continues:
            reader = reader_of(processor, model, prompt, asked.tools, asked.must_call)
        if asked.logprobs is not None:
            log = Log(asked.stops, ends)
        if asked.stops:
            context = context_of(processor, before)
            criteria = [AtStop(processor, asked.stops, prompt.shape[-1], context)]
        streamer = Cut(
            processor, say, self._left, reader, asked.stops, log, before, asked.of_text, ends
        )

        def run() -> Any:
            with self._writer.metrics.request(prompt.shape[-1], streamer) as watched:
                text = self._writer.generate(
                    **inputs, generation_config=config, stopping_criteria=criteria, streamer=watched
                )
                ended = int(text[0, -1]) in ends
                if ended or any(bool(each(text, None)) for each in criteria):
                    # Handlers take an answer of that length for one that was cut.
                    config.max_new_tokens = None
                watched.reason = "stop" if config.max_new_tokens is None else "length"
                watched.stats, watched.written = self._writer.stats, text.shape[-1] - len(prompt[0])
                self.cached = watched.stats.kept_tokens
                self.thoughts = streamer.thought_tokens
            return text

        return streamer, run


class State(GenerationState):
    """Has the manager of one request."""

    def __init__(self, manager: Manager | None = None):
        super().__init__()
        self.manager: Any = manager

    def get_manager(self, *given: Any, **options: Any) -> Any:
        return self.manager


class Pieces:
    """What a streamed answer consists of, in the order in which it was written, ended by None.

    `get` raises an error that ended the answer where it is read.
    """

    def __init__(self) -> None:
        self._items: asyncio.Queue[Any] = asyncio.Queue()
        self._first: list[Any] = []

    def put_nowait(self, item: Any) -> None:
        self._items.put_nowait(item)

    async def begun(self) -> None:
        """Wait for the first piece. Raises the error that came in its place, if one did."""
        self._first.append(await self._items.get())
        if isinstance(error := self._first[0], Exception):
            raise error

    async def get(self) -> Any:
        item = self._first.pop() if self._first else await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item

    def get_nowait(self) -> Any:
        """Nothing, so that handlers send each piece before they read an error."""
        raise asyncio.QueueEmpty
