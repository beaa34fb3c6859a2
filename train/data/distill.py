"""The distillation stage: a writer makes the rows that the drafter is trained on.

The result is a fixed number of shards, each written whole or not at all, so that a run killed
anywhere goes on with the missing ones, with any number of processes; and `manifest.json`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headstart.heads.artifacts.manifest import fingerprint, library_versions, tokenizer_hash
from headstart.heads.core import counted
from headstart.heads.core.files import write_atomically
from headstart.infer.measure.progress import progress_bar

from ..processes.agreement import Total, wait_for_all
from ..processes.memory import WRITING, enough_memory
from ..recipe import Chat, Distill
from .documents import Document
from .prefixes import chat_renderer
from .training_rows import Row, Rows, is_whole, write_shard
from .writers import make_writer, not_taken, taken
from .writers.drafting import CHOICE
from .writers.units import Counts, Writer

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_NOT_TAKEN = "not_taken"  # documents beyond distill.examples
ROUNDS = "rounds"  # a folder beside the shards, with one for each round


@dataclass(frozen=True)
class Pace:
    """What all processes wrote, and how long that took."""

    tokens: int  # supervised ones: neither prompts nor padding
    seconds: float


def distill(
    spec: Distill,
    target: PreTrainedModel | Callable[[], PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    folder: Path,
    seed: int = 0,
    rank: int = 0,
    world: int = 1,
    progress: bool = True,
    chat: Chat | None = None,
    name: str = "",
    shards: range | None = None,
    choice: Path | None = None,
    agree: Callable[[Any], Any] = lambda value: value,
) -> Pace:
    """Write those of the missing shards that are this process's into `folder`.

    A row is drawn by (seed, its unit), with sampling noise keyed by the same, so it is the same
    whichever process writes it, before or after a kill. A process begins no further shard that
    would not be whole after `spec.max_seconds`, by the mean time of those before, also before a
    kill; but it writes at least one.

    Args:
        target: the model, or what loads it, which is called only where the model is needed.
        name: the target's, which a server is asked for.
        shards: the numbers of those that are written; all by default.
        choice: the folder in which the choice of a drafter is kept; `folder` by default.
        agree: gives the value of one process to all that run the target together, each of which
            writes all shards, into a folder of its own.

    Raises:
        DistillError: no document gives a prompt, rows are longer than the target's context, the
            template refuses a chat, or the server does not answer.
    """
    writer = make_writer(spec, target, tokenizer, documents, choice or folder, seed, chat, name)
    writer.choose()
    there = len(documents) - writer.skipped
    if rank == 0 and (shards is None or not shards.start) and (said := taken(spec, there)):
        logger.warning("distill: %s", said)
    # By number, not by place among the missing shards: the processes look at different moments.
    numbers = [k for k in shards or range(spec.shards) if k % world == rank]
    own = agree([k for k in numbers if not is_whole(shard_path(folder, k, spec.shards))])
    known = [_seconds(folder, k, spec.shards) for k in numbers if k not in own]
    timed = [float(path.read_text()) for path in known if path.is_file()]
    for shard in set(numbers).difference(own):  # a kill may have come just before this
        writer.done(shard_units(writer.units, spec.shards, shard))
    # Of all processes, but for those that write the same.
    due, done, tokens = (Total(world > 1) for _ in range(3))
    mine = sum(len(shard_units(writer.units, spec.shards, shard)) for shard in own)
    due.add(mine)
    # Under a limit it is over the share of the texts or of the time, whichever is further.
    limit = None if spec.max_seconds is None else max(spec.max_seconds - sum(timed), 1e-3)
    over: tuple = (due.add(), "distill", "text") if limit is None else (1.0, "distill")
    bar = progress_bar(*over, disable=not progress)
    started = time.perf_counter()

    def tick(units: int, count: int) -> None:
        done.add(units)
        tokens.add(count)
        if progress:
            show()

    def show() -> None:
        reached: float = done.add()
        spent, texts = time.perf_counter() - started, due.add()
        said = f"{tokens.add() / spent:.0f} tokens/s"
        if limit is None:
            bar.total = texts
        else:
            said = f"{reached:.0f} of {counted(texts, 'text')}, {said}"
            reached = min(max(reached / max(texts, 1), spent / limit), 1.0)
        bar.set_postfix_str(said, refresh=False)
        bar.update(reached - bar.n)

    for shard in own:
        count, seconds = agree((len(timed), sum(timed)))
        if count and spec.max_seconds and seconds * (count + 1) / count > spec.max_seconds:
            break
        begun = time.perf_counter()
        units = shard_units(writer.units, spec.shards, shard)
        info: dict[str, Any] = {"units": len(units), "of": writer.units}
        left = {"skipped": writer.skipped, _NOT_TAKEN: not_taken(spec, there)}
        info |= {name: count for name, count in left.items() if count}
        rows = _counted(writer, units, tick, info)
        with enough_memory(WRITING):
            write_shard(shard_path(folder, shard, spec.shards), rows, info)
        writer.done(units)
        timed.append(time.perf_counter() - begun)
        if spec.max_seconds:
            write_atomically(_seconds(folder, shard, spec.shards), f"{timed[-1]:.3f}\n")
    if world > 1:
        wait_for_all(show if progress else lambda: None)
    bar.close()
    return Pace(tokens.add(), time.perf_counter() - started)


def _counted(
    writer: Writer, units: range, tick: Callable[[int, int], Any], info: dict[str, Any]
) -> Iterator[Row]:
    """The rows of units; in the end `info` has what became of the units."""
    counts = Counts()
    for written in writer.write(units, tick):
        counts += written.counts
        yield from written.rows
    info |= counts.known()


def shard_units(units: int, shards: int, shard: int) -> range:
    """The units of one shard: contiguous, and together all of them."""
    return range(units * shard // shards, units * (shard + 1) // shards)


def shard_path(folder: Path, shard: int, shards: int) -> Path:
    """Where a shard is written, without the suffixes of its files."""
    return folder / f"train-{shard:05d}-of-{shards:05d}"


def _seconds(folder: Path, shard: int, shards: int) -> Path:
    """The file with the time that a shard took, which counts for `distill.max_seconds`."""
    return shard_path(folder, shard, shards).with_suffix(".seconds")


def summary(spec: Distill, folder: Path) -> dict[str, int]:
    """What was written, by the names of `Counts`, and `shards`; what was left out is logged."""
    told = [info for info in Rows.load(folder).info if not info.get("earlier")]
    shards, units = len(told), sum(said["units"] for said in told)
    if shards < spec.shards:
        logger.warning(
            "distill: stopped at distill.max_seconds=%g, with %d of %d texts (%d of %d shards)",
            spec.max_seconds or 0, units, told[0]["of"], shards, spec.shards,
        )  # fmt: skip
    names = Counts.__dataclass_fields__
    found = Counts(**{n: sum(said.get(n, 0) for said in told) for n in names})
    for line in found.left_out(spec):
        logger.warning("distill: %s", line)
    skipped = told[0].get("skipped", 0)
    if skipped:
        why = f"shorter than distill.prefix_tokens {spec.prefix_tokens}"
        if spec.writer != "own" or spec.prefix == "prompt":
            why = "each asks what another one does, and would be answered alike"
        logger.warning("distill: %s skipped: %s", counted(skipped, "document"), why)
    left = {name: told[0][name] for name in ("skipped", _NOT_TAKEN) if told[0].get(name)}
    return {"shards": shards, **found.known(), **left}


def write_manifest(
    spec: Distill,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    target: PreTrainedModel | None,
    name: str,
    pace: Pace,
    chat: Chat | None = None,
) -> dict[str, Any]:
    """Write `manifest.json` into `folder` and return the counts in it.

    Args:
        target: None where it was not loaded; its fingerprint is then null.
        pace: since the run was last started.
    """
    counts = summary(spec, folder)
    speed = pace.tokens / pace.seconds if pace.tokens else 0.0
    choices = [folder / CHOICE, *sorted(folder.glob(f"{ROUNDS}/*/{CHOICE}"))]
    drafting = [json.loads(path.read_text()) for path in choices if path.exists()]
    manifest = {
        "counts": counts,
        "writer": spec.writer,
        "drafting": drafting,  # of each round in which there was a drafter
        "target": name,
        "target_fingerprint": None if target is None else fingerprint(target),
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "template_hash": chat_renderer(tokenizer, chat, spec.chat).template_hash,
        "settings": {"distill": asdict(spec), "chat": asdict(chat or Chat())},
        "tokens_per_second": round(speed, 1),  # since it was last started
        "versions": library_versions(),
    }
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=2, allow_nan=False) + "\n")
    return counts
