"""Access tokens and texts stay where they belong, in a whole run and when it fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.paths import ROOT
from tests.support.recipes import TINY

TOKEN = "hf_" + "cDeFgHiJkLmNoPqRsTuVwXyZ01234567"
PRIVATE = "the patient told nobody else"

TWICE = """
import shutil, sys
from headstart.cli import main
recipe, run, kept = sys.argv[1:]
assert main(["train", recipe]) == 0
shutil.copytree(run, kept)
sys.exit(main(["train", recipe, "decode.validation_prompts=100000"]) and 3)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(12):
        (texts / f"{number}.txt").write_text(f"{number} {PRIVATE}\n" * 60)
    path = tmp_path / "tiny.yaml"
    corpus = {"source": str(texts), "held_out": 0.4}
    path.write_text(yaml.safe_dump(TINY | {"output": str(tmp_path / "runs"), "corpus": corpus}))
    return path


def holders(folder: Path, secret: str) -> set[str]:
    """The files under `folder` that hold the secret, however they are laid out."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return {str(p.relative_to(folder)) for p in files if secret.encode() in p.read_bytes()}


def test_a_run_keeps_them(recipe: Path, tmp_path: Path) -> None:
    """The texts are in the corpus they came from, not in the drafter; the token is nowhere.

    Then a failure in the middle, with its traceback: the run, asked for what it cannot give.
    """
    run, kept = tmp_path / "runs" / "tiny", tmp_path / "kept"
    done = subprocess.run(
        [sys.executable, "-c", TWICE, str(recipe), str(run), str(kept)],
        cwd=ROOT,
        env={**os.environ, "HF_TOKEN": TOKEN, "HEADSTART_DEBUG": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1 and "Traceback" in done.stderr, done.stderr
    assert holders(kept / "corpus", PRIVATE) == {"train.jsonl", "held_out.jsonl"}  # the control
    assert holders(kept / "heads", PRIVATE) == set()
    for secret in (TOKEN, PRIVATE):
        assert secret not in done.stdout + done.stderr
    assert holders(kept, TOKEN) == set() == holders(run, TOKEN)
