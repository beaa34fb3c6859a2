"""What a server tells Prometheus of its requests, under the names of vLLM's metrics.

`headstart:` stands in place of `vllm:`. No text of a request is in them.
"""

from __future__ import annotations

import threading
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
    from headstart.infer import Batcher, Emitted, Stats

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0),
)

_COUNTERS = {
    "prompt_tokens": "Tokens of the prompts of answers.",
    "prefix_cache_queries": "Tokens of prompts, which might be cached.",
    "prefix_cache_hits": "Tokens of prompts that were cached already.",
    "generation_tokens": "Tokens of answers.",
    "spec_decode_num_drafts": "Rounds of decoding, of each request.",
    "spec_decode_num_draft_tokens": "Nodes of the rounds' trees below their roots.",
    "spec_decode_num_accepted_tokens": "Tokens of answers that were drafted.",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": "Seconds from a request to its first token.",
    "request_time_per_output_token_seconds": "Mean seconds of a token after the first.",
    "e2e_request_latency_seconds": "Seconds from a request to its answer's end.",
}


class Metrics:
    """Counts what the requests for one model do.

    Args:
        name: of the model, the label `model_name` of each metric.
        batcher: whose waiting requests are told.
    """

    def __init__(self, name: str, batcher: Batcher):
        self._registry, self._name = CollectorRegistry(), name
        self._open, self._lock = 0, threading.Lock()
        waiting = self._made(Gauge, "num_requests_waiting", "Requests that wait for their turn.")
        waiting.set_function(lambda: batcher.waiting)
        running = self._made(Gauge, "num_requests_running", "Requests that are decoded.")
        running.set_function(lambda: max(self._open - batcher.waiting, 0))
        self._counters = {name: self._made(Counter, name, said) for name, said in _COUNTERS.items()}
        self._seconds = {
            name: self._made(Histogram, name, said) for name, said in _HISTOGRAMS.items()
        }
        self._by_depth = self._made(
            Counter, "spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by their depth in the tree, 0 for the first.", "position",
        )  # fmt: skip
        self._ended = self._made(
            Counter, "request_success", "Requests that ended, by stop, length, abort or error.",
            "finished_reason",
        )  # fmt: skip

    def _made(self, kind: type[Any], name: str, said: str, *labels: str) -> Any:
        options: dict[str, Any] = {"buckets": _SECONDS} if kind is Histogram else {}
        names = ("model_name", *labels)
        made = kind(f"headstart:{name}", said, names, registry=self._registry, **options)
        return made if labels else made.labels(self._name)

    def told(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self._registry)

    @contextmanager
    def request(self, prompt: int, streamer: Any) -> Iterator[Watched]:
        """Count a request with a prompt of so many tokens, which is decoded meanwhile."""
        watched = Watched(streamer)
        with self._lock:
            self._open += 1
        try:
            yield watched
            self._count(prompt, watched)
        except BaseException as error:
            watched.reason = "abort" if isinstance(error, Left) else "error"
            raise
        finally:
            self._ended.labels(self._name, watched.reason).inc()
            with self._lock:
                self._open -= 1

    def _count(self, prompt: int, watched: Watched) -> None:
        stats, written, seconds = watched.stats, watched.written, self._seconds
        now = time.perf_counter()
        drafted = stats.drafted_tokens, stats.accepted_tokens
        counts = (prompt, prompt, stats.kept_tokens, written, stats.rounds, *drafted)
        for name, count in zip(_COUNTERS, counts, strict=True):
            self._counters[name].inc(count)
        depths = stats.drafted.depths
        for position, count in enumerate(np.bincount(depths[depths > 0])[1:].tolist()):
            self._by_depth.labels(self._name, str(position)).inc(count)
        seconds["time_to_first_token_seconds"].observe(watched.first - watched.asked)
        seconds["e2e_request_latency_seconds"].observe(now - watched.asked)
        if written > 1:
            mean = (now - watched.first) / (written - 1)
            seconds["request_time_per_output_token_seconds"].observe(mean)


class Watched(RoundStreamer):
    """A request's streamer that also tells when the first token is there.

    Attributes:
        asked, first: when the request and its first token came, in seconds.
        reason, stats, written: why the request ended, what its rounds did, and the number of its
            answer's tokens; set once it has ended.
    """

    reason: str
    stats: Stats
    written: int

    def __init__(self, streamer: Any):
        self._own, self.asked, self.first = streamer, time.perf_counter(), 0.0

    def left(self) -> bool:
        return self._own.left()

    def put(self, value: Any) -> None:
        self._own.put(value)

    def put_round(self, emitted: Emitted) -> None:
        self.first = self.first or time.perf_counter()
        hand_on(self._own, emitted)

    def end(self) -> None:
        self._own.end()
