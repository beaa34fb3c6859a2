"""The scratch target learns, is saved whole, and stops in time."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headstart.train.data.corpus import build_corpus, load_documents
from headstart.train.data.documents import Document
from headstart.train.recipe import Corpus, Scratch
from headstart.train.scratch_target import (
    END_OF_TEXT,
    Clock,
    Rows,
    TargetError,
    pack,
    schedule,
    train_target,
    train_tokenizer,
)

TINY = Scratch(
    vocab_size=300,
    hidden_size=32,
    layers=2,
    intermediate_size=64,
    context=128,
    sequence_length=32,
    batch_size=8,
    max_seconds=None,
    max_tokens=32 * 8 * 40,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    build_corpus(Corpus(max_bytes=150_000, held_out=0.2), folder)
    return folder


def test_trains_saves_and_loads(corpus: Path, tmp_path: Path) -> None:
    metrics = train_target(TINY, corpus, tmp_path, seed=0, progress=False)
    assert metrics["tokens"] == 32 * 8 * 40
    assert metrics["held_out_loss"] < math.log(300) - 1  # a uniform guess costs log 300
    assert json.loads((tmp_path / "metrics.json").read_text()) == metrics

    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert model.dtype == torch.float32 and model.config.max_position_embeddings == 128
    assert model.config.vocab_size == len(tokenizer) == 300
    text = "def f(x):\n\treturn 'é漢' # done"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    assert model.config.eos_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id == end
    logits = model(**tokenizer("import ", return_tensors="pt")).logits
    assert logits.shape[-1] == 300 and logits.isfinite().all()


def test_a_seed_fixes_the_weights(corpus: Path, tmp_path: Path) -> None:
    spec = replace(TINY, max_tokens=32 * 8 * 4)
    state = torch.get_rng_state()
    weights = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train_target(spec, corpus, tmp_path / name, seed=seed, progress=False)
        weights[name] = (tmp_path / name / "model.safetensors").read_bytes()
    assert weights["a"] == weights["b"] != weights["c"]
    assert torch.equal(torch.get_rng_state(), state)


def test_progress_ends_at_the_end(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where no whole step fits into what is left of the budget."""
    train_target(replace(TINY, max_tokens=32 * 8 * 2 + 100), corpus, tmp_path)
    assert capsys.readouterr().err.startswith("target: 100%, ")


def test_stops_in_time(corpus: Path, tmp_path: Path) -> None:
    spec = replace(TINY, max_seconds=0.5, max_tokens=None)
    started = time.perf_counter()
    metrics = train_target(spec, corpus, tmp_path, progress=False)
    assert metrics["steps"] > 1 and metrics["seconds"] < 1.5
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"heads": 3}, "hidden_size 32 over heads 3"),
        ({"max_tokens": None}, "give max_seconds or max_tokens"),
        ({"sequence_length": 128}, "less than context"),
        ({"sequence_length": 100_000, "context": 200_000}, "use more text or a shorter"),
        ({"adamw_lr": 1e30}, r"loss is nan in step 2; lower target.scratch.adamw_lr \(1e\+30\) or"),
        ({"adamw_lr": 1e30, "max_tokens": 256}, "loss is nan after its last step"),
    ],
)
def test_refusals(corpus: Path, tmp_path: Path, change: dict, said: str) -> None:
    with pytest.raises(TargetError, match=said):
        train_target(replace(TINY, **change), corpus, tmp_path, progress=False)


def test_pack_closes_each_document(corpus: Path) -> None:
    tokenizer = train_tokenizer(load_documents(corpus, "train"), 300, 128)
    documents = [Document("1", "abc"), Document("2", "def")]
    ids = pack(tokenizer, documents)
    assert tokenizer.decode(ids) == f"abc{END_OF_TEXT}def{END_OF_TEXT}"


def test_rows_cover_an_epoch_once() -> None:
    rows = Rows(torch.arange(41), length=10, seed=0)
    batch = rows.take(4)  # [4, 11]
    assert sorted(batch[:, :-1].flatten().tolist()) == list(range(40))
    assert torch.equal(batch[:, 1:], batch[:, :-1] + 1)
    assert rows.take(9).shape == (9, 11)


def test_schedule_rises_then_falls_to_zero() -> None:
    shares = (0.0, 0.05, 0.1, 0.55, 1.0, 1.2)
    assert [schedule(share, 0.1) for share in shares] == pytest.approx([0, 0.5, 1, 0.5, 0, 0])
    assert schedule(0.0, 0.0) == 1.0


@pytest.mark.parametrize(
    ("min_tokens", "expected"),
    [(None, {1.0: 12, 3.0: 4, 6.0: 2}), (64, {1.0: 12, 3.0: 8, 6.0: 4})],
)
def test_a_slower_machine_trains_less(
    min_tokens: int | None, expected: dict[float, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a least number of tokens it trains up to twice as long, not to learn too little."""
    steps = {}
    for seconds_a_step in (1.0, 3.0, 6.0):
        now = [100.0]
        monkeypatch.setattr(
            "headstart.train.scratch_target.time.perf_counter", lambda now=now: now[0]
        )
        clock = Clock(12.0, None, 8, now[0], min_tokens)
        shares = []
        while not shares or clock.share(1.0) <= 1.0:
            shares.append(clock.share(0.5))
            now[0] += seconds_a_step
            clock.steps += 1
        steps[seconds_a_step] = clock.steps
        assert clock.share() <= 1.0
        assert shares == sorted(shares) and shares[-1] > 0.7
    assert steps == expected
