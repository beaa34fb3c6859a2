"""What a server tells Prometheus of its requests, under the names of vLLM's metrics.

`headstart:` stands in place of `vllm:`. No text of a request is in them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from headstart.infer import RoundStreamer
from headstart.infer.streamer import hand_on

from .streamers import Left

if TYPE_CHECKING:
    from headstart.infer import Emitted, Stats

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0),
)


class Metrics:
    """Counts what the requests for one model do.

    Args:
        name: of the model, the label `model_name` of each metric.
    """

    def __init__(self, name: str):
        self.registry, self._name = CollectorRegistry(), name
        self.waiting = self._made(
            Gauge, "num_requests_waiting", "Requests without a token yet, their prefill included."
        )
        self.running = self._made(
            Gauge, "num_requests_running", "Requests with a token, whose answer goes on."
        )
        self.prompts = self._made(Counter, "prompt_tokens", "Tokens of answered prompts.")
        self.written = self._made(Counter, "generation_tokens", "Tokens of answers.")
        self.rounds = self._made(
            Counter, "spec_decode_num_drafts", "Rounds: with the tokens of answers they give τ."
        )
        self.accepted = self._made(
            Counter, "spec_decode_num_accepted_tokens", "Drafted tokens that were accepted."
        )
        self._by_depth = self._made(
            Counter, "spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by their depth in the tree, 0 for the first.", "position",
        )  # fmt: skip
        self._ended = self._made(
            Counter, "request_success", "Requests that ended, by stop, length, abort or error.",
            "finished_reason",
        )  # fmt: skip
        self.first = self._made(
            Histogram, "time_to_first_token_seconds", "Seconds from a request to its first token."
        )
        self.each = self._made(
            Histogram, "request_time_per_output_token_seconds",
            "Mean seconds of a token after the first.",
        )  # fmt: skip
        self.whole = self._made(
            Histogram, "e2e_request_latency_seconds", "Seconds from a request to its answer's end."
        )

    def _made(self, kind: type[Any], name: str, said: str, *labels: str) -> Any:
        options: dict[str, Any] = {"buckets": _SECONDS} if kind is Histogram else {}
        made = kind(
            f"headstart:{name}", said, ("model_name", *labels), registry=self.registry, **options
        )
        return made if labels else made.labels(self._name)

    def told(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self.registry)

    @contextmanager
    def request(self, prompt: int, streamer: Any) -> Iterator[Watched]:
        """Count a request with a prompt of so many tokens while it is decoded."""
        watched = Watched(self, prompt, streamer)
        try:
            yield watched
        except BaseException as error:
            watched.close("abort" if isinstance(error, Left) else "error")
            raise

    def count(self, stats: Stats, prompt: int, tokens: int) -> None:
        """Add what an answer of so many tokens took."""
        self.prompts.inc(prompt)
        self.written.inc(tokens)
        self.rounds.inc(stats.rounds)
        depths = stats.drafted.depths
        by_depth = np.bincount(depths[depths > 0])[1:].tolist()
        self.accepted.inc(sum(by_depth))
        for position, number in enumerate(by_depth):
            self._by_depth.labels(self._name, str(position)).inc(number)

    def end(self, reason: str) -> None:
        """Count a request that ended so."""
        self._ended.labels(self._name, reason).inc()


class Watched(RoundStreamer):
    """A request's streamer, which also tells when the first token is there."""

    def __init__(self, metrics: Metrics, prompt: int, streamer: Any):
        self._metrics, self._prompt, self._own = metrics, prompt, streamer
        self._asked, self._first = time.perf_counter(), 0.0
        metrics.waiting.inc()

    def put(self, value: Any) -> None:
        self._own.put(value)

    def put_round(self, emitted: Emitted) -> None:
        if not self._first:
            self._first = time.perf_counter()
            self._metrics.waiting.dec()
            self._metrics.running.inc()
            self._metrics.first.observe(self._first - self._asked)
        hand_on(self._own, emitted)

    def end(self) -> None:
        self._own.end()

    def close(self, reason: str, stats: Stats | None = None, tokens: int = 0) -> None:
        """Count the request as one that has ended, with an answer of so many tokens."""
        metrics, now = self._metrics, time.perf_counter()
        (metrics.running if self._first else metrics.waiting).dec()
        metrics.end(reason)
        if stats is None:
            return
        metrics.count(stats, self._prompt, tokens)
        metrics.whole.observe(now - self._asked)
        if tokens > 1:
            metrics.each.observe((now - self._first) / (tokens - 1))
