"""Rows of another run that are trained on beside the new ones, so that they are not forgotten."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from headstart.heads.artifacts.manifest import tokenizer_hash

from ..recipe import Distill
from .distill import MANIFEST
from .prefixes import DistillError
from .training_rows import Row, Rows, write_shard

logger = logging.getLogger(__name__)

_SHARD = "train-earlier"  # its name, which sorts after those with numbers


def earlier_rows(spec: Distill, tokenizer: PreTrainedTokenizerBase | None) -> Rows | None:
    """The rows of `spec.earlier`; None where none are asked for.

    Args:
        tokenizer: None while it is not known.

    Raises:
        DistillError: there are none, or another tokenizer made them.
    """
    if spec.earlier is None or not spec.earlier_share:
        return None
    written = Path(spec.earlier) / MANIFEST
    if not written.is_file():
        raise DistillError(
            f"distill.earlier: {spec.earlier} holds no {MANIFEST}; expected the folder `distill` "
            "of a run."
        )
    known = json.loads(written.read_text(encoding="utf-8")).get("tokenizer_hash")
    if tokenizer is not None and known != tokenizer_hash(tokenizer):
        raise DistillError(
            f"distill.earlier: the rows in {spec.earlier} are of another tokenizer; set "
            "distill.earlier=null."
        )
    return Rows.load(Path(spec.earlier))


def add_earlier(
    spec: Distill, folder: Path, tokenizer: PreTrainedTokenizerBase, seed: int
) -> dict[str, int]:
    """Copy rows of `spec.earlier` into a further shard of `folder`; returns how many.

    They are drawn by the seed, until they have `spec.earlier_share` of all supervised tokens.

    Raises DistillError, see `earlier_rows`.
    """
    earlier = earlier_rows(spec, tokenizer)
    if earlier is None:
        return {}
    found = Rows.load(folder)
    new = sum(info["supervised"] for info in found.info if not info.get("earlier"))
    due = new * spec.earlier_share / (1 - spec.earlier_share)
    order = torch.randperm(len(earlier), generator=torch.Generator().manual_seed(seed)).tolist()
    taken = 0

    def drawn() -> Iterator[Row]:
        nonlocal taken
        supervised = 0
        for number in order:
            if supervised >= due:
                return
            row = earlier.row(number)
            supervised += int(row.supervised.sum())
            taken += 1
            yield replace(row, id=f"earlier:{number}")

    write_shard(folder / _SHARD, drawn(), {"units": 0, "of": 0, "earlier": True})
    logger.info("distill: %d rows of %s are added", taken, spec.earlier)
    return {"earlier_rows": taken}
