"""The folder that `headstart bench` writes: page, pictures, figures, and what was emitted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.terminal import UsageError

from .tables import to_json

if TYPE_CHECKING:
    from headstart.measuring import Measured

RESULTS, EMITTED = "results.json", "emitted.jsonl"


def check_folder(folder: Path) -> Path:
    """Make the folder, or refuse it in one line, before anything is measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--report {folder}: {error.strerror}; name another folder") from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"--report {folder} cannot be written; name another folder")
    return folder


def write_bench_report(measured: Measured, folder: Path) -> Path:
    """Write `results.json`, `emitted.jsonl` and the page; returns the page.

    A line of `emitted.jsonl` is one answer: `way`, `temperature`, `batch_size`, `id`, `category`,
    `turn`, `ids`, and of each round `[tokens emitted, nodes of the accepted path]`.
    """
    document = to_json({"runs": measured.reports, "notes": measured.notes})
    (folder / RESULTS).write_text(document + "\n", encoding="utf-8")
    with (folder / EMITTED).open("w", encoding="utf-8") as file:
        for report, answers in zip(measured.reports, measured.answers, strict=True):
            for answer in answers:
                chat = measured.chats[answer.chat]
                line = {
                    "way": report["way"], "temperature": report["temperature"],
                    "batch_size": report["batch_size"], "id": chat.id, "category": chat.category,
                    "turn": answer.turn, "ids": answer.ids, "rounds": answer.rounds,
                }  # fmt: skip
                file.write(json.dumps(line) + "\n")
    return folder / RESULTS
