"""The folder that `headstart bench` writes: page, pictures, figures, and what was emitted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from .pages import write_bench_page
from .tables import to_json

if TYPE_CHECKING:
    from headstart.measuring import Measured

RESULTS, EMITTED = "results.json", "emitted.jsonl"


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
    return write_bench_page(measured, folder)
