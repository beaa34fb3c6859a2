"""A recipe that runs in seconds, and a way to run commands."""

import os
import subprocess
from typing import Any

from tests.support.paths import ROOT

TINY: dict[str, Any] = {
    "name": "tiny",
    "corpus": {"max_bytes": 120_000, "held_out": 0.4},
    "target": {
        "scratch": {
            "vocab_size": 300, "hidden_size": 32, "layers": 2, "heads": 2,
            "intermediate_size": 64, "context": 128, "sequence_length": 32,
            "max_seconds": None, "max_tokens": 6000,
        },
    },
    "distill": {
        "examples": 24, "prefix_tokens": 16, "new_tokens": 16, "batch_size": 8, "shards": 4,
    },
    "drafter": {"family": "medusa", "heads": 2},
    "train": {"batch_size": 4, "max_steps": 12, "eval_every": 4},
    "decode": {
        "tree": "sparse:4", "prompts": 3, "prefix_tokens": 16, "new_tokens": 16,
        "validation_prompts": 2,
    },
}  # fmt: skip


def launch(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )  # fmt: skip


# One validation at the end: which checkpoint decodes best is no matter of rounding then.
SAME = ("train.eval_every=null", "distill.examples=24", "train.max_steps=6")
