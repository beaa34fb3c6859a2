"""What decides a stage's result: settings, and the files and Hub revisions that they name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headstart.heads.artifacts.hub import model_commit
from headstart.heads.artifacts.manifest import sha256
from headstart.heads.core.files import write_atomically, writing

NOT_DECIDING = frozenset({
    # how much is done at once, or where; results agree but for rounding
    "distill.batch_size", "distill.shards", "distill.drafter", "distill.use_drafter",
    "distill.rounds", "distill.round_steps",
    "distill.openai.url", "distill.openai.api_key_env", "distill.openai.concurrency",
    "distill.openai.retries", "distill.openai.timeout",
    "train.feature_cache_mb", "train.feature_disk_gb", "train.dataloader_workers", "train.compile",
    "train.activation_checkpointing", "target.device_map", "target.tp_plan",
    "target.attn_implementation",
    # rows of another run, which are named by their content
    "distill.earlier", "distill.earlier_share",
    # what is told of it
    "train.report_to",
    # the stage that is continued is named apart
    "train.extend",
})  # fmt: skip
"""Settings of a recipe, by their paths, that do not decide what a stage makes."""


def deciding(recipe: dict[str, Any], sections: Iterable[str]) -> dict[str, Any]:
    """The settings of some sections of a recipe, as plain data, that decide a stage's result.

    >>> deciding({"distill": {"shards": 8, "examples": 4}, "seed": 0}, ["distill", "seed"])
    {'distill': {'examples': 4}, 'seed': 0}
    """

    def without(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            return value
        keys = [key for key in value if f"{path}.{key}" not in NOT_DECIDING]
        return {key: without(value[key], f"{path}.{key}") for key in keys}

    return {name: without(recipe[name], name) for name in sections}


class FileHashes:
    """The sha256 of files, kept in a file by path, size and time so that none is read twice."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self._known = {}
        self._changed = False

    def of(self, file: Path) -> str:
        """The sha256 of a file's content; a blob of the Hub's cache is named by it."""
        real = file.resolve()
        if re.fullmatch(r"[0-9a-f]{64}", real.name):
            return real.name
        found = real.stat()
        key, seen = str(real), [found.st_size, found.st_mtime_ns]
        if self._known.get(key, [None])[:-1] != seen:
            self._known[key] = [*seen, sha256(real)]
            self._changed = True
        return self._known[key][-1]

    def save(self) -> None:
        """Keep what was found."""
        if self._changed:
            with writing("what is known of files", self.path.parent):
                write_atomically(self.path, json.dumps(self._known))
            self._changed = False


def model_fingerprint(name: str, hashes: FileHashes, revision: str | None = None) -> dict[str, str]:
    """What stands for a model's present content.

    Of a folder the sha256 of all that transformers reads in it: config, tokenizer, chat template
    and weights; of a Hub name the commit that it stands for now, or that is in the cache. Raises
    ArtifactError where neither is there.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        kinds = {".json", ".jinja", ".txt", ".model", ".safetensors", ".bin", ".py"}
        files = sorted(p for p in folder.iterdir() if p.suffix in kinds and p.is_file())
        return {file.name: hashes.of(file) for file in files if file.name != "stage.json"}
    return {"commit": model_commit(name, revision)}
