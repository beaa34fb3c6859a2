"""The corpus stage: what is read, what is refused, what is held out."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headstart.train.corpus import CorpusError, build_corpus, load_documents, read_documents
from headstart.train.recipe import Corpus


def test_stdlib(tmp_path: Path) -> None:
    spec = Corpus(max_bytes=300_000, held_out=0.2)
    counts = build_corpus(spec, tmp_path, seed=0)
    train, held_out = load_documents(tmp_path, "train"), load_documents(tmp_path, "held_out")
    names = {document.id for document in train + held_out}
    assert len(names) == len(train) + len(held_out) > 5
    assert counts["train_documents"] == len(train)
    assert len(held_out) == round(0.2 * len(names))
    assert counts["train_bytes"] + counts["held_out_bytes"] <= 300_000
    for name in names:
        assert name.endswith(".py")
        assert not {"test", "tests", "idlelib", "lib2to3", "site-packages"} & set(name.split("/"))

    again, other = tmp_path / "again", tmp_path / "other"
    build_corpus(spec, again, seed=0)
    build_corpus(spec, other, seed=1)
    for split in ("train.jsonl", "held_out.jsonl"):
        assert (again / split).read_bytes() == (tmp_path / split).read_bytes()
    assert load_documents(other, "held_out") != held_out


def test_more_bytes_only_add_documents(tmp_path: Path) -> None:
    few, many = tmp_path / "few", tmp_path / "many"
    spec = Corpus(max_bytes=100_000, held_out=0.0)
    build_corpus(spec, few)
    build_corpus(replace(spec, max_bytes=200_000), many)
    first = load_documents(few, "train")
    assert load_documents(many, "train")[: len(first)] == first
    assert load_documents(few, "held_out") == []


def test_folder_of_files(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "a.md").write_text("one é 漢\r\ntwo")
    (source / "deep" / "b.txt").write_text("three")
    (source / "deep" / "rows.jsonl").write_text('{"text": "four"}\n{"text": "five"}\n')
    (source / "latin.txt").write_bytes(b"caf\xe9")
    (source / "zero.bin").write_bytes(b"a\0b")
    (source / ".hidden").write_text("no")
    (source / "empty.txt").write_text(" \n")
    counts = build_corpus(Corpus(source=str(source), held_out=0.3), tmp_path / "out")
    documents = load_documents(tmp_path / "out", "train") + load_documents(
        tmp_path / "out", "held_out"
    )
    assert {document.id: document.text for document in documents} == {
        "a.md": "one é 漢\ntwo",
        "deep/b.txt": "three",
        "deep/rows.jsonl:1": "four",
        "deep/rows.jsonl:2": "five",
    }
    assert counts["skipped"] == 2


def test_lines_of_a_txt(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("first\n\nsecond\n")
    assert {document.text for document in read_documents(file)} == {"first", "second"}


def test_jsonl_kinds(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    rows = [{"text": "t"}, {"prompt": "p"}, {"messages": chat}, {"turns": ["x", "y"]}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    documents = {document.id: document for document in read_documents(file)}
    assert [documents[f"rows.jsonl:{i}"].text for i in (1, 2, 3, 4)] == [
        "t",
        "p",
        "hi\n\nhello",
        "x",
    ]
    assert documents["rows.jsonl:1"].messages is None
    assert documents["rows.jsonl:3"].messages == chat
    assert documents["rows.jsonl:4"].messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    "line",
    [
        "{not json",
        '"a string"',
        '{"other": 1}',
        '{"text": 3}',
        '{"text": " "}',
        '{"text": "\\ud800"}',
        '{"turns": []}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": "hi"}',
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(CorpusError, match=r"rows\.jsonl line 2: ") as error:
        build_corpus(Corpus(source=str(file)), tmp_path / "out")
    assert "\n" not in str(error.value)


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "big.txt").write_text("x" * 100)
    (tmp_path / "table.csv").write_text("a,b")
    for source, said in [
        ("nobody/hub-set", "no such file or folder"),
        (str(tmp_path / "empty"), "no text found"),
        (str(tmp_path / "table.csv"), "found a .csv file"),
        (str(tmp_path / "big.txt"), "raise corpus.max_bytes"),
    ]:
        with pytest.raises(CorpusError, match=said):
            build_corpus(Corpus(source=source, max_bytes=50), tmp_path / "out")


def test_one_document_is_never_held_out(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("only\n")
    build_corpus(Corpus(source=str(tmp_path / "one.txt"), held_out=0.9), tmp_path / "out")
    assert len(load_documents(tmp_path / "out", "train")) == 1
