"""Measures parts of the suite, one after another, and puts their report together.

Every part stands alone, writes each of its entries to `OUTPUT/PART.json` as soon as it is known,
and goes on where it was cut off: an entry that is there is not measured again. `report` needs the
files alone, and puts together what is there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from . import cost_parts, decoding_parts
from .entries import Entries, write_json
from .job import PARTS, Job
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


def run_suite(job: Job) -> tuple[dict[str, Any], bool]:
    """Measure the parts of a job, one after another.

    Returns:
        The report of all parts that are there (see `report`), and whether every entry
        of this run could be measured.
    """
    whole = True
    scale = json.loads(json.dumps(asdict(job.scale)))  # as it is read back from a file
    conditions = {"size": job.size, "scale": scale, **machine(job.on)}
    for part in job.parts:
        if part == "report":
            continue
        print(f"{part}: {PARTS[part]}", file=sys.stderr)
        own = conditions | ({"corpus": job.corpus} if job.corpus else {})
        entries = Entries(job.folder / f"{part}.json", part, own, job.fresh)
        MEASURE[part](job, entries)
        whole = whole and not entries.errors
    found = report(job.folder, draw="report" in job.parts)
    if "report" in job.parts:
        write_json(job.folder / "report.json", found)
    return found, whole
