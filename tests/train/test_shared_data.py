"""Public data sets, in whatever form they came: the corpus reads all of every file."""

import json
from pathlib import Path

import pytest

from headstart.train.data.corpus import build_corpus, load_documents
from headstart.train.data.documents import Document
from headstart.train.data.reading import file_kind, read_documents
from headstart.train.recipe import Corpus
from tests.support.paths import SHARED

DATA = SHARED / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not on this machine")

# File: documents, prompts to be answered, documents that are chats, and that have answers apart.
EXPECTED = {
    "gpteacher/codegen-instruct.json": (4535, 4535, 4535, 0),
    "gsm8k/test.jsonl": (1319, 1319, 1319, 0),
    "gsm8k/train.jsonl": (7473, 7473, 7473, 0),
    "humaneval/HumanEval.jsonl": (164, 164, 0, 164),
    "mt_bench/question.jsonl": (80, 80, 80, 0),
    "spec_bench/question.jsonl": (480, 480, 480, 0),
    "standard_ebooks_stories/stories.jsonl.gz": (860, 860, 0, 0),
    "synthetic_chats/synthetic_conversations_1k.jsonl": (1000, 1100, 1000, 0),
    "thealgorithms_python/python_files.jsonl.gz": (1162, 1162, 0, 0),
}


def test_every_data_file_is_expected() -> None:
    kinds = {".jsonl", ".json"}
    files = {p.relative_to(DATA).as_posix() for p in DATA.rglob("*") if file_kind(p) in kinds}
    assert files == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_corpus_reads_all_of_it(tmp_path: Path, name: str) -> None:
    documents, prompts, chats, answered = EXPECTED[name]
    spec = Corpus(source=str(DATA / name), max_bytes=10**8, held_out=0.1)
    counts = build_corpus(spec, tmp_path)
    assert counts["skipped"] == counts["skipped_rows"] == 0
    found = [*load_documents(tmp_path, "train"), *load_documents(tmp_path, "held_out")]
    assert counts["train_documents"] + counts["held_out_documents"] == len(found) == documents
    assert counts["held_out_documents"] == round(0.1 * documents)
    assert len({document.id for document in found}) == documents
    assert sum(len(document.prompts()) for document in found) == prompts
    assert sum(document.messages is not None for document in found) == chats
    assert sum(document.answer is not None for document in found) == answered
    assert all(document.text.strip() for document in found)


def first(name: str, answers: bool) -> Document:
    documents = read_documents(DATA / name, answers)
    return min(documents, key=lambda document: int(document.id.rpartition(":")[2]))


def test_answers_stay_apart_from_prompts() -> None:
    row = json.loads((DATA / "humaneval/HumanEval.jsonl").read_text().splitlines()[0])
    assert first("humaneval/HumanEval.jsonl", False).whole() == row["prompt"]
    whole = first("humaneval/HumanEval.jsonl", True).whole()
    assert whole == row["prompt"] + row["canonical_solution"]

    row = json.loads((DATA / "gpteacher/codegen-instruct.json").read_text())[0]
    asked = first("gpteacher/codegen-instruct.json", False)
    assert asked.messages == [
        {"role": "user", "content": row["instruction"] + "\n\n" + row["input"]}
    ]
    told = first("gpteacher/codegen-instruct.json", True)
    assert told.messages and told.messages[1] == {"role": "assistant", "content": row["response"]}

    row = json.loads((DATA / "spec_bench/question.jsonl").read_text().splitlines()[0])
    asked = first("spec_bench/question.jsonl", False)
    assert asked.messages == [{"role": "user", "content": row["turns"][0]}]
