"""A server of the OpenAI protocol: that of transformers, with a speculator in the model's place.

`transformers serve` has the endpoints, chat templates, tool calls, reasoning and streaming; here it
is given one loaded target, whose `generate` is a batcher's.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import BaseHandler, GenerateManager, GenerationState

from headstart.asked import check_asked
from headstart.heads.core import trained_context
from headstart.terminal import one_line

if TYPE_CHECKING:
    from fastapi import FastAPI

    from headstart.infer import Batcher, Recorder

PATHS = {
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/health",
}  # fmt: skip
"""The endpoints that are served, of those that transformers has."""


def server_of(batcher: Batcher, name: str, recorder: Recorder | None = None) -> FastAPI:
    """The application that answers requests for the model `name`; it runs under any ASGI server.

    Args:
        recorder: of the same batcher; takes every request that was answered.
    """
    model, state = _OneModel(batcher, name), _OneManager(batcher, recorder)
    handlers: dict[str, Any] = {
        "chat_handler": _Chats(model, state),
        "completion_handler": _Completions(model, state),
        "response_handler": _Responses(model, state),
    }
    build: Any = build_server
    wanted = inspect.signature(build).parameters  # which differ by version
    others = {key: None for key in wanted if key.endswith("_handler")}
    app: FastAPI = build(model, generation_state=state, **others | handlers)
    app.router.routes = [r for r in app.router.routes if getattr(r, "path", "") in PATHS]

    @app.get("/v1/models/{asked:path}")
    def one_model(asked: str) -> dict[str, Any]:
        check_model(asked, name)
        return model.get_gen_models()[0]

    app.add_exception_handler(ValueError, _refused)
    app.add_exception_handler(HTTPException, _refused)
    return app


def check_model(asked: Any, name: str | None) -> None:
    """Refuse a request for another model than the one that is served as `name`.

    Raises:
        HTTPException: 404, as the protocol has it.
    """
    if asked not in (None, name):
        raise HTTPException(404, f"no model {asked!r} is served here; ask for {name!r}")


async def _refused(request: Request, error: Exception) -> JSONResponse:
    """A request's mistake in the form that clients of the protocol read."""
    status = error.status_code if isinstance(error, HTTPException) else 400
    message = str(error.detail) if isinstance(error, HTTPException) else one_line(error)
    said = {"message": message, "type": "invalid_request_error"}
    return JSONResponse({"error": said}, status_code=status)


class _OneModel(ModelManager):
    """Has one model, loaded already, under the name that it is served by."""

    def __init__(self, batcher: Batcher, name: str):
        super().__init__()
        self.force_model, self._batcher = name, batcher

    def load_model_and_processor(self, *given: Any, **options: Any) -> Any:
        return self._batcher.model, self._batcher.tokenizer

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id  # answers name it as requests do

    def get_gen_models(self, *given: Any) -> list[dict[str, Any]]:  # type: ignore[override]
        return [{"id": self.force_model, "object": "model", "owned_by": "headstart", "created": 0}]

    def shutdown(self) -> None:
        pass


class _OneManager(GenerationState):
    """Has one manager of generations for all requests."""

    def __init__(self, batcher: Batcher, recorder: Recorder | None):
        super().__init__()
        self._manager = _Manager(_Writer(batcher, recorder))

    def get_manager(self, *given: Any, **options: Any) -> GenerateManager:
        return self._manager


class _Manager(GenerateManager):
    """Lets the batcher generate what handlers ask the model for, each request in its thread."""

    def __init__(self, writer: Any):
        self._writer = writer  # and not the one thread of all requests

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future

    def async_submit(
        self, fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> asyncio.Future[Any]:
        return asyncio.wrap_future(self.submit(fn, *args, **kwargs))

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *given: Any, **options: Any
    ) -> Any:
        self._writer.limit(inputs, gen_config)
        return super().generate_streaming(
            self._writer, processor, inputs, gen_config, *given, **options
        )

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *given: Any, **options: Any
    ) -> Any:
        self._writer.limit(inputs, gen_config)
        return await super().generate_non_streaming(
            self._writer, processor, inputs, gen_config, *given, **options
        )


class _Writer:
    """What `generate` is called of: writes with the batcher, and says how fast that was."""

    def __init__(self, batcher: Batcher, recorder: Recorder | None):
        self._batcher, self._context = batcher, trained_context(batcher.model)
        self._recorder = recorder

    def limit(self, inputs: Any, config: Any) -> None:
        """Let a request write no more than the target's context has room for.

        Raises:
            ValueError: there is no prompt, or room for no token.
        """
        length = inputs["input_ids"].shape[-1]
        if length == 0:
            raise ValueError("the prompt is empty; give at least one token.")
        if self._context is None:
            return
        if (room := self._context - length) < 1:
            raise ValueError(
                f"the prompt has {length} tokens, and the target was made for {self._context} in "
                "all; shorten it."
            )
        config.max_new_tokens = min(config.max_new_tokens or room, room)

    def generate(self, *, generation_config: Any, **inputs: Any) -> Any:
        asked: _Asked = vars(generation_config).pop(_ASKED, _Asked())
        decode: Any = self._batcher.generate
        if self._recorder is not None:
            decode = self._recorder.generate
            inputs["chats"] = None if asked.chat is None else [asked.chat]
        if asked.seed is not None:
            inputs["seed"] = asked.seed
        started = time.perf_counter()
        found = decode(generation_config=generation_config, **inputs)
        seconds, stats = time.perf_counter() - started, self._batcher.stats
        tokens = found.shape[-1] - inputs["input_ids"].shape[-1]
        tau = f", τ {stats.tau:.2f}" if stats.rounds else ""
        print(
            f"{tokens} tokens in {seconds:.2f} s ({tokens / seconds:.0f}/s){tau}", file=sys.stderr
        )
        return found


_ASKED = "headstart_asked"  # an attribute of a request's generation config


class _Asked(NamedTuple):
    """What of a request its generation config does not say."""

    seed: int | None = None
    chat: list[dict[str, Any]] | None = None


class _Sampled(BaseHandler):
    """Reads sampling as the protocol means it: a temperature above 0 samples, and a seed is of its
    own request, whatever other requests do meanwhile."""

    def _validate_request(self, body: dict[str, Any]) -> None:
        model: Any = self.model_manager
        check_model(body.get("model"), model.force_model)
        super()._validate_request(body)
        _, tokenizer = model.load_model_and_processor()
        check_asked(body, getattr(tokenizer, "chat_template", None))

    def _build_generation_config(self, body: dict[str, Any], *given: Any, **options: Any) -> Any:
        body, chat = dict(body), body.get("messages")
        seed = body.pop("seed", None)
        if not all(isinstance(message.get("content"), str) for message in chat or [{}]):
            chat = None  # with tools or pictures: the prompt alone is kept
        config = super()._build_generation_config(body, *given, **options)
        if body.get("temperature") is not None:
            config.do_sample = config.temperature > 0
            config.temperature = config.temperature or 1.0  # greedy text has none
        setattr(config, _ASKED, _Asked(None if seed is None else int(seed), chat))
        return config


class _Ended(_Sampled):
    """Ends a stream as the protocol does, which some clients wait for."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        answer = await super().handle_request(body, request_id)  # type: ignore[misc]
        if isinstance(answer, StreamingResponse):
            answer.body_iterator = _with_end(answer.body_iterator)
        return answer


async def _with_end(parts: Any) -> AsyncIterator[Any]:
    async with contextlib.aclosing(parts):  # when the client leaves, the writer is told
        async for part in parts:
            yield part
    yield "data: [DONE]\n\n"


class _Chats(_Ended, ChatCompletionHandler):
    pass


class _Completions(_Ended, CompletionHandler):
    pass


class _Responses(_Sampled, ResponseHandler):
    pass
