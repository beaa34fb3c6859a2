"""Requests of several threads, decoded together."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from headstart.heads import OptionError
from headstart.heads.core import RowSettings, in_parts

from .continuous import Stream
from .decoding_method import DecodingMethod, Given
from .generate_options import Ending
from .log_probabilities import LogProbabilities
from .prompts import Manner, Piece, Prompt
from .request import Request
from .rules.registry import find_rule
from .runners import settings_of
from .speculator import Speculator
from .stats import Drafted, Emitted, Stats
from .streamer import Left, RoundStreamer, hand_on
from .tensor_parallel import leads
from .trees.by_request import heat_of

_WAITS = 5.0  # seconds in which a thread ends that decodes when the interpreter ends

_exits, _starts = threading.Event(), threading.Lock()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """End what decodes before the interpreter ends, which would abort it amid torch's code."""
    with _starts:  # from now on none is
        _exits.set()
    for thread in [*_threads]:
        thread.join(_WAITS)


@dataclass(eq=False)
class _Job:
    """A request that waits, or is being decoded.

    Attributes:
        manner: how it is decoded beside others; None for one that is decoded by itself.
        alike: equal for requests that are decoded in the same manner.
        begun: when it was taken into a batch, of `time.perf_counter`.
        pieces: of its text, or the error that ended all that were decoded with it.
        left: whether nobody waits for it any longer.
        turn: set once it may be decoded by itself; done: once it has been.
    """

    prompt: Prompt | None = None
    manner: Manner | None = None
    alike: Hashable = None
    begun: float = 0.0
    pieces: SimpleQueue[Piece | Exception] = field(default_factory=SimpleQueue)
    stopped: bool = False
    left: Callable[[], bool] = lambda: False
    turn: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.stats = Stats()


class Batcher(DecodingMethod):
    """Decodes the requests of several threads together, by continuous batching.

        batcher = headstart.Batcher(speculator, rows=8)
        output = batcher.generate(**inputs, max_new_tokens=128)   # in each thread

    `generate` takes and returns what `Speculator.generate` does, and the text is the same but for
    near-ties: a forward over more rows may round otherwise. With a rule such as `rejection`, whose
    text depends on what was drafted, it has the same distribution. Requests join and leave the
    batch at any round, each with a length, seed, streamer and stopping criteria of its own.

    Requests are decoded together that have one prompt and the same end tokens. They may differ in
    temperature, top-k, top-p, min-p, repetition, presence and frequency penalty, `logprobs`,
    `no_repeat_ngram_size`, `min_length`, `min_new_tokens`, `grammar`, and `sequence_bias` and
    `bad_words_ids` of single tokens, and greedy ones are decoded beside sampled ones where the
    speculator's rule has the text of plain decoding (`coupled`, the default, and `match`). Other
    settings must be the same, and those that read the text (such as `bad_words_ids` of several
    tokens) are decoded by themselves, as is what else is asked for. Requests are taken in the order
    in which they came: one that cannot join those that are being decoded, waits until these have
    ended, and later ones wait for it.

    The cache has space for the longest of the requests in every row, so memory grows with both.
    Where a GPU has too little, fewer rows are decoded together. An error that concerns one request
    is raised for that one alone.

    Args:
        speculator: what else is asked of it meanwhile waits.
        rows: requests that are decoded together, at most.

    Attributes:
        stats: what the calling thread's last request did, without the time that it waited.

    Raises:
        OptionError: rows is below 1.
    """

    def __init__(self, speculator: Speculator, rows: int = 8):
        if not isinstance(rows, int) or rows < 1:
            raise OptionError(f"rows is {rows!r}; expected a whole number, at least 1.")
        if in_parts(speculator.model) and not leads(speculator.model):
            raise OptionError(
                "the target's layers are divided among processes, to each of which requests may "
                "come in another order; load it with tensor_parallel in a single process."
            )
        self.speculator, self.rows, self.tokenizer = speculator, rows, speculator.tokenizer
        self._lock = threading.Lock()
        self._waiting: deque[_Job] = deque()
        self._works = False  # whether a thread decodes what waits
        self._own = _OfThread()

    def __repr__(self) -> str:
        return f"Batcher({self.speculator!r}, rows={self.rows})"

    @property
    def model(self) -> PreTrainedModel:
        return self.speculator.model

    @property
    def stats(self) -> Stats:  # type: ignore[override]
        return self._own.stats

    @property
    def waiting(self) -> int:
        """How many requests wait for their turn."""
        with self._lock:
            return len(self._waiting)

    def _write_nothing(self, rows: int) -> None:
        self._own.stats = Stats()
        self._own.stats.drafted = Drafted.nothing(rows)

    def _decode(self, given: Given, streamer: BaseStreamer | None) -> Any:
        request, ending, mask = self.speculator.request_of(*given)
        config, input_ids = (
            given.generation_config or given.model.generation_config,
            given.input_ids,
        )
        job = self._job(request, ending, input_ids, mask, config)
        if isinstance(streamer, RoundStreamer):
            job.left = streamer.left
        if self.speculator.in_request:
            raise OptionError(
                "this batcher was called from within a request of its speculator, by a processor, "
                "criterion or streamer; make another one with Speculator(model, …) for that."
            )
        with self._lock:
            self._waiting.append(job)
            if not self._works:
                self._works = True
                self._start()
        if job.manner is None:
            if (seeds := request.sampling.seeds) is not None:
                given = given._replace(seed=seeds.tolist())  # which may have been drawn just now
            return self._by_itself(job, given, streamer)
        heat = heat_of(config.do_sample, config.temperature)
        depth = self.speculator.tree_of(1, heat).max_depth
        text = self._follow(job, depth, _Text(input_ids, ending), streamer)
        ending.warn_of_length(text)
        if not config.return_dict_in_generate:
            return text
        return GenerateDecoderOnlyOutput(sequences=text)  # type: ignore[arg-type]

    def _start(self) -> None:
        """Let a thread decode what waits; none when the interpreter ends."""
        with _starts:
            if not _exits.is_set():
                works = threading.Thread(target=self._work, name="headstart-batcher", daemon=True)
                _threads.add(works)
                works.start()

    def _follow(self, job: _Job, depth: int, text: _Text, streamer: BaseStreamer | None) -> Tensor:
        """Take a request's text as it is written, until it or its criteria end it: [1, P + new]."""
        self._own.stats = stats = Stats(depth)
        ended = False
        try:
            if streamer is not None:
                streamer.put(text.sequences.cpu())
            while not ended:
                piece = job.pieces.get()
                if isinstance(piece, Exception):
                    raise piece
                assert piece.emitted is not None
                emitted, met = text.add(piece.emitted)
                ended = met or piece.ended
                stats.add(emitted)
                stats.kept_tokens = piece.kept_tokens
                stats.prefill_seconds = stats.prefill_seconds or time.perf_counter() - job.begun
                hand_on(streamer, emitted)
        finally:
            job.stopped = True
        if streamer is not None:
            streamer.end()
        stats.decode_seconds = time.perf_counter() - job.begun - stats.prefill_seconds
        stats.drafted, stats.logprobs = text.drafted, text.logprobs
        return text.sequences

    def _job(
        self,
        request: Request,
        ending: Ending,
        input_ids: Tensor,
        mask: Tensor,
        config: GenerationConfig,
    ) -> _Job:
        """How a request is decoded, of prompts [B, P] with a mask [B, P]."""
        sampling, limit = request.sampling, self.speculator.target.limit
        rows, width = input_ids.shape
        prompt = Prompt(None, input_ids[mask > 0].tolist(), ending.limit - width)
        penalty: Any = sampling.penalty
        apart = sampling.readers or (penalty is not None and penalty.prompt_ignore_length)
        # What reads the text counts its padding, too.
        apart = apart or (sampling.of_text and not bool(mask.all()))
        # A speculator asks criteria between rounds, so that none is captured; a stream's are asked
        # beside them, by the request's own thread.
        captured = bool(ending.others) and self.speculator.graphs is not None
        together = (
            (self.rows > 1 or captured) and rows == 1 and not apart and request.record is None
        )
        if limit is not None:
            together = together and prompt.longest <= limit.positions
        if not together:
            return _Job()
        if sampled := sampling.seeds is not None:
            prompt = replace(prompt, seed=int(sampling.seeds[0]))
        eos, processors = tuple(ending.eos), sampling.processors
        settings = RowSettings.of(processors, sampled, eos)
        if settings is None:
            heat = heat_of(config.do_sample, config.temperature)
            manner = Manner(eos, heat, processors)
            kind = sampled, *map(settings_of, processors or ())
        else:
            prompt, manner = replace(prompt, settings=settings), Manner(eos)
            # Of the other rules none decodes greedily beside rows that are sampled.
            kind = sampled and not find_rule(self.speculator.rule).same_text
        job = _Job(None, manner, (kind, frozenset(eos)))
        job.prompt = replace(prompt, key=job, logprobs=request.logprobs)
        return job

    def _by_itself(self, job: _Job, given: Given, streamer: BaseStreamer | None) -> Any:
        try:
            job.turn.wait()
            output = self.speculator._decode(given, streamer)
            self._own.stats = self.speculator.stats
            return output
        finally:
            job.done.set()

    def _work(self) -> None:
        """Decode what waits, until nothing does."""
        while (job := self._next()) is not None:
            if job.manner is None:
                job.turn.set()
                job.done.wait()
            else:
                self._decode_with(job, job.manner)

    def _next(self) -> _Job | None:
        with self._lock:
            while self._waiting and not _exits.is_set():
                job = self._waiting.popleft()
                if _is_wanted(job):
                    return job
            self._works = False
            return None

    def _next_like(self, alike: Hashable, count: int) -> list[_Job]:
        """So many of the first requests that wait, as far as they are alike."""
        found = []
        with self._lock:
            while self._waiting and self._waiting[0].alike == alike and len(found) < count:
                if _is_wanted(job := self._waiting.popleft()):
                    found.append(job)
        return found

    def _decode_with(self, job: _Job, manner: Manner) -> None:
        """Decode a request, and those that can join it, until no more of them come."""
        jobs = [job]
        try:
            with self.speculator.reserved():
                stream = Stream(self.speculator, manner, self.rows)
                stream.add(_begun(jobs))
                while not stream.ended and not _exits.is_set():
                    if more := self._next_like(job.alike, stream.room):
                        jobs += more
                        stream.add(_begun(more))
                    if gone := [each for each in jobs if each.stopped]:
                        stream.stop(_prompts(gone))
                        jobs = [each for each in jobs if not each.stopped]
                    for piece in stream.round():
                        piece.prompt.key.pieces.put(piece.error or piece)
                        if piece.ended and piece.prompt.key in jobs:
                            jobs.remove(piece.prompt.key)
        except Exception as error:
            for each in jobs:
                each.pieces.put(error)


def _is_wanted(job: _Job) -> bool:
    """Whether a request is to be decoded; it is told if it is not."""
    try:
        if job.manner is not None and job.left():
            raise Left
    except Exception as error:
        job.pieces.put(error)
        return False
    return not job.stopped


def _begun(jobs: Sequence[_Job]) -> list[Prompt]:
    """The prompts of requests that are taken into a batch now."""
    for job in jobs:
        job.begun = time.perf_counter()
    return _prompts(jobs)


def _prompts(jobs: Sequence[_Job]) -> list[Prompt]:
    return [job.prompt for job in jobs if job.prompt is not None]


class _Text:
    """A request's text as it grows, on the host, so that its thread waits for no round of others.

    Attributes:
        sequences: [1, P + new] on the prompt's device, the prompt included.
    """

    def __init__(self, prompt: Tensor, ending: Ending):
        self._ids = prompt.cpu()  # with room to grow
        self._length, self._criteria = prompt.shape[1], ending.others
        self._device, self._rounds = prompt.device, list[Emitted]()

    def add(self, emitted: Emitted) -> tuple[Emitted, bool]:
        """Take what a round emitted for the row: so much of it as is kept, and whether it ends."""
        count = int(emitted.count[0])
        tokens = torch.from_numpy(emitted.tokens[0, :count])
        if (missing := self._length + count - self._ids.shape[1]) > 0:
            more = max(missing, self._ids.shape[1] // 2)
            self._ids = torch.nn.functional.pad(self._ids, (0, more))
        self._ids[0, self._length : self._length + count] = tokens
        kept = next((n for n in range(1, count + 1) if self._ends_after(n)), None)
        self._rounds.append(replace(emitted, count=np.array([kept or count])))
        self._length += kept or count
        return self._rounds[-1], kept is not None

    def _ends_after(self, count: int) -> bool:
        """Whether the criteria hold so many tokens later, asked as `generate` asks."""
        if not self._criteria:
            return False
        written = self._ids[:, : self._length + count].to(self._device)
        return bool(self._criteria(written, None))  # type: ignore[arg-type]

    @property
    def sequences(self) -> Tensor:
        return self._ids[:, : self._length].to(self._device)

    @property
    def drafted(self) -> Drafted:
        """Who wrote each new token."""
        kept = [(each, slice(int(each.count[0]))) for each in self._rounds]
        depths = [each.depths[:, count] for each, count in kept]
        drafters = [each.drafters[:, count] for each, count in kept]
        return Drafted(np.concatenate(depths, 1), np.concatenate(drafters, 1))

    @property
    def logprobs(self) -> LogProbabilities | None:
        """Those of each new token; None where none were asked for."""
        found = [(each.logprobs, int(each.count[0])) for each in self._rounds]
        kept = [each.first(count) for each, count in found if each is not None]
        return LogProbabilities.joined(kept) if kept else None
