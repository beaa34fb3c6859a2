"""Tokens are counted in texts, chats with their answers, and rows; a tenth is kept apart."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from headstart.train.data.documents import CorpusError
from headstart.train.data.token_counts import TokenCounts, count_tokens
from headstart.train.data.training_rows import Row, write_shard
from tests.support.tiny import VOCAB, letters


def test_texts_and_answers(tmp_path: Path) -> None:
    tokenizer = letters()
    lines = [{"prompt": "ab", "answer": "b"}] * 9 + [{"prompt": "a"}]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    counts = count_tokens(path, tokenizer, VOCAB)
    a, b = tokenizer("ab", add_special_tokens=False).input_ids
    assert counts.all[[a, b]].tolist() == [10, 18] and counts.all.sum() == 28
    assert counts.tenth.sum() in (1, 3)  # one of the ten, by the hash of its id


def test_rows_count_what_is_learnt(tmp_path: Path) -> None:
    rows = [
        Row(str(n), np.array([1, 2, 3 + n], np.int32), np.array([False, True, True]))
        for n in range(20)
    ]
    write_shard(tmp_path / "train", rows, {})
    counts = count_tokens(tmp_path, letters(), VOCAB)
    assert counts.all[1] == 0 and counts.all[2] == 20 + 0 and counts.all[3:23].tolist() == [1] * 20
    assert counts.tenth[[2, 12, 22]].tolist() == [2, 1, 1] and counts.tenth.sum() == 4
    assert counts.coverage(1) == 0.5  # of four tokens two are the most frequent one


def test_coverage_of_nothing() -> None:
    counts = TokenCounts(torch.tensor([3, 1]), torch.zeros(2, dtype=torch.long))
    assert counts.coverage(1) is None and counts.all.tolist() == [3, 1]


def test_no_text(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text("")
    with pytest.raises(CorpusError):
        count_tokens(tmp_path / "texts.jsonl", letters(), VOCAB)
