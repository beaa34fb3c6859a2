"""A server of the OpenAI protocol: that of transformers, with a speculator in the model's place.

`transformers serve` has the chat templates, tool calls, reasoning and streaming; here it is given
one loaded target, whose `generate` is a batcher's.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
import uuid
from collections.abc import Awaitable
from hmac import compare_digest
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from jinja2 import TemplateError
from prometheus_client import CONTENT_TYPE_LATEST as METRICS_TYPE
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import X_REQUEST_ID

from headstart.terminal import one_line

from .bounds import Bounds
from .handlers import Chats, Completions, check_model
from .responses import Responses
from .several import answers_to_each, merged, merged_stream
from .shapes import check_text, shown
from .streamers import Left
from .writing import Manager, State, Writer, in_thread, log_failure, refusal, returned, said_of

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from headstart.infer import Batcher, Recorder

_HANDLERS: dict[str, Any] = {
    "/v1/chat/completions": Chats,
    "/v1/completions": Completions,
    "/v1/responses": Responses,
}
_KEPT = {"/v1/models", "/health"}  # of the endpoints that transformers has
_CLIENT_LEFT = 499  # nobody reads it; the number is that of nginx


def server_of(
    batcher: Batcher, name: str, recorder: Recorder | None = None, key: str | None = None
) -> FastAPI:
    """The application that answers requests for the model `name`; it runs under any ASGI server.

    Args:
        recorder: of the same batcher; takes every request that was answered.
        key: requests must have it as their bearer token, but for those to /health.
    """
    model, writer = _OneModel(batcher, name), Writer(batcher, name, recorder)
    build: Any = build_server
    wanted = inspect.signature(build).parameters  # which differ by version
    handlers = {key: None for key in wanted if key.endswith("_handler")}
    app: FastAPI = build(model, generation_state=State(), **handlers)
    app.router.routes = [r for r in app.router.routes if getattr(r, "path", "") in _KEPT]
    for path in _HANDLERS:
        app.add_api_route(path, _Answers(model, writer, path).answer, methods=["POST"])

    @app.get("/v1/models/{asked:path}")
    def one_model(asked: str) -> dict[str, Any]:
        check_model(asked, name)
        return model.get_gen_models()[0]

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(writer.metrics.told(), media_type=METRICS_TYPE)

    for kind in (ValueError, HTTPException, TemplateError, Exception):
        app.add_exception_handler(kind, _refused)
    # In place of the one of transformers, which costs each chunk of a stream several tasks' turns.
    app.user_middleware.clear()
    app.add_middleware(_WithId)
    if key is not None:
        app.add_middleware(_WithKey, key=key)
    return app


class _WithId:
    """Gives each request an id, that of its header if it has one, and tells it with the answer."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = Request(scope).headers.get(X_REQUEST_ID) or str(uuid.uuid4())
        scope.setdefault("state", {})["request_id"] = name

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[X_REQUEST_ID] = name
            await send(message)

        await self._app(scope, receive, sent)


class _WithKey:
    """Answers requests without the key with status 401."""

    def __init__(self, app: ASGIApp, key: str):
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            kind, _, key = given.partition(b" ")
            if kind.lower() != b"bearer" or not compare_digest(key.strip(), self._key):
                message = "the request has no key, or another one; send Authorization: Bearer KEY"
                said = refusal(message, code="invalid_api_key")
                answer = JSONResponse({"error": said}, 401, {"WWW-Authenticate": "Bearer"})
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Answers:
    """Answers the requests to one path, each with a handler of its own."""

    def __init__(self, model: _OneModel, writer: Writer, path: str):
        self._model, self._writer, self._handler = model, writer, _HANDLERS[path]

    async def answer(self, request: Request) -> Response:
        """The answer, or the first part of it; nothing once the client has left."""
        try:
            body = await _body(request, self._model.bounds.body)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_LEFT)
        loop = asyncio.get_running_loop()
        bodies = self._handler.each_answer(body)
        managers = [Manager(self._writer, loop) for _ in bodies]
        name = f"{self._handler.begins}{request.state.request_id}"
        # Each of several has an id of its own, which its calls of tools have theirs by.
        names = [f"{name}-{number}" for number in range(len(bodies))] if bodies[1:] else [name]

        def handled(body: dict[str, Any], manager: Manager, name: str) -> Awaitable[Any]:
            handler: Any = self._handler(self._model, State(manager))
            # In a thread, since it takes seconds to tokenize a prompt of megabytes.
            working = in_thread(lambda: returned(handler.handle_request(body, name)))
            return asyncio.wrap_future(working)

        try:
            working = asyncio.gather(*map(handled, bodies, managers, names))
            answers = await _while_there(request, working)
            if isinstance(answers[0], StreamingResponse):  # an error may come in place of a text
                await _while_there(request, managers[0].pieces.begun())
        except BaseException as error:
            for manager in managers:
                manager.cancel()
            if isinstance(error, Left):
                return Response(status_code=_CLIENT_LEFT)
            if not isinstance(error, Exception):
                raise
            # If it went on, the connection would end, whose client may have sent the next request.
            return await _refused(request, error)
        return answers[0] if len(answers) == 1 else _as_one(answers, body, name)


def _as_one(answers: list[Any], body: dict[str, Any], name: str) -> Response:
    """Several answers to one request, as the protocol has them."""
    count = answers_to_each(body)
    if isinstance(answers[0], StreamingResponse):
        streams = [answer.body_iterator for answer in answers]
        return StreamingResponse(
            merged_stream(streams, count, name), media_type=answers[0].media_type
        )
    return JSONResponse(merged([json.loads(bytes(each.body)) for each in answers], count, name))


async def _body(request: Request, most: int) -> dict[str, Any]:
    """The request's JSON object.

    Raises:
        ClientDisconnect: the client left before it was read.
        HTTPException: 415 for what does not say that it is JSON, which a page of any site may send
            to this server, and for what is compressed; 413 for more than `most` bytes.
        ValueError: it is no JSON object of texts.
    """
    kind = request.headers.get("content-type", "")
    if (coding := request.headers.get("content-encoding", "identity")) != "identity":
        raise HTTPException(415, f"Content-Encoding is {shown(coding)}; send the body as it is")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, f"Content-Type is {shown(kind)}; expected application/json")
    read, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size <= most:
            read.append(part)  # what is beyond it is dropped, so that the client reads the answer
    if size > most:
        said = f"the request has {size:,} bytes; expected at most {most:,}, send less"
        raise HTTPException(413, said)
    try:
        body = json.loads(b"".join(read))
    except ValueError as error:
        raise ValueError(f"the request's body is no JSON ({one_line(error)})") from error
    except RecursionError as error:
        raise ValueError("the request's body is nested too deeply") from error
    if not isinstance(body, dict):
        raise ValueError(f"the request's body is {shown(body)}; expected a JSON object")
    check_text(body)
    return body


async def _while_there(request: Request, work: Awaitable[Any]) -> Any:
    """What is waited for. Raises `Left` once the client has left."""
    waited, left = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((waited, left), return_when=asyncio.FIRST_COMPLETED)
        if not waited.done():
            waited.cancel()
            # Else asyncio prints that nobody asked how it ended.
            await asyncio.gather(waited, return_exceptions=True)
            raise Left
        return waited.result()
    finally:
        left.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refused(request: Request, error: Exception) -> JSONResponse:
    """An error in the form that clients of the protocol read."""
    if not isinstance(error, HTTPException):
        if isinstance(error, TemplateError):
            error = ValueError(f"the target's chat template refuses this chat: {one_line(error)}")
        log_failure(error)
        status = 400 if isinstance(error, ValueError) else 500
        return JSONResponse({"error": said_of(error)}, status_code=status)
    status = 400 if error.status_code == 422 else error.status_code
    if isinstance(error.detail, dict):
        return JSONResponse({"error": error.detail}, status_code=status)
    message = str(error.detail)
    if message in ("Not Found", "Method Not Allowed"):  # from where there is no route
        paths = ", ".join([*_HANDLERS, *sorted(_KEPT), "/metrics"])
        message = f"{request.method} {request.url.path} is not served here; there are: {paths}"
    return JSONResponse({"error": refusal(message)}, status_code=status)


class _OneModel(ModelManager):
    """Has one model, loaded already, under the name that it is served by."""

    def __init__(self, batcher: Batcher, name: str):
        super().__init__()
        self.force_model, self._batcher = name, batcher
        self._created = int(time.time())  # when it was served first, as vLLM has it
        self.bounds = Bounds.of(batcher.model, batcher.tokenizer)
        self.vocabulary = batcher.model.config.get_text_config(decoder=True).vocab_size

    def load_model_and_processor(self, *given: Any, **options: Any) -> Any:
        return self._batcher.model, self._batcher.tokenizer

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id  # answers name it as requests do

    def get_gen_models(self, *given: Any) -> list[dict[str, Any]]:  # type: ignore[override]
        told = {"id": self.force_model, "object": "model", "created": self._created}
        return [told | {"owned_by": "headstart"}]

    def shutdown(self) -> None:
        pass
