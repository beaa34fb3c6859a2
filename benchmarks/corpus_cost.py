"""Seconds and memory that the corpus stage takes for a file of chats.

    python -m benchmarks.synthetic_chats 50 chats.jsonl
    python -m benchmarks.corpus_cost chats.jsonl --repeats 3

prints one line of JSON a repeat. Run with PYTHONPATH at another checkout it measures that one, by
`python benchmarks/corpus_cost.py`. Memory is what the process alone holds, without mapped files, at
the most (Linux: `Anonymous` of smaps_rollup, looked at twenty times a second), and what it held
before.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path

from headstart.train.data.corpus import build_corpus
from headstart.train.recipe import Corpus


def private_megabytes() -> float:
    """Memory of this process that is neither shared nor a file's."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) / 1000
    raise OSError("/proc/self/smaps_rollup has no line Anonymous")


class Peak(threading.Thread):
    """The most memory between `start` and `join`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.megabytes, self.done = 0.0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.05):
            self.megabytes = max(self.megabytes, private_megabytes())


def measure(source: Path) -> dict[str, float]:
    """Prepare the corpus of a file once."""
    before, peak = private_megabytes(), Peak()
    peak.start()
    with tempfile.TemporaryDirectory() as folder:
        started, busy = time.perf_counter(), time.process_time()
        counts = build_corpus(
            Corpus(source=str(source), max_bytes=10**12, held_out=0.02), Path(folder)
        )
        seconds, busy = time.perf_counter() - started, time.process_time() - busy
    peak.done.set()
    peak.join()
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(busy, 2),
        "megabytes_before": round(before),
        "megabytes": round(peak.megabytes),
        "documents": counts["train_documents"] + counts["held_out_documents"],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("chats", type=Path)
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    for _ in range(options.repeats):
        print(json.dumps(measure(options.chats)), flush=True)
