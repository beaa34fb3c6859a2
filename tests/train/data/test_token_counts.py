"""Tokens are counted in texts, chats with their answers, and rows; a tenth is kept apart."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from headstart.train.data.document_files import document_line, write_documents
from headstart.train.data.documents import CorpusError, Document
from headstart.train.data.token_counts import TokenCounts, count_tokens
from headstart.train.data.training_rows import Row, write_shard
from tests.support.tiny import VOCAB, letters


def test_texts_and_answers(tmp_path: Path) -> None:
    tokenizer = letters()
    lines = [{"prompt": "ab", "answer": "b"}] * 9 + [{"prompt": "a"}]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    counts = count_tokens(path, tokenizer, VOCAB)
    all_of_them = counts.others + counts.tenth
    a, b = tokenizer("ab", add_special_tokens=False).input_ids
    assert all_of_them[[a, b]].tolist() == [10, 18] and all_of_them.sum() == 28
    assert counts.tenth.sum() in (1, 3)  # one of the ten, by the hash of its id


def test_rows_count_what_is_learnt(tmp_path: Path) -> None:
    rows = [
        Row(str(n), np.array([1, 2, 3 + n], np.int32), np.array([False, True, True]))
        for n in range(20)
    ]
    write_shard(tmp_path / "train", rows, {})
    counts = count_tokens(tmp_path, letters(), VOCAB)
    all_of_them = counts.others + counts.tenth
    assert all_of_them[:3].tolist() == [0, 0, 20] and all_of_them[3:23].tolist() == [1] * 20
    assert counts.tenth[[2, 12, 22]].tolist() == [2, 1, 1] and counts.tenth.sum() == 4
    assert counts.coverage(1) == 0.5  # of four tokens two are the most frequent one


def test_a_runs_corpus_is_text(tmp_path: Path) -> None:
    """Its index is a NumPy file, as a shard's files are. What is held out does not count."""
    tokenizer = letters()
    for split, text in (("train", "ab"), ("held_out", "c")):
        lines = [b"".join(document_line(Document(str(n), text))) for n in range(3)]
        write_documents(tmp_path / f"{split}.jsonl", lines)
    (tmp_path / "stage.json").write_text('{"name": "corpus"}')
    assert (tmp_path / "train.offsets.npy").is_file()
    counts = count_tokens(tmp_path, tokenizer, VOCAB)
    a, b, c = tokenizer("abc", add_special_tokens=False).input_ids
    all_of_them = counts.others + counts.tenth
    assert all_of_them[[a, b, c]].tolist() == [3, 3, 0] and all_of_them.sum() == 6


def test_a_folder_of_texts_may_hold_other_arrays(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("aab")
    (tmp_path / "two.txt").write_text("b")
    np.save(tmp_path / "features.npy", np.zeros(3))
    tokenizer = letters()
    a, b = tokenizer("ab", add_special_tokens=False).input_ids
    counts = count_tokens(tmp_path, tokenizer, VOCAB)
    assert (counts.others + counts.tenth)[[a, b]].tolist() == [2, 2]


def test_coverage_of_nothing() -> None:
    counts = TokenCounts(torch.tensor([3, 1]), torch.zeros(2, dtype=torch.long))
    assert counts.coverage(1) is None and counts.chosen(1).tolist() == [0]


def test_what_is_chosen() -> None:
    """Ends first, then by frequency, and nothing that the drafter does not know."""
    known, none = torch.tensor([0, 2, 3, 5]), torch.zeros(6, dtype=torch.long)
    counts = TokenCounts(torch.tensor([1, 9, 4, 0, 8, 0]), none, known, [5])
    assert [counts.chosen(size).tolist() for size in (1, 2, 3, 4)] == [
        [5], [2, 5], [0, 2, 5], [0, 2, 3, 5]
    ]  # fmt: skip


def test_no_text(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text("")
    with pytest.raises(CorpusError):
        count_tokens(tmp_path / "texts.jsonl", letters(), VOCAB)
