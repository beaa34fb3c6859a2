"""The rows that a drafter is trained on: their files, and what a language model writes for them.

A shard is a group of plain NumPy files, opened as memory maps, so that training reads from the
page cache what a batch needs, whatever the number of rows and processes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import PreTrainedConfig, PreTrainedModel

from headstart.heads.core.files import flush_to_disk, write_atomically
from headstart.infer import Speculator
from headstart.infer.generate_options import whole_distribution

from ..recipe import Distill
from .prefixes import DistillError
from .whole_files import HEADER, NumbersFile, WholeFile

logger = logging.getLogger(__name__)

_ARRAYS = {"tokens": np.int32, "supervised": np.bool_, "offsets": np.int64}  # one file each
_OPEN = 100  # shards whose files are open at once; a process may often have 1024 open files
_CHUNK = 1 << 20  # tokens that are counted at once


@dataclass(frozen=True)
class Row:
    """One training row: its tokens [L] int32, and which of them may be labels [L] bool."""

    id: str  # of the conversation or prefix it came from
    tokens: np.ndarray
    supervised: np.ndarray

    def prompt(self) -> np.ndarray:
        """The tokens before the first that is supervised, or the first one."""
        return self.tokens[: max(int(self.supervised.argmax()), 1)]


def write_shard(path: Path, rows: Iterable[Row], info: dict[str, Any]) -> None:
    """Write rows as the shard `path`, a name without suffix, while they are made.

    The files are `.tokens.npy` int32 [total], `.supervised.npy` bool [total], `.offsets.npy` int64
    [rows + 1], `.ids.txt`, an id a line in JSON, and last `.json`, without which a shard does not
    count: `info`, `rows`, `tokens`, `supervised` tokens, `left_out`, the rows without a supervised
    token, which are not written, and `ids`, the hash of `.ids.txt`. Equal rows make equal files.
    """
    _beside(path, "json").unlink(missing_ok=True)  # what replaces a shard is not yet whole
    path.parent.mkdir(parents=True, exist_ok=True)
    counts = {"rows": 0, "tokens": 0, "supervised": 0, "left_out": 0}
    ids = hashlib.sha256()
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(NumbersFile(_beside(path, f"{name}.npy"), kind))
            for name, kind in _ARRAYS.items()
        }
        names = stack.enter_context(WholeFile(_beside(path, "ids.txt")))
        files["offsets"].append(np.zeros(1))
        for row in rows:
            assert row.tokens.shape == row.supervised.shape and row.tokens.ndim == 1
            taught = int(np.count_nonzero(row.supervised))
            if not taught:
                counts["left_out"] += 1
                continue
            counts["rows"] += 1
            counts["tokens"] += len(row.tokens)
            counts["supervised"] += taught
            files["tokens"].append(row.tokens)
            files["supervised"].append(row.supervised)
            files["offsets"].append(np.array([counts["tokens"]]))
            line = (json.dumps(row.id) + "\n").encode()
            ids.update(line)
            names.file.write(line)
    with ThreadPoolExecutor() as pool:  # several take no longer than one
        list(pool.map(flush_to_disk, [file.path for file in (*files.values(), names)]))
    flush_to_disk(path.parent)
    whole = {**info, **counts, "ids": ids.hexdigest()}
    write_atomically(_beside(path, "json"), json.dumps(whole, indent=2) + "\n")


def is_whole(path: Path) -> bool:
    """Whether a shard was written to its end; `path` as in `write_shard`."""
    return _beside(path, "json").exists()


def holds_shards(folder: Path) -> bool:
    """Whether a folder holds files of shards, which need not be whole."""
    return any(folder.glob("*.supervised.npy"))


class Rows(Dataset):
    """Training rows, in files or in memory, numbered from 0 in the order of the shards.

    An item is a dict: `row` its number, `tokens` [L] int64, and `supervised` [L] bool. Threads
    may read items at the same time.

    Attributes:
        lengths: [n] int64, tokens of each row.
        offsets: [n + 1] int64, where each row begins if all rows are laid end to end.
        info: what is in the shards' `.json` files.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        paths: Sequence[Path] = (),
        first_rows: Sequence[int] = (0,),
        info: Sequence[dict[str, Any]] = (),
        memory: Sequence[Row] | None = None,
    ):
        self.lengths, self.info = lengths, list(info)
        self.offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        self._paths, self._first, self._memory = list(paths), list(first_rows), memory
        self._maps: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._opening = threading.Lock()

    @classmethod
    def load(cls, folder: Path) -> Self:
        """The whole shards of a folder, in the order of their names; tokens are not read yet.

        Raises DistillError where there is none, a shard's files do not fit together, or no row has
        a supervised token.
        """
        named = {path.name.rsplit(".", 2)[0] for path in folder.glob("*.npy")}
        paths = [folder / name for name in sorted(named) if is_whole(folder / name)]
        if not paths:
            raise DistillError(f"{folder} holds no shard; run again with --fresh.")
        info = [json.loads(_beside(path, "json").read_text()) for path in paths]
        lengths = [_lengths(path, said) for path, said in zip(paths, info, strict=True)]
        left_out = sum(said["left_out"] for said in info)
        if left_out:
            logger.warning("%d rows without a supervised token are left out", left_out)
        first = itertools.accumulate(map(len, lengths), initial=0)
        rows = cls(np.concatenate(lengths), paths, list(first), info)
        if not len(rows):
            raise DistillError(f"{folder}: no row has a supervised token; run with --fresh.")
        return rows

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Self:
        """Rows in memory."""
        memory = list(rows)
        return cls(np.array([len(row.tokens) for row in memory], np.int64), memory=memory)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = self.row(number)
        tokens = torch.from_numpy(row.tokens.astype(np.int64))
        supervised = torch.from_numpy(row.supervised.astype(np.bool_))  # a copy
        return {"row": number, "tokens": tokens, "supervised": supervised}

    def row(self, number: int) -> Row:
        """Row `number`, whose arrays are views of its file; its id is left empty, see `id`."""
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        if self._memory is not None:
            return self._memory[number]
        shard = self._shard(number)
        tokens, supervised = self._arrays(shard)
        base = int(self.offsets[self._first[shard]])
        place = slice(int(self.offsets[number]) - base, int(self.offsets[number + 1]) - base)
        return Row("", tokens[place], supervised[place])

    def id(self, number: int) -> str:
        """The id of row `number`, which is looked up in a file: for messages, not for training."""
        if self._memory is not None:
            return self._memory[number].id
        shard = self._shard(number)
        with open(_beside(self._paths[shard], "ids.txt"), encoding="utf-8") as lines:
            at = number - self._first[shard]
            return json.loads(next(itertools.islice(lines, at, None)))

    def token_counts(self, vocab_size: int) -> Tensor:
        """How often each token is supervised.  # [V]"""
        counts = np.zeros(vocab_size, np.int64)
        for tokens, supervised in self._chunks():
            counts += np.bincount(tokens[supervised], minlength=vocab_size)
        return torch.from_numpy(counts)

    def _chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        if self._memory is not None:
            yield from ((row.tokens, row.supervised) for row in self._memory)
            return
        for shard in range(len(self._paths)):
            tokens, supervised = self._arrays(shard)
            for first in range(0, len(tokens), _CHUNK):
                yield tokens[first : first + _CHUNK], supervised[first : first + _CHUNK]

    def _shard(self, number: int) -> int:
        return bisect_right(self._first, number) - 1

    def _arrays(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """The memory maps of a shard's tokens and supervised; the most recent ones stay open."""
        with self._opening:
            if shard in self._maps:
                self._maps.move_to_end(shard)
                return self._maps[shard]
            names = ("tokens.npy", "supervised.npy")
            files = (_beside(self._paths[shard], name) for name in names)
            tokens, supervised = (np.load(file, mmap_mode="r").view(np.ndarray) for file in files)
            self._maps[shard] = tokens, supervised
            if len(self._maps) > _OPEN:
                self._maps.popitem(last=False)
            return tokens, supervised


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}.{suffix}")


def _lengths(path: Path, info: dict[str, Any]) -> np.ndarray:
    """The lengths of a shard's rows.  # [rows]"""
    sizes = {"tokens": info["tokens"], "supervised": info["tokens"], "offsets": info["rows"] + 1}
    for name, kind in _ARRAYS.items():
        file, expected = _beside(path, f"{name}.npy"), HEADER + sizes[name] * kind().itemsize
        found = file.stat().st_size if file.exists() else 0
        if found != expected:
            raise DistillError(
                f"{file}: found {found} bytes, expected {expected}, as its .json file says; "
                "copy the shard again, or run with --fresh."
            )
    return np.diff(np.load(_beside(path, "offsets.npy")))


def ragged(
    tokens: Tensor, lengths: Tensor, prompt_lengths: Tensor, ids: Iterable[str]
) -> list[Row]:
    """What `write_rows` returns, as rows in which all after the prompt is supervised."""
    rows = zip(tokens.int().numpy(), lengths.tolist(), prompt_lengths.tolist(), ids, strict=True)
    return [
        Row(id, row[:length].copy(), np.arange(length) >= prompt)
        for row, length, prompt, id in rows
    ]


def context_of(config: PreTrainedConfig) -> int | None:
    """The tokens that a model can hold; None where its config does not say."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


def check_context(spec: Distill, writer: PreTrainedModel, name: str = "target") -> None:
    """Raise DistillError where rows are longer than the context of the model that writes them."""
    wanted, context = spec.row_tokens, context_of(writer.config)
    if context is None or wanted <= context:
        return
    if spec.max_length is not None:
        raise DistillError(
            f"distill.max_length is {wanted}, but the {name}'s context is {context}; lower it."
        )
    raise DistillError(
        f"distill.prefix_tokens {spec.prefix_tokens} and new_tokens {spec.new_tokens} make "
        f"{wanted} tokens, but the {name}'s context is {context}; lower one of them."
    )


def write_rows(
    speculator: Speculator, prefixes: Sequence[Tensor], seeds: list[int], spec: Distill, **how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Continue prefixes [P] of any length, row i with the noise of `seeds[i]`.

    `how` are further options of `generate`, such as another `eos_token_id` than the model's.
    Returns, on the CPU, the text [B, prefix_tokens + new_tokens], each row from column 0 on, its
    length [B], and its prefix's length [B].
    """
    if spec.temperature > 0:
        how |= {"temperature": spec.temperature, "seed": seeds}
        how |= whole_distribution(speculator.model)
    config: Any = speculator.model.generation_config
    end = how.get("eos_token_id", config.eos_token_id)
    counts = torch.tensor([len(prefix) for prefix in prefixes])
    width = int(counts.max())
    pads = width - counts  # [B], on the left
    device = speculator.model.device
    text = speculator.generate(
        pad_sequence(list(prefixes), batch_first=True, padding_side="left").to(device),
        attention_mask=(torch.arange(width) >= pads.unsqueeze(1)).long().to(device),
        max_new_tokens=spec.new_tokens,
        do_sample=spec.temperature > 0,
        **how,
    ).cpu()
    # A row's text ends with the first end-of-text after its prefix, that one included.
    new = text[:, width:]
    ends = torch.isin(new, torch.tensor([] if end is None else end))  # [B, new]
    lengths = counts + torch.where(ends.any(1), ends.byte().argmax(1) + 1, new.shape[1])
    # Training rows are padded on the right; the batch may also have ended early.
    columns = torch.arange(spec.prefix_tokens + spec.new_tokens)
    source = (columns + pads.unsqueeze(1)).clamp(max=text.shape[1] - 1)
    tokens = text.gather(1, source).masked_fill(columns >= lengths.unsqueeze(1), 0)
    return tokens, lengths, counts
