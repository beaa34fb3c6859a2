"""A local server that speaks as much of the OpenAI protocol as distillation uses, with faults."""

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sk-secret-0123456789"
FAULTS = ("429", "500", "drop", "stall", "half", "no json")


def answer_to(messages: list[dict[str, str]]) -> str:
    """What the server answers: a function of the whole chat so far."""
    said = hashlib.sha256(json.dumps(messages).encode()).hexdigest()
    return f"it is {said[:8]}"


class Chats(ThreadingHTTPServer):
    """Counts what it was asked and what it answered; a fault for every `every`-th request.

    Args:
        choice: what is answered to a chat, as an item of the protocol's `choices`.
    """

    daemon_threads = True

    def __init__(
        self,
        every: int = 0,
        stall: float = 1.0,
        status: int | None = None,
        choice: Callable[[list[dict[str, Any]]], dict[str, Any]] | None = None,
    ):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.every, self.stall, self.status = every, stall, status
        self.choice = choice or (
            lambda chat: {"message": {"content": answer_to(chat)}, "finish_reason": "stop"}
        )
        self.requests, self.faults = 0, Counter[str]()
        self.answered: Counter[str] = Counter()  # by the chat's JSON
        self.lock = threading.Lock()
        self.bodies: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that were killed are no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._say(200, {"data": []})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        assert isinstance(server, Chats)
        with server.lock:
            server.requests += 1
            server.bodies.append(body | {"key": self.headers.get("Authorization")})
            number = server.requests
        if server.status is not None:
            self._say(server.status, {"error": body["messages"]})
            return
        fault = None
        if server.every and number % server.every == 0:
            fault = FAULTS[number // server.every % len(FAULTS)]
            with server.lock:
                server.faults[fault] += 1
        found = {"choices": [server.choice(body["messages"])], "usage": {"completion_tokens": 7}}
        if fault == "429":
            self._say(429, {}, {"Retry-After": "0.02"})
        elif fault == "500":
            self._say(500, {})
        elif fault == "drop":
            self.close_connection = True
        elif fault == "stall":
            time.sleep(server.stall)
            self.close_connection = True
        elif fault == "half":
            self._say(200, found, cut=True)
        elif fault == "no json":
            self._write(200, b"<html>busy</html>", {})
        else:
            with server.lock:
                server.answered[json.dumps(body["messages"])] += 1
            self._say(200, found)

    def _say(
        self, status: int, body: Any, headers: dict[str, str] | None = None, cut: bool = False
    ) -> None:
        data = json.dumps(body).encode()
        self._write(status, data[: len(data) // 2] if cut else data, headers or {}, len(data))

    def _write(
        self, status: int, data: bytes, headers: dict[str, str], length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length or len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.close_connection = True


@contextmanager
def serving(**how: Any):
    """A server that runs in a thread of this process."""
    server = Chats(**how)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
