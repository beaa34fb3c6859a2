"""Data sets on the Hub, read by `datasets` as a stream.

No code of a repository is ever run: `datasets` has refused loading scripts since version 4, and a
set that is one is an error here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..recipe import Source
from .documents import CorpusError
from .file_rows import READERS, Rows, file_kind, json_rows, read_rows

PREFIX = "hub:"


@dataclass(frozen=True)
class HubSource:
    """A data set, and which part of it."""

    name: str
    split: str = "train"
    config: str | None = None
    revision: str | None = None  # a commit, a branch or a tag; main when None


# The sets that SpecForge and speculators train on. Their columns are ones that `parse_row` knows:
# `messages` in UltraChat, `conversations` in the two others.
PRESETS = {
    "sharegpt": HubSource("Aeala/ShareGPT_Vicuna_unfiltered"),
    "ultrachat": HubSource("HuggingFaceH4/ultrachat_200k", split="train_sft"),
    "perfectblend": HubSource("mlabonne/open-perfectblend"),
}


def hub_source(source: Source) -> HubSource | None:
    """What a source names on the Hub; None where it names something else. Raises CorpusError."""
    asked = {key: getattr(source, key) for key in ("split", "config", "revision")}
    given = {key: value for key, value in asked.items() if value is not None}
    if source.source.startswith(PREFIX):
        return HubSource(source.source.removeprefix(PREFIX), **given)
    if source.source in PRESETS:
        return replace(PRESETS[source.source], **given)
    if given:
        raise CorpusError(
            f"{source.source}: corpus.{min(given)} is of data sets on the Hub only; leave it out, "
            "or write hub:NAME"
        )
    return None


def commit_of(hub: HubSource) -> str:
    """The commit that a revision points at now; one that is given is not asked for."""
    from huggingface_hub import HfApi

    if hub.revision is not None and re.fullmatch(r"[0-9a-f]{40}", hub.revision):
        return hub.revision
    with _one_line(hub):
        found = HfApi().dataset_info(hub.name, revision=hub.revision, timeout=60).sha
    assert found is not None
    return found


def hub_rows(source: Source) -> Rows:
    """The rows of a split, by their number. Raises CorpusError.

    JSON, CSV and text are downloaded into huggingface_hub's cache and read as files are; `datasets`
    streams the rest.
    """
    hub = hub_source(source)
    assert hub is not None
    try:
        from datasets import load_dataset_builder
    except ImportError:
        raise CorpusError(f"hub:{hub.name}: reading it needs `pip install datasets`") from None
    commit = commit_of(hub)
    with _one_line(hub):
        # With this prefix a folder here that happens to have the set's name is not taken for it.
        place = f"hf://datasets/{hub.name}"
        builder = load_dataset_builder(place, hub.config, revision=commit)
    files = builder.config.data_files or {}
    if hub.split not in files:
        known = ", ".join(map(str, files)) or "none"
        raise CorpusError(f"hub:{hub.name} has no split {hub.split!r}; expected one of: {known}")
    names = [str(url).partition(f"@{commit}/")[2] for url in files[hub.split]]
    kinds = {file_kind(Path(name)) for name in names}
    if builder.name in ("json", "csv", "text") and kinds <= set(READERS):
        rows: Iterator[Any] = _rows_of_files(hub, commit, names)
    else:
        rows = iter(builder.as_streaming_dataset(hub.split))
    for number in itertools.count(1):
        with _one_line(hub, f" row {number}"):
            row = next(rows, None)
        if row is None:
            return
        yield number, row


def _rows_of_files(hub: HubSource, commit: str, names: list[str]) -> Iterator[Any]:
    from huggingface_hub import hf_hub_download

    for name in names:
        path = Path(hf_hub_download(hub.name, name, repo_type="dataset", revision=commit))
        rows = json_rows(path) if file_kind(path) == ".json" else read_rows(path)[1]
        for _, row in rows:
            yield row


@contextmanager
def _one_line(hub: HubSource, where: str = "") -> Iterator[None]:
    """Turn every error of the clients into one line that names the data set."""
    from huggingface_hub import errors

    transport: type[Exception] = errors.HfHubHTTPError.__bases__[0]
    try:
        yield
    except CorpusError:
        raise
    except (ValueError, OSError, RuntimeError, transport) as error:
        raise CorpusError(f"hub:{hub.name}{where}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    from huggingface_hub import errors

    from headstart.heads.artifacts.hub import reason

    said = " ".join(str(error).split())
    if "scripts are no longer supported" in said:
        return (
            "it is a loading script, which is code and is not run; try its conversion, "
            "corpus.revision=refs/convert/parquet"
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it, or name the commit (corpus.revision)"
    if isinstance(error, errors.HfHubHTTPError | errors.HFValidationError):
        return reason(error)
    if type(error).__module__.startswith("pyarrow"):
        return f"not a table that can be read ({type(error).__name__})"  # it may quote values
    if isinstance(error, ValueError) and "onfig" in said:  # datasets' message lists the configs
        return f"corpus.config: {said[:300]}"
    return reason(error)
