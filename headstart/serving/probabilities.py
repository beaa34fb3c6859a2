"""Log-probabilities of an answer's tokens, in the forms of the protocol."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headstart.heads.core.spelling import spell

from .shapes import Refused, wrong
from .stops import UntilStop

if TYPE_CHECKING:
    from headstart.infer import Emitted

MOST = 20
"""Of the most likely tokens, so many are told at most; as many as of OpenAI and vLLM."""

_INCLUDED = "message.output_text.logprobs"
_IMPOSSIBLE = -9999.0  # in the place of -inf, which JSON has no number for; vLLM says the same


def asked_probabilities(body: Mapping[str, Any]) -> int | None:
    """How many of the most likely tokens a request asks for; None where it asks for no
    probabilities at all.

    Args:
        body: of /v1/chat/completions, where `logprobs` is a truth and `top_logprobs` the number; of
            /v1/responses, where `include` asks for them in the place of `logprobs`; or of
            /v1/completions, where `logprobs` is the number.

    Raises:
        ValueError: what was found, and what was expected.

    >>> asked_probabilities({"messages": [], "logprobs": True, "top_logprobs": 2})
    2
    >>> asked_probabilities({"prompt": "Hi", "logprobs": 0})
    0
    """
    most, told = body.get("top_logprobs", 0), body.get("logprobs", False)
    number = f"a whole number from 0 to {MOST}"
    if type(most) is not int or not 0 <= most <= MOST:
        raise wrong("top_logprobs", most, number)
    if "messages" in body:
        if not isinstance(told, bool):
            raise wrong("logprobs", told, "true or false; top_logprobs is the number of tokens")
        if most and not told:
            said = f"top_logprobs is {most} without logprobs; give logprobs: true, too"
            raise Refused(said, "top_logprobs")
        return most if told else None
    if "input" in body:
        if _INCLUDED in body.get("include", ()):
            return most
        if most:
            said = f"top_logprobs is {most} and include has no {_INCLUDED!r}; give that, too"
            raise Refused(said, "top_logprobs")
        return None
    if most:
        said = f"top_logprobs is {most}, which is of /v1/chat/completions; give logprobs: {most}"
        raise Refused(said, "top_logprobs")
    if told is False:
        return None
    if type(told) is not int or not 0 <= told <= MOST:
        raise wrong("logprobs", told, number)
    return told


class Told(NamedTuple):
    """A token of an answer.

    Attributes:
        best: the most likely tokens in its place with their log-probabilities, the likeliest first.
        start: characters of the answer before it.
    """

    token: int
    logprob: float
    best: tuple[tuple[int, float], ...]
    start: int


class Log:
    """An answer's tokens with their log-probabilities, handed on once their text is.

    A token is handed on if any of its text stands before the first stop string; the end token is
    no part of the answer.

    Args:
        stops: strings, none of them empty; ends: the end tokens.
    """

    def __init__(self, stops: Sequence[str], ends: set[int]):
        self._ends, self._until = ends, UntilStop(stops)
        self._length = self._said = 0  # characters: written, and of those certain to be said
        self._waiting: list[Told] = []

    def add(self, emitted: Emitted, texts: Sequence[str]) -> None:
        """Take what a round emitted, with log-probabilities, for a single row.

        Args:
            texts: what each token adds to the answer.
        """
        found = emitted.logprobs
        assert found is not None
        for place, text in enumerate(texts):
            token = int(emitted.tokens[0, place])
            pairs = zip(
                found.best_ids[0, place].tolist(), found.best[0, place].tolist(), strict=True
            )
            if token in self._ends:
                return
            told = Told(token, float(found.chosen[0, place]), tuple(pairs), self._length)
            self._waiting.append(told)
            self._length += len(text)
            self._said += len(self._until.add(text))

    def take(self, limit: float = math.inf) -> list[Told]:
        """The tokens whose text can be said now, and was not before.

        Args:
            limit: characters of the answer; what begins later waits.
        """
        count = sum(told.start < min(self._said, limit) for told in self._waiting)
        found, self._waiting = self._waiting[:count], self._waiting[count:]
        return found

    def end(self) -> list[Told]:
        """The tokens that are left once no more follow."""
        if not self._until.met:
            self._said = self._length + 1
        return self.take()


class Spelling:
    """What tokens are called, and their bytes.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    def of(self, token: int) -> tuple[str, bytes]:
        """A token's text and bytes; of a part of a character the text names the bytes."""
        if token not in self._known:
            self._known[token] = self._of(token)
        return self._known[token]

    def _of(self, token: int) -> tuple[str, bytes]:
        (own,) = spell(self._tokenizer, [token])
        try:
            return own.decode(), own
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in own), own

    def of_chat(self, tokens: Sequence[Told]) -> dict[str, Any]:
        """The `logprobs` of a choice of /v1/chat/completions."""
        content = [
            self._entry(each.token, each.logprob)
            | {"top_logprobs": [self._entry(*pair) for pair in each.best]}
            for each in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, own = self.of(token)
        return {"token": text, "logprob": max(logprob, _IMPOSSIBLE), "bytes": list(own)}

    def of_completion(self, tokens: Sequence[Told]) -> dict[str, Any]:
        """The `logprobs` of a choice of /v1/completions; each token is among the likely ones."""
        return {
            "tokens": [self._named(each.token) for each in tokens],
            "token_logprobs": [max(each.logprob, _IMPOSSIBLE) for each in tokens],
            "top_logprobs": [
                {
                    self._named(token): max(logprob, _IMPOSSIBLE)
                    for token, logprob in reversed([*each.best, (each.token, each.logprob)])
                }
                for each in tokens
            ],
            "text_offset": [each.start for each in tokens],
        }

    def _named(self, token: int) -> str:
        text, own = self.of(token)
        return text if text.encode() == own else f"bytes:{text}"
