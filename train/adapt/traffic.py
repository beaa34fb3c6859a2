"""What recorded requests say of themselves: who answered, by which settings, at which lengths."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..data.documents import CorpusError
from ..data.file_rows import READERS, file_kind, read_rows
from ..data.parsing import IDS
from ..data.reading import source_files
from ..recipe import Source

_SAMPLING = ("temperature", "top_p", "top_k")


class AdaptError(ValueError):
    """A drafter that cannot be adapted, or traffic that it cannot be adapted to."""


@dataclass
class Traffic:
    """Requests, counted; no text of theirs is kept.

    Attributes:
        source: the file, folder or glob.
        size: bytes of their text, at most.
        writers: of each (fingerprint, name) of a target, how many requests it has answered; None
            for what a request does not say.
        settings: of each sampling, as JSON, how many requests used it.
        answers, wholes: tokens of each answer, and of prompt and answer, where they were recorded.
    """

    source: str
    requests: int = 0
    size: int = 0
    writers: Counter[tuple[str | None, str | None]] = field(default_factory=Counter)
    settings: Counter[str] = field(default_factory=Counter)
    answers: list[int] = field(default_factory=list)
    wholes: list[int] = field(default_factory=list)

    @property
    def sampling(self) -> dict[str, Any]:
        """The settings that most requests used; greedy where none says any."""
        return json.loads(max(self.settings, key=self.settings.__getitem__, default="{}"))

    def check_writer(self, fingerprint: str, target: str) -> None:
        """Raise AdaptError where requests say that another model has answered them."""
        others = {
            (known, name): count
            for (known, name), count in self.writers.items()
            if known is not None and known != fingerprint
        }
        if others:
            (known, name), _ = max(others.items(), key=lambda found: found[1])
            raise AdaptError(
                f"{self.source}: {sum(others.values())} of {self.requests} requests "
                f"were answered by another model ({name or 'without a name'}, fingerprint "
                f"{str(known)[:12]}) than {target} ({fingerprint[:12]}); leave them out, adapt "
                "that model's drafter, or let this target answer anew (--rewrite)"
            )


def read_traffic(source: str) -> Traffic:
    """Read all requests once. Raises CorpusError for a missing file, AdaptError where none is."""
    traffic = Traffic(source)
    for path in source_files(Source(source=source)).values():
        if file_kind(path) in READERS:
            _add(traffic, path)
    if not traffic.requests:
        raise AdaptError(
            f"{source}: no request found; expected JSONL such as generate --record, "
            "or headstart.Recorder, writes"
        )
    return traffic


def longest(lengths: Sequence[int]) -> int | None:
    """A length that 95% of the requests do not exceed; None where none was recorded."""
    return int(np.ceil(np.quantile(lengths, 0.95))) if lengths else None


def _add(traffic: Traffic, path: Path) -> None:
    packed = path.suffix in (".gz", ".parquet")
    traffic.size += path.stat().st_size * (20 if packed else 2)
    for _, row in read_rows(path)[1]:
        if isinstance(row, CorpusError) or not isinstance(row, dict):
            continue  # the corpus counts it
        traffic.requests += 1
        names = (row.get("target_fingerprint"), row.get("model"))
        fingerprint, name = (each if isinstance(each, str) else None for each in names)
        traffic.writers[fingerprint, name] += 1
        if isinstance(sampling := row.get("sampling"), dict):
            given = {name: sampling.get(name) for name in _SAMPLING}
            # Where a request names no temperature, servers and `generate` sample at 1.
            known: dict[str, Any] = {k: v for k, v in given.items() if _is_number(v)}
            known["temperature"] = float(known.get("temperature", 1))
            traffic.settings[json.dumps(known, sort_keys=True)] += 1
        prompt, answer = (row.get(name) for name in IDS)
        if isinstance(prompt, list) and isinstance(answer, list):
            traffic.answers.append(len(answer))
            traffic.wholes.append(len(prompt) + len(answer))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
