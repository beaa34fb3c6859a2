"""Seconds and memory from a file of chats to what a training or a target reads, paired.

    python -m benchmarks.synthetic_chats 50 chats.jsonl
    python -m benchmarks.preparation_cost chats.jsonl TOKENIZER --before ../older-checkout

Both checkouts run in processes of their own, in turns; a line of JSON tells of each. The jobs:

- `prompts`: the corpus, then the ids of every prompt of every chat (`distill.prefix: prompt`);
- `rows`: the corpus, then given answers as training rows with their loss masks, in shards. A
  checkout without loss masks makes the ids of whole chats instead, which is less.

What a checkout imports is imported before the clock starts.

Memory is what a process and its children hold alone, without mapped files, at the most (Linux:
`Anonymous` of smaps_rollup, looked at twenty times a second from outside), and what it held before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LONG = 1_000_000  # tokens of a prompt or a row at most


def private_megabytes(process: int) -> float:
    """Memory of a process and its children that is neither shared nor a file's."""
    found = 0.0
    for each in [process, *children(process)]:
        try:
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        found += sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
    return found / 1000


def children(process: int) -> list[int]:
    """All processes below one."""
    found: list[int] = []
    for listed in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            found += map(int, listed.read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found + [below for child in found for below in children(child)]


class Peak(threading.Thread):
    """The memory of a process at first, and the most between `start` and `join`."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self.process, self.done = process, threading.Event()
        self.before = self.megabytes = private_megabytes(process)

    def run(self) -> None:
        while not self.done.wait(0.05):
            self.megabytes = max(self.megabytes, private_megabytes(self.process))


def prepare(
    job: str, source: Path, tokenizer: Any, folder: Path, begin: Callable[[], Any]
) -> dict[str, float]:
    """Do a job once by the checkout that is imported; returns seconds of its parts, and counts.

    `begin` is called when all is imported.
    """
    try:
        from headstart.train.data.corpus import build_corpus, load_documents
        from headstart.train.data.prefixes import encode, make_prefixes
        from headstart.train.recipe import Corpus, Distill
    except ImportError:  # the layout of earlier checkouts
        from headstart.train.corpus import build_corpus, load_documents  # type: ignore
        from headstart.train.prefixes import encode, make_prefixes  # type: ignore
        from headstart.train.recipe import Corpus, Distill  # type: ignore
    distill, masks = None, "writer" in Distill.__dataclass_fields__
    if masks:
        from headstart.train.data.distill import distill
    begin()
    started = time.perf_counter()
    build_corpus(Corpus(source=str(source), max_bytes=10**12, held_out=0.02), folder)
    corpus = time.perf_counter() - started
    documents = load_documents(folder, "train")
    found: dict[str, float] = {"corpus_seconds": round(corpus, 2), "documents": len(documents)}
    if job == "prompts":
        spec = Distill(prefix="prompt", prefix_tokens=LONG)
        prefixes = make_prefixes(spec, tokenizer, documents)
        return found | {"rows": len(prefixes), "tokens": sum(map(len, prefixes.rows))}
    if distill is None:
        rows = encode(tokenizer, documents)
        return found | {"rows": len(rows), "tokens": sum(map(len, rows))}
    spec = Distill(
        writer="given", prefix="prompt", examples=len(documents), max_length=LONG, shards=8
    )
    distill(spec, no_target, tokenizer, documents, folder / "rows", progress=False)
    shards = [json.loads(path.read_text()) for path in (folder / "rows").glob("train-*.json")]
    return found | {name: sum(s[name] for s in shards) for name in ("rows", "tokens", "supervised")}


def no_target() -> Any:
    raise AssertionError("given answers need no target")


def measure(job: str, source: Path, tokenizer_at: Path) -> dict[str, float]:
    """Do a job once and measure it."""
    from transformers import AutoTokenizer

    tokenizer, at_first = AutoTokenizer.from_pretrained(tokenizer_at), []

    def begin() -> None:
        print(flush=True)
        sys.stdin.readline()  # whoever measures memory is ready
        at_first.extend([time.perf_counter(), sum(os.times()[:4])])

    with tempfile.TemporaryDirectory() as folder:
        found = prepare(job, source, tokenizer, Path(folder), begin)
        seconds, busy = time.perf_counter() - at_first[0], sum(os.times()[:4]) - at_first[1]
    return {"seconds": round(seconds, 2), "cpu_seconds": round(busy, 2), **found}


def run(root: Path, job: str, options: argparse.Namespace) -> dict[str, float]:
    """`measure` in a process of its own, by the checkout at `root`."""
    command = [sys.executable, str(Path(__file__).resolve()), str(options.chats.resolve())]
    command += [str(options.tokenizer.resolve()), "--worker", job]
    environment = os.environ | {"PYTHONPATH": str(root), "TOKENIZERS_PARALLELISM": "true"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=root, env=environment, text=True, stdin=pipe, stdout=pipe
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        peak = Peak(process.pid)
        peak.start()
        print(file=process.stdin, flush=True)
        found = process.stdout.readlines()
        peak.done.set()
        peak.join()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    memory = {"megabytes_before": round(peak.before), "megabytes": round(peak.megabytes)}
    return json.loads(found[-1]) | memory


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("chats", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--before", type=Path, help="the other checkout")
    parser.add_argument("--jobs", nargs="+", default=["prompts", "rows"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measure(options.worker, options.chats, options.tokenizer)))
        return
    roots = {"before": options.before.resolve()} if options.before else {}
    roots["after"] = ROOT
    for job in options.jobs:
        ratios = []
        for _ in range(options.repeats):
            found = {name: run(root, job, options) for name, root in roots.items()}
            for name, measured in found.items():
                print(json.dumps({"job": job, "checkout": name, **measured}), flush=True)
            if options.before:
                ratios.append(found["before"]["seconds"] / found["after"]["seconds"])
        if ratios:
            print(json.dumps({
                "job": job, "times_faster": round(statistics.median(ratios), 2),
                "least": round(min(ratios), 2), "most": round(max(ratios), 2),
            }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
