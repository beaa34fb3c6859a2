"""Self-distillation: the rows are the target's own text, whoever writes them and whenever."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headstart.train.data.distill import distill, shard_units, summary
from headstart.train.data.documents import Document
from headstart.train.data.prefixes import DistillError, Windows, encode
from headstart.train.data.training_rows import Rows
from headstart.train.processes import agreement
from headstart.train.recipe import Distill, RecipeError
from headstart.train.scratch_target import train_tokenizer
from tests.support.paths import ROOT
from tests.support.training import columns

SPEC = Distill(examples=20, prefix_tokens=6, new_tokens=9, batch_size=4, shards=3)
DOCUMENTS = [
    Document(str(number), " ".join(f"name{number} = {number * step}" for step in range(30)))
    for number in range(5)
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(DOCUMENTS, 270, 128)


def tiny_target(vocab: int = 270, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def write(
    folder: Path, tokenizer: PreTrainedTokenizerFast, spec: Distill = SPEC, **how: Any
) -> Rows:
    distill(spec, tiny_target(), tokenizer, DOCUMENTS, folder, progress=False, **how)
    return Rows.load(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_windows_stay_inside_documents(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [Document("a", "abc def"), Document("b", "x"), Document("c", "ghi jkl mno")]
    windows = Windows(encode(tokenizer, texts), 3)
    found = [str(tokenizer.decode(windows[i])) for i in range(len(windows))]
    assert len(found) == sum(max(len(row) - 2, 0) for row in windows.rows)
    assert all(any(text in document.text for document in texts) for text in found)
    assert found[0] == tokenizer.decode(windows.rows[0][:3])
    assert found[-1] == tokenizer.decode(windows.rows[2][-3:])


def test_rows_are_what_generate_writes(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    rows = write(tmp_path, tokenizer)
    tokens = columns(rows).tokens.long()
    assert tokens.shape == (20, 15)
    target: Any = tiny_target()
    expected = target.generate(tokens[:, :6], max_new_tokens=9, do_sample=False, use_cache=False)
    assert torch.equal(tokens, expected)
    texts = [tuple(tokenizer(document.text)["input_ids"]) for document in DOCUMENTS]
    for prefix in tokens[:, :6].tolist():
        assert any(tuple(prefix) == t[i : i + 6] for t in texts for i in range(len(t)))
    item = rows[7]
    assert item["row"] == 7 and torch.equal(item["tokens"], tokens[7])
    assert item["supervised"].tolist() == [False] * 6 + [True] * 9
    assert rows.token_counts(270).sum() == 20 * 9
    assert summary(SPEC, tmp_path) == {
        "shards": 3, "kept": 20, "rows": 20, "tokens": 300, "supervised": 180, "answers": 20,
        "openings": 20,
    }  # fmt: skip


@pytest.mark.parametrize("prefix", ["window", "start"])
def test_no_row_is_longer_than_it_may_be(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, prefix: str
) -> None:
    spec = replace(SPEC, prefix=prefix)
    whole = columns(write(tmp_path / "whole", tokenizer, spec)).tokens
    rows = write(tmp_path / "cut", tokenizer, replace(spec, max_length=10))
    assert whole.shape[1] == 15 and torch.equal(columns(rows).tokens, whole[:, :10])
    with pytest.raises(RecipeError, match=f"a {prefix} of distill.prefix_tokens 6 fills alone"):
        replace(spec, max_length=6)


def test_shards_cover_every_row_once() -> None:
    assert [list(shard_units(20, 3, k)) for k in range(3)] == [
        list(range(6)), list(range(6, 13)), list(range(13, 20)),
    ]  # fmt: skip


def test_an_end_of_text_cuts_the_row(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    free = columns(write(tmp_path / "free", tokenizer))
    end = int(free.tokens[:, 8].mode().values)  # a token that some rows write third
    target = tiny_target()
    target.generation_config.eos_token_id = end
    distill(SPEC, target, tokenizer, DOCUMENTS, tmp_path / "cut", progress=False)
    rows = columns(Rows.load(tmp_path / "cut"))
    assert (rows.lengths < 15).any()
    for row, length in zip(rows.tokens, rows.lengths.tolist(), strict=True):
        written = row[6:length].tolist()
        assert end not in written[:-1] and (length == 15 or written[-1] == end)
    assert rows.supervised.sum(1).tolist() == (rows.lengths - 6).tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_shards_do_not_depend_on_who_writes_them(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, temperature: float
) -> None:
    spec = replace(SPEC, temperature=temperature)
    write(tmp_path / "one", tokenizer, spec)
    for rank in (2, 0, 1):
        write(tmp_path / "three", tokenizer, spec, rank=rank, world=3)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")
    write(tmp_path / "other", tokenizer, spec, seed=1)
    assert contents(tmp_path / "one") != contents(tmp_path / "other")


def test_progress_and_speed_count_what_all_processes_write(
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other one writes first here, and both count in one store."""
    distributed: Any = torch.distributed
    shared = distributed.HashStore()
    monkeypatch.setattr(agreement, "in_parallel", lambda: True)
    monkeypatch.setattr(agreement, "store", lambda: shared)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 1)  # nobody waits
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    paces = []
    for rank in (1, 0):
        monkeypatch.setattr(agreement, "_numbers", count())
        given = SPEC, tiny_target(), tokenizer, DOCUMENTS, tmp_path, 0, rank, 2
        paces.append(distill(*given, progress=rank == 0))
    assert "distill: 100% (20 texts)" in capsys.readouterr().err
    assert [pace.tokens for pace in paces] == [7 * 9, 20 * 9]


def test_temperature_writes_another_text(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    greedy = columns(write(tmp_path / "greedy", tokenizer))
    warm = columns(write(tmp_path / "warm", tokenizer, replace(SPEC, temperature=1.0)))
    assert torch.equal(greedy.tokens[:, :6], warm.tokens[:, :6])
    assert not torch.equal(greedy.tokens, warm.tokens)


def test_time_cuts_the_examples_but_not_the_first_shard(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = replace(SPEC, max_seconds=1e-6)
    rows = write(tmp_path, tokenizer, spec)
    assert len(rows) == 6
    assert summary(spec, tmp_path)["shards"] == 1
    assert "6 of 20 texts (1 of 3 shards)" in caplog.text


@pytest.fixture
def progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[], list[str]]:
    """Has each step printed; gives the lines."""
    monkeypatch.setattr("headstart.infer.measure.progress.EVERY", 0.0)
    return lambda: [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("distill: ")
    ]


def test_each_line_of_progress_has_the_speed(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, progress: Callable[[], list[str]]
) -> None:
    distill(SPEC, tiny_target(), tokenizer, DOCUMENTS, tmp_path)
    lines = progress()
    assert len(lines) >= 2 and all(line.endswith(" tokens/s") for line in lines)


def test_the_time_left_heeds_the_limit(
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    progress: Callable[[], list[str]],
) -> None:
    ticks = count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr("headstart.train.data.distill.time", clock)
    limited = replace(SPEC, max_seconds=10.0, batch_size=2)
    distill(limited, tiny_target(), tokenizer, DOCUMENTS, tmp_path)
    lines = progress()
    # After two of 20 texts, 2 of the 10 seconds are over.
    assert lines[0].startswith("distill: 20%,") and ", 2 of 20 texts, " in lines[0]
    assert "distill: 100%," in lines[-1] and ", 13 of 20 texts, " in lines[-1]


def test_a_restart_has_the_time_that_was_left(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    short, enough = replace(SPEC, max_seconds=1e-6), replace(SPEC, max_seconds=600.0)
    assert len(write(tmp_path, tokenizer, short)) == 6
    assert len(write(tmp_path, tokenizer, short)) == 6
    # Another process begins with a shard of its own.
    assert len(write(tmp_path, tokenizer, short, rank=1, world=2)) == 13
    (tmp_path / "train-00000-of-00003.seconds").write_text("599")
    assert len(write(tmp_path, tokenizer, enough)) == 13
    (tmp_path / "train-00000-of-00003.seconds").write_text("1")
    assert len(write(tmp_path, tokenizer, enough)) == 20


def test_refusals(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with pytest.raises(DistillError, match="none of the 5 training documents"):
        write(tmp_path, tokenizer, replace(SPEC, prefix_tokens=10_000))
    with pytest.raises(DistillError, match="holds no shard"):
        Rows.load(tmp_path)


KILLED = """
import sys, time
from pathlib import Path
from tests.train.data import test_distill as test
from headstart.train.data import training_rows as module
write = module.write_atomically
def slow(path, data):
    if "00001" in path.name:
        print("half a shard", flush=True)
        time.sleep(60)
    write(path, data)
module.write_atomically = slow
test.write(Path(sys.argv[1]), test.train_tokenizer(test.DOCUMENTS, 270, 128))
"""


def test_sigkill_then_resume_gives_the_same_shards(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "cut")],
        stdout=subprocess.PIPE, cwd=ROOT, text=True,
    )  # fmt: skip
    assert child.stdout is not None and child.stdout.readline() == "half a shard\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    finished = tmp_path / "cut" / "train-00000-of-00003.tokens.npy"
    assert finished.with_name("train-00001-of-00003.tokens.npy").exists()
    stamp = finished.stat().st_mtime_ns
    assert len(Rows.load(tmp_path / "cut")) == 6  # the half shard is not read
    time.sleep(0.01)
    write(tmp_path / "cut", tokenizer)
    assert finished.stat().st_mtime_ns == stamp  # kept, not written again
    write(tmp_path / "whole", tokenizer)
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "cut" / path.name).read_bytes()
    # And that would have been seen: another seed for the missing shards gives other ones.
    finished.with_name("train-00002-of-00003.json").unlink()
    write(tmp_path / "cut", tokenizer, seed=5)
    name = "train-00002-of-00003.tokens.npy"
    assert (tmp_path / "cut" / name).read_bytes() != (tmp_path / "whole" / name).read_bytes()
