"""Access tokens and texts stay where they belong, in a whole run and when it fails."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "hf_" + "cDeFgHiJkLmNoPqRsTuVwXyZ01234567"
PRIVATE = "the patient told nobody else"

TINY: dict[str, Any] = {
    "name": "tiny",
    "corpus": {"held_out": 0.4},
    "target": {
        "scratch": {
            "vocab_size": 300, "hidden_size": 32, "layers": 1, "intermediate_size": 64,
            "context": 128, "sequence_length": 32, "max_seconds": None, "max_tokens": 4000,
        },
    },
    "distill": {
        "examples": 16, "prefix_tokens": 16, "new_tokens": 16, "batch_size": 8, "shards": 2,
    },
    "drafter": {"family": "medusa", "heads": 2},
    "train": {"batch_size": 4, "max_steps": 8, "eval_every": 4},
    "decode": {
        "tree": "sparse:4", "prompts": 2, "prefix_tokens": 16, "new_tokens": 16,
        "validation_prompts": 2,
    },
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(12):
        (texts / f"{number}.txt").write_text(f"{number} {PRIVATE}\n" * 60)
    path = tmp_path / "tiny.yaml"
    settings = {"output": str(tmp_path / "runs"), "corpus": {"source": str(texts)}}
    settings["corpus"] |= TINY["corpus"]
    path.write_text(yaml.safe_dump(TINY | settings))
    return path


def headstart(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headstart", *arguments],
        cwd=ROOT,
        env={**os.environ, "HF_TOKEN": TOKEN, "HEADSTART_DEBUG": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def holders(folder: Path, secret: str) -> set[str]:
    """The files under `folder` that hold the secret, however they are laid out."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return {str(p.relative_to(folder)) for p in files if secret.encode() in p.read_bytes()}


def test_a_run_keeps_them(recipe: Path, tmp_path: Path) -> None:
    """The texts are in the corpus they came from, not in the drafter; the token is nowhere."""
    done = headstart("train", str(recipe))
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "tiny"
    assert holders(run / "corpus", PRIVATE) == {"train.jsonl", "held_out.jsonl"}  # the control
    assert holders(run / "heads", PRIVATE) == set()
    assert holders(run, TOKEN) == set()
    assert PRIVATE not in done.stdout + done.stderr

    # A failure in the middle, with its traceback: the same run, asked for what it cannot give.
    failed = headstart("train", str(recipe), "decode.validation_prompts=100000")
    assert failed.returncode == 1 and "Traceback" in failed.stderr
    for secret in (TOKEN, PRIVATE):
        assert secret not in failed.stdout + failed.stderr + done.stdout + done.stderr
    assert holders(run, TOKEN) == set()
