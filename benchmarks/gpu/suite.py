"""Measures parts of the suite, one after another, and puts their report together.

Every part stands alone, writes each of its entries to `OUTPUT/PART.json` as soon as it is known,
and goes on where it was cut off: an entry that is there is not measured again. `report` needs the
files alone, and puts together what is there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from . import cost_parts, decoding_parts
from .entries import Entries, write_json
from .job import PARTS, UNTIMED, Job
from .machine import machine
from .report import report

MEASURE: dict[str, Callable[[Job, Entries], None]] = {
    "bandwidth": cost_parts.bandwidth,
    "heads": decoding_parts.heads,
    "acceptance": decoding_parts.acceptance,
    "identity": decoding_parts.identity,
    "baselines": decoding_parts.baselines,
    "batches": decoding_parts.batches,
    "costs-1b": partial(cost_parts.costs, "costs-1b"),
    "costs-8b": partial(cost_parts.costs, "costs-8b"),
    "batches-8b": partial(cost_parts.batch_costs, "batches-8b"),
}
"""The function of each part except `report`, which measures nothing."""


def run_apart(job: Job) -> bool:
    """Measure the parts by a process for each family; whether all of them could be.

    What is of no family is measured by the first one. Progress and errors are theirs. With several
    jobs, what takes no times comes first, for as many families at once.
    """
    measured = [part for part in job.parts if part != "report"]
    if not measured:
        return True
    if job.fresh:  # the files are shared, so none of the processes may begin them anew
        for part in measured:
            (job.folder / f"{part}.json").unlink(missing_ok=True)
    line = [sys.executable, "-m", "benchmarks.gpu", "--device", job.device, "--size", job.size]
    line += ["--output", str(job.folder), "--trained", str(job.trained)]
    line += [] if job.corpus is None else ["--corpus", job.corpus]
    line += [] if job.vocabulary is None else ["--vocabulary", str(job.vocabulary)]

    def measure(parts: Sequence[str], family: str) -> bool:
        print(f"{family}:", file=sys.stderr)
        chosen = [word for part in parts for word in ("--part", part)]
        done = subprocess.run(
            [*line, *chosen, "--family", family], stdout=subprocess.DEVNULL, check=False
        )
        return done.returncode == 0

    ahead = [part for part in measured if part in UNTIMED] if job.jobs > 1 else []
    timed = [part for part in measured if part not in ahead]
    found: list[bool] = []
    if ahead:
        # The first family alone, since its target and text are what the others are trained with.
        found.append(measure(ahead[:1], job.families[0]))
        with ThreadPoolExecutor(job.jobs) as pool:
            found += pool.map(partial(measure, ahead), job.families)
    if timed:
        found += [measure(timed, family) for family in job.families]
    return all(found)


def run_suite(job: Job) -> tuple[dict[str, Any], bool]:
    """Measure the parts of a job, one after another.

    Returns:
        The report of all parts that are there (see `report`), and whether every entry
        of this run could be measured.
    """
    if job.apart:
        whole, job = run_apart(job), replace(job, parts=tuple({*job.parts} & {"report"}))
    else:
        whole = True
    scale = json.loads(json.dumps(asdict(job.scale)))  # as it is read back from a file
    measured = [part for part in job.parts if part != "report"]
    conditions = {"size": job.size, "scale": scale, **machine(job.on)} if measured else {}
    for part in measured:
        print(f"{part}: {PARTS[part]}", file=sys.stderr)
        own = conditions | ({"corpus": job.corpus} if job.corpus else {})
        entries = Entries(job.folder / f"{part}.json", part, own, job.fresh)
        MEASURE[part](job, entries)
        whole = whole and not entries.errors
    found = report(job.folder, draw="report" in job.parts)
    if "report" in job.parts:
        write_json(job.folder / "report.json", found)
    return found, whole
