"""Requests to an OpenAI-compatible server, repeated until they are answered.

By the standard library, and over proxies as the environment names them. Neither keys nor what is
sent appear in errors.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import logging
import os
import random
import threading
import time
import urllib.error
import urllib.request
from typing import Any

from ...recipe import OpenAI
from ..prefixes import DistillError

logger = logging.getLogger(__name__)

_AGAIN = {408, 409, 425, 429, 500, 502, 503, 504, 529}
_REFUSED = {400, 413, 422}
_LONGEST_PAUSE = 60.0  # seconds, unless the server asks for more
_BROKEN = (
    urllib.error.URLError, http.client.HTTPException, OSError, json.JSONDecodeError,
    UnicodeDecodeError,
)  # fmt: skip


class RefusedError(Exception):
    """The server will not answer this very request, for instance since it is too long."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would take the key to another host."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class Client:
    """Talks to one server.

    Args:
        stop: when it is set, no request is repeated any more.

    Raises:
        DistillError: the variable that should hold the key is not set.
    """

    def __init__(self, spec: OpenAI, stop: threading.Event | None = None):
        self.spec, self.name = spec, spec.url.rstrip("/")
        self.refusal, self.answered = 0, 0  # the status of the last refusal; answers so far
        self._stop = stop or threading.Event()
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if spec.api_key_env:
            key = os.environ.get(spec.api_key_env, "").strip()
            if not key:
                raise DistillError(
                    f"distill.openai.api_key_env names the variable {spec.api_key_env}, which is "
                    "not set; set it to the server's key, or set api_key_env=null."
                )
            self._headers["Authorization"] = f"Bearer {key}"
        self._open = urllib.request.build_opener(_NoRedirects).open

    def greet(self) -> None:
        """Raise DistillError where nobody answers at the address, or the key is not accepted."""
        request = urllib.request.Request(f"{self.name}/models", headers=self._headers)
        try:
            with self._open(request, timeout=self.spec.timeout):
                pass
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (401, 403):
                raise DistillError(self._said(f"status {error.code}", error.code)) from None
        except _BROKEN as error:
            reason = getattr(error, "reason", None) or error
            if not isinstance(reason, TimeoutError):  # a busy server may be slow
                raise DistillError(
                    f"{self.name}: {type(reason).__name__}; start the server, or correct "
                    "distill.openai.url."
                ) from None

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The server's answer to a JSON body.

        Raises:
            RefusedError: the request itself is at fault.
            DistillError: no answer after all retries, or one that repeating will not change.
        """
        url, data = f"{self.name}/{path}", json.dumps(body).encode()
        for attempt in range(self.spec.retries + 1):
            asked: float | None = None
            try:
                request = urllib.request.Request(url, data, self._headers)
                with self._open(request, timeout=self.spec.timeout) as answer:
                    found = json.loads(answer.read().decode())
                self.answered += 1
                return found
            except urllib.error.HTTPError as error:
                status = error.code
                asked = _retry_after(error.headers.get("Retry-After"))
                error.close()
                if status in _REFUSED:
                    self.refusal = status
                    raise RefusedError from None
                if status not in _AGAIN:
                    raise DistillError(self._said(f"status {status}", status)) from None
                problem = f"status {status}"
            except _BROKEN as error:
                reason = getattr(error, "reason", None) or error
                problem = type(reason).__name__
            if attempt == self.spec.retries:
                raise DistillError(
                    f"{self.name}: {problem}, after {attempt + 1} tries; finished shards are kept: "
                    "run again when the server answers, or raise distill.openai.retries or timeout."
                )
            pause = _pause(attempt) if asked is None else asked
            logger.info("%s: %s; next try in %.1f s", self.name, problem, pause)
            if self._stop.wait(pause):
                raise DistillError(f"{self.name}: {problem}, and the run is being ended.")
        raise AssertionError("every try returns or raises")

    def _said(self, problem: str, status: int) -> str:
        hints = {
            401: "check the key in the variable that distill.openai.api_key_env names",
            403: "check the key in the variable that distill.openai.api_key_env names",
            404: "check distill.openai.url (it mostly ends in /v1) and distill.openai.model",
        }
        redirect = "give the address that it redirects to as distill.openai.url"
        hint = redirect if 300 <= status < 400 else hints.get(status, "check the server's log")
        return f"{self.name}: {problem}; {hint}."


def _pause(attempt: int) -> float:
    """Seconds before the next try: about 0.5, 1, 2, 4, …; drawn, so that requests spread out."""
    return min(_LONGEST_PAUSE, 0.5 * 2**attempt) * random.uniform(0.5, 1.0)


def _retry_after(value: str | None) -> float | None:
    """The seconds that a Retry-After header asks for, given as a number or a date; at most 600."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError):
            return None
    return min(max(seconds, 0.0), 600.0)
