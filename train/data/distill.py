"""Self-distillation: the target continues prefixes, and the drafter is trained on what it wrote.

The result is a fixed number of shards, each written whole or not at all, so that a run killed
anywhere goes on with the missing ones, with any number of processes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headstart.heads.core import row_seeds
from headstart.infer import Speculator

from ..recipe import Distill
from .documents import Document
from .prefixes import make_prefixes
from .training_rows import Row, Rows, check_context, is_whole, ragged, write_rows, write_shard

logger = logging.getLogger(__name__)


def distill(
    spec: Distill,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    folder: Path,
    seed: int = 0,
    rank: int = 0,
    world: int = 1,
    progress: bool = True,
) -> None:
    """Let the target write those of the missing shards that are this process's into `folder`.

    Row i continues a prefix of the documents that is drawn by (seed, i), with sampling noise keyed
    by (seed, i), so a row is the same whichever process writes it, before or after a kill. After
    `spec.max_seconds` no further shard is begun, but each process writes at least one. Raises
    DistillError where no document gives a prefix, or the target's context is too short.
    """
    prefixes = make_prefixes(spec, tokenizer, documents)
    check_context(spec, target)
    # Drawn for all rows at once: what row i gets does not depend on which shards are missing.
    drawn = prefixes.draw(spec.examples, seed)
    if spec.prefix != "window" and spec.temperature == 0 and len(prefixes) < spec.examples:
        logger.warning(
            "distill: %d examples of %d prefixes, so texts repeat", spec.examples, len(prefixes)
        )
    seeds = row_seeds(seed, spec.examples).tolist()
    speculator = Speculator(target)
    # By number, not by place among the missing shards: the processes look at different moments.
    numbers = range(rank, spec.shards, world)
    own = [k for k in numbers if not is_whole(shard_path(folder, k, spec.shards))]
    due = sum(len(shard_rows(spec, shard)) for shard in own)
    bar = tqdm(total=due, desc="distill", unit="row", disable=not progress)
    started = time.perf_counter()
    for done, shard in enumerate(own):
        seconds = time.perf_counter() - started
        # One shard more is expected to take the mean time of those done.
        if done and spec.max_seconds and seconds * (done + 1) / done > spec.max_seconds:
            break
        written: list[Row] = []
        rows = shard_rows(spec, shard)
        for first in range(rows.start, rows.stop, spec.batch_size):
            ids = slice(first, min(first + spec.batch_size, rows.stop))
            batch = [prefixes[number] for number in drawn[ids]]
            text = write_rows(speculator, batch, seeds[ids], spec)
            written += ragged(*text, map(str, range(ids.start, ids.stop)))
            bar.update(len(batch))
            speed = bar.n * spec.new_tokens / (time.perf_counter() - started)
            bar.set_postfix_str(f"{speed:.0f} tokens/s", refresh=False)
        write_shard(shard_path(folder, shard, spec.shards), written, {"skipped": prefixes.skipped})
    bar.close()


def shard_rows(spec: Distill, shard: int) -> range:
    """The row ids of one shard: contiguous, and together all of them."""
    return range(spec.examples * shard // spec.shards, spec.examples * (shard + 1) // spec.shards)


def shard_path(folder: Path, shard: int, shards: int) -> Path:
    """Where a shard is written, without the suffixes of its files."""
    return folder / f"train-{shard:05d}-of-{shards:05d}"


def summary(spec: Distill, folder: Path) -> dict[str, int]:
    """The shards, rows and tokens written; `skipped`, if any, are documents without a prefix."""
    rows = Rows.load(folder)
    shards = len(rows.info)
    if shards < spec.shards:
        logger.warning(
            "distill: %d of %d examples, %d of %d shards, were written in %.0f s",
            len(rows), spec.examples, shards, spec.shards, spec.max_seconds or 0,
        )  # fmt: skip
    tokens = sum(said["supervised"] for said in rows.info)
    counts = {"shards": shards, "rows": len(rows), "tokens": tokens}
    skipped = rows.info[0]["skipped"]
    if skipped:
        kind = "prompts are empty or longer" if spec.prefix == "prompt" else "documents are shorter"
        logger.warning(
            "distill: %d %s than distill.prefix_tokens %d, and were skipped",
            skipped, kind, spec.prefix_tokens,
        )  # fmt: skip
        counts["skipped"] = skipped
    return counts
