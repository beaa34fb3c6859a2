"""`headstart bench --suite gpu`: what the runtime costs and is worth on one machine, in parts.

Every part stands alone, writes each of its entries to `OUTPUT/<part>.json` as soon as it is known,
and takes up where it was cut off: an entry that is there is not measured again. `report` needs the
files alone, and puts together what is there.
"""

from __future__ import annotations

import difflib
import functools
import gc
import json
import os
import platform
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart import __version__
from headstart.inputs import UsageError, find_device, one_line

if TYPE_CHECKING:
    import torch

PARTS = {
    "bandwidth": "how fast the device copies its own memory",
    "heads": "target, its text and a drafter of every family, trained here",
    "acceptance": "what the trained drafters have accepted, round by round",
    "identity": "greedy text in float32 against `generate`, by family",
    "contenders": "trees and chains against `generate`, its assistant and its prompt lookup",
    "batches": "batches against plain decoding of the same batch, with the planner's trees",
    "costs-1b": "plain tokens, trees and rounds at a 1 B shape, random weights",
    "costs-8b": "the same at an 8 B shape",
    "batches-8b": "the planner's costs at the 8 B shape, by batch",
    "report": "table, plots and bars from the files of the other parts",
}
"""Every part in the order of a whole run."""

SUITES = ("gpu",)


@dataclass(frozen=True)
class Scale:
    """How large everything is.

    Attributes:
        dtype: of the models, where float32 is not what is tested.
        shapes: the random targets of the cost parts, by part.
        copies: MiB, what is copied.
        context, long_context: tokens in the cache of the random targets.
        tokens: decoded behind them; repeats: turns of each; turns: of the contenders that decode
            with the trained target.
        trees: nodes of the trees verified; long_trees: behind the long context.
        nodes, depth: the largest and deepest tree planned.
        prompts, written: of the trained target's decoding: how many, and how long their answers.
        batches: rows decoded at once.
        recipe: overrides of `gpu-suite`.
    """

    dtype: str = "bfloat16"
    shapes: Mapping[str, str] = field(
        default_factory=lambda: {"costs-1b": "1b", "costs-8b": "8b", "batches-8b": "8b"}
    )
    copies: tuple[int, ...] = (64, 256, 1024, 4096)
    context: int = 2048
    long_context: int = 32_768
    tokens: int = 48
    repeats: int = 5
    turns: int = 3
    trees: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 96, 128)
    long_trees: tuple[int, ...] = (1, 16, 64)
    nodes: int = 64
    depth: int = 8
    prompts: int = 24
    written: int = 128
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    recipe: tuple[str, ...] = ()


SCALES = {
    "full": Scale(),
    "toy": Scale(
        dtype="float32",
        shapes={"costs-1b": "toy", "costs-8b": "toy", "batches-8b": "toy"},
        copies=(1, 4),
        context=96,
        long_context=192,
        tokens=8,
        repeats=2,
        turns=1,
        trees=(1, 64, 128),
        long_trees=(1, 64),
        nodes=6,
        depth=3,
        prompts=4,
        written=12,
        batches=(2,),
        recipe=(
            *("corpus.source=stdlib", "corpus.max_bytes=120000", "corpus.held_out=0.4"),
            *("target.dtype=float32", "target.scratch.vocab_size=300"),
            *("target.scratch.hidden_size=32", "target.scratch.layers=2"),
            *("target.scratch.heads=2", "target.scratch.intermediate_size=64"),
            *("target.scratch.context=128", "target.scratch.sequence_length=32"),
            *("target.scratch.batch_size=8", "target.scratch.max_seconds=null"),
            *("target.scratch.max_tokens=6000", "distill.examples=24"),
            *("distill.prefix_tokens=16", "distill.new_tokens=16", "distill.batch_size=8"),
            *("distill.shards=4", "distill.max_seconds=null", "train.batch_size=4"),
            *("train.max_steps=8", "train.max_seconds=null", "decode.tree=sparse:4"),
            *("decode.prefix_tokens=16", "decode.new_tokens=12", "decode.validation_prompts=2"),
        ),
    ),
}


@dataclass(frozen=True)
class Job:
    """What is measured, on what, and where it goes.

    Attributes:
        parts: in the order of a whole run.
        families: of the drafters.
        trained: the folder of the runs that train target and drafters.
        corpus: the text in place of the recipe's; None for that one.
    """

    parts: tuple[str, ...]
    device: str
    size: str
    folder: Path
    trained: Path
    families: tuple[str, ...]
    corpus: str | None = None
    fresh: bool = False

    @property
    def scale(self) -> Scale:
        """How large everything is."""
        return SCALES[self.size]

    @functools.cached_property
    def on(self) -> torch.device:
        """The device."""
        import torch

        return torch.device(self.device)

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """The models' dtype."""
        import torch

        return getattr(torch, self.scale.dtype)


def make_job(
    suite: str,
    parts: Sequence[str] | None,
    device: str | None,
    size: str | None,
    output: Path | None,
    trained: Path | None,
    families: Sequence[str] | None,
    corpus: str | None,
    fresh: bool,
) -> Job:
    """Check what the command line says; None is what it leaves open.

    Raises:
        UsageError: an unknown suite, part or family, or a GPU that is not there.
    """
    from headstart.heads.drafter import FAMILIES

    _known("--suite", [suite], SUITES)
    chosen = tuple(part for part in PARTS if part in _known("--part", parts or PARTS, PARTS))
    if device == "cpu":
        # Training takes a GPU wherever it sees one; torch has not looked yet.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    device = find_device(device).type
    size = size or ("full" if device == "cuda" else "toy")
    folder = output or Path("runs") / f"suite-{suite}"
    return Job(
        parts=chosen,
        device=device,
        size=size,
        folder=folder,
        trained=trained or folder / "trained",
        families=tuple(_known("--family", families or tuple(FAMILIES), FAMILIES)),
        corpus=corpus,
        fresh=fresh,
    )


class Entries:
    """One part's entries, on disk as soon as they are known.

    Args:
        conditions: what an entry must have been measured with to count.
    """

    def __init__(self, path: Path, part: str, conditions: dict[str, Any], fresh: bool):
        self.path = path
        found = None if fresh else read_part(path)
        if found is None or found["conditions"] != conditions:
            found = {"part": part, "conditions": conditions, "commands": [], "entries": {}}
        self.file: dict[str, Any] = found
        self.errors: dict[str, str] = {}

    def missing(self, name: str) -> bool:
        """Whether an entry is still to be measured."""
        return "error" in self.file["entries"].get(name, {"error": ""})

    def measure(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Do the work of an entry that is missing; what it raises costs the others nothing."""
        if not self.missing(name):
            print(f"  {name}: found in {self.path}", file=sys.stderr)
            return
        print(f"  {name}", file=sys.stderr)
        begun = time.perf_counter()
        try:
            entry = work()
        except Exception as error:
            if os.environ.get("HEADSTART_DEBUG") == "1":
                traceback.print_exc()
            entry = {"error": f"{type(error).__name__}: {one_line(error)}"}
            self.errors[name] = entry["error"]
            print(f"  {name} failed: {entry['error']}", file=sys.stderr)
        gc.collect()  # a model of the last entry must not stand beside the next one's
        seconds = round(time.perf_counter() - begun, 1)
        when = datetime.now(UTC).isoformat(timespec="seconds")
        self.file["entries"][name] = {**entry, "seconds": seconds, "at": when}
        command = shlex.join(["headstart", *sys.argv[1:]])
        if command not in self.file["commands"]:
            self.file["commands"].append(command)
        write_json(self.path, self.file)


def run_suite(job: Job) -> tuple[dict[str, Any], bool]:
    """Measure the parts of a job, one after another.

    Returns:
        The report of all parts that are there (see `suite_report.report`), and whether every entry
        of this run could be measured.
    """
    from benchmarks.gpu.parts import MEASURE
    from benchmarks.gpu.report import report

    whole = True
    conditions = {"size": job.size, "scale": _plain(asdict(job.scale)), **machine(job.on)}
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


def read_part(path: Path) -> dict[str, Any] | None:
    """A part's file; None where there is none, or it is not whole."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def write_json(path: Path, document: Any) -> None:
    """Write a file that a reader sees whole or not at all."""
    from headstart.heads.core.files import write_atomically
    from headstart.reports.tables import to_json

    write_atomically(path, (to_json(document) + "\n").encode())


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures hold for: the hardware, the driver and the libraries."""
    import torch

    from headstart.heads.artifacts.manifest import library_versions
    from headstart.heads.artifacts.plan import device_name

    found: dict[str, Any] = {
        "device": device_name(device),
        "processor": _processor(),
        "versions": {"headstart": __version__, **library_versions()},
    }
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        found |= {
            "memory_bytes": gpu.total_memory,
            "multiprocessors": gpu.multi_processor_count,
            "driver": _driver(),
            "cuda": torch.version.cuda,
        }
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _driver() -> str | None:
    """The GPU driver's version, from its own tool."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else None


def _known(option: str, names: Sequence[str] | Mapping[str, Any], known: Any) -> Sequence[str]:
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
            meant = f" (did you mean {close[0]!r}?)" if close else ""
            raise UsageError(f"{option} {name!r}{meant}; expected one of {', '.join(known)}")
    return tuple(names)


def _plain(value: Any) -> Any:
    """The same as JSON reads it back."""
    return json.loads(json.dumps(value))
