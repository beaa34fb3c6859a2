"""The corpus stage: what is read, what is refused, what is held out."""

import gzip
import json
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headstart.train.data import target_text
from headstart.train.data.corpus import build_corpus, load_documents
from headstart.train.data.documents import CorpusError, Document
from headstart.train.data.questions import read_questions
from headstart.train.data.reading import read_documents
from headstart.train.recipe import Corpus, parse_recipe


def test_the_target_of_a_revision_writes_its_own_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def load(kind: Any, name: str, **how: Any) -> Any:
        asked.append((name, how))
        raise CorpusError("not there")

    monkeypatch.setattr(target_text, "load_pretrained", load)
    (tmp_path / "model@v1").mkdir()
    for model in ("org/model", str(tmp_path / "model@v1")):
        target = {"model": model, "revision": "v2"}
        recipe = {"name": "r", "drafter": {"family": "medusa"}, "target": target}
        spec = parse_recipe(recipe | {"corpus": {"source": "target"}}).corpus
        with pytest.raises(CorpusError, match="not there"):
            build_corpus(spec, tmp_path / "corpus")
    assert asked == [("org/model", {"revision": "v2"}), (str(tmp_path / "model@v1"), {})]


def test_stdlib(tmp_path: Path) -> None:
    spec = Corpus(max_bytes=300_000, held_out=0.2)
    counts = build_corpus(spec, tmp_path, seed=0)
    train, held_out = load_documents(tmp_path, "train"), load_documents(tmp_path, "held_out")
    names = {document.id for document in [*train, *held_out]}
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
    assert list(load_documents(other, "held_out")) != list(held_out)


def test_more_bytes_only_add_documents(tmp_path: Path) -> None:
    few, many = tmp_path / "few", tmp_path / "many"
    spec = Corpus(max_bytes=100_000, held_out=0.0)
    build_corpus(spec, few)
    build_corpus(replace(spec, max_bytes=200_000), many)
    first = load_documents(few, "train")
    assert load_documents(many, "train")[: len(first)] == list(first)
    assert list(load_documents(few, "held_out")) == []


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
    out = tmp_path / "out"
    documents = [*load_documents(out, "train"), *load_documents(out, "held_out")]
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


USER = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "hello"}
SYSTEM = {"role": "system", "content": "be kind"}
ROWS: list[tuple[dict[str, Any], str, list[dict[str, str]] | None, str | None]] = [
    ({"text": "t"}, "t", None, None),
    ({"text": "t", "answer": None}, "t", None, None),
    ({"prompt": "p"}, "p", None, ""),
    ({"prompt": "p", "completion": "", "answer": None}, "p", None, ""),
    ({"prompt": "p", "completion": "", "answer": "c"}, "p", None, "c"),
    ({"task_id": 1, "prompt": "def f", "canonical_solution": "():"}, "def f", None, "():"),
    ({"prompt": "p", "completion": "c"}, "p", None, "c"),
    ({"messages": [USER, REPLY]}, "User: hi\n\nAssistant: hello", [USER, REPLY], None),
    ({"messages": [SYSTEM, USER]},
     "System: be kind\n\nUser: hi\n\nAssistant:", [SYSTEM, USER], None),
    ({"messages": [SYSTEM | {"content": ""}, USER]}, "User: hi\n\nAssistant:", [USER], None),
    ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
     "User: hi\n\nAssistant: hello", [USER, REPLY], None),
    ({"turns": ["hi", "y"]}, "User: hi\n\nAssistant:", [USER], None),
    ({"question": "hi", "answer": "hello"}, "User: hi\n\nAssistant: hello", [USER, REPLY], None),
    ({"instruction": "hi", "input": "", "output": "hello"},
     "User: hi\n\nAssistant: hello", [USER, REPLY], None),
    ({"instruction": "do", "input": "x", "response": "hello"},
     "User: do\n\nx\n\nAssistant: hello", [{"role": "user", "content": "do\n\nx"}, REPLY], None),
]  # fmt: skip


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".json.gz"])
def test_rows_of_every_kind(tmp_path: Path, suffix: str) -> None:
    rows = [row for row, *_ in ROWS]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if ".jsonl" not in suffix:
        text = json.dumps(rows, indent=1)
    file = tmp_path / f"rows{suffix}"
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    found = {document.id: document for document in read_documents(file, answers=True)}
    assert len(found) == len(ROWS)
    for number, (_, text, messages, answer) in enumerate(ROWS, start=1):
        document = found[f"{file.name}:{number}"]
        assert (document.text, document.messages, document.answer) == (text, messages, answer)

    # The corpus stage keeps all of it, also where it finds the file in a folder.
    spec = Corpus(source=str(tmp_path), held_out=0.0, dedup=False)
    counts = build_corpus(spec, tmp_path / "out")
    assert counts["train_documents"] == len(ROWS)
    kept = {d.id: replace(d, source=file.name) for d in load_documents(tmp_path / "out", "train")}
    assert kept == found
    written = read_documents(tmp_path / "out" / "train.jsonl", answers=True)
    assert sorted(map(but_for_the_id, written)) == sorted(map(but_for_the_id, found.values()))


def but_for_the_id(document: Document) -> str:
    return repr((document.text, document.messages, document.answer))


def test_prompts_come_without_their_answers(tmp_path: Path) -> None:
    rows = [{"messages": [USER, REPLY, USER, REPLY]}, {"prompt": "p", "completion": "c"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat, pair = sorted(read_documents(file), key=lambda document: document.id)
    assert chat.messages == [USER, REPLY, USER] and chat.text.endswith("User: hi\n\nAssistant:")
    assert (pair.text, pair.answer) == ("p", None)
    (whole,) = [d for d in read_documents(file, answers=True) if d.messages]
    assert [prompt.messages for prompt in whole.prompts()] == [[USER], [USER, REPLY, USER]]


SECRET = "correct horse"
BAD = [
    '{"text": "correct horse',
    '"correct horse"',
    '{"correct horse": 1}',
    '{"text": 3}',
    '{"text": " "}',
    '{"prompt": ""}',
    '{"text": "correct horse \\ud800"}',
    '{"messages": [{"role": "user", "content": "correct horse \\udc00"}]}',
    '{"turns": []}',
    '{"messages": []}',
    '{"messages": [{"role": "user"}]}',
    '{"messages": [{"role": "correct horse", "content": "correct horse"}]}',
    '{"messages": [{"role": "assistant", "content": "correct horse"}]}',
    '{"messages": [{"role": "system", "content": "correct horse"}]}',
    '{"messages": [{"role": "user", "content": "correct horse"},'
    ' {"role": "user", "content": "correct horse"}]}',
    '{"messages": "correct horse"}',
    '{"conversations": [{"from": "human", "value": ["correct horse"]}]}',
    '{"question": "correct horse", "answer": {"a": "correct horse"}}',
    "[" * 100_000,
]


@pytest.mark.parametrize("line", BAD, ids=range(len(BAD)))
def test_a_bad_line_is_named_and_not_quoted(tmp_path: Path, line: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(CorpusError, match=r"rows\.jsonl line 3: ") as error:
        build_corpus(Corpus(source=str(file)), tmp_path / "out")
    assert "\n" not in str(error.value) and "on_error=skip" in str(error.value)
    trace = "".join(traceback.format_exception(error.value))
    assert SECRET not in trace and "JSONDecodeError" not in trace


def test_a_setting_is_advised_only_where_there_is_one(tmp_path: Path) -> None:
    """Prompts have no `corpus.on_error`."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "fine"}\n' + BAD[0] + "\n")
    for read in (read_documents, read_questions):
        with pytest.raises(CorpusError, match=r"rows\.jsonl line 2: ") as error:
            read(file)
        assert "on_error" not in str(error.value)


def test_bad_rows_are_skipped_and_counted_where_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(['{"text": "fine"}', *BAD, '{"text": "also fine"}']))
    counts = build_corpus(Corpus(source=str(file), on_error="skip", held_out=0.0), tmp_path / "out")
    assert (counts["train_documents"], counts["skipped_rows"]) == (2, len(BAD))
    assert f"{len(BAD)} rows skipped" in caplog.text and "rows.jsonl line 2: " in caplog.text
    assert SECRET not in caplog.text

    file.write_text(BAD[0])
    with pytest.raises(CorpusError, match="no text found; 1 row skipped"):
        build_corpus(Corpus(source=str(file), on_error="skip"), tmp_path / "out")
    file.write_text("\n".join(BAD))
    with pytest.raises(CorpusError, match=f"no text found; {len(BAD)} rows skipped") as error:
        build_corpus(Corpus(source=str(file), on_error="skip"), tmp_path / "out")
    assert SECRET not in str(error.value)


ARRAY = '[\n {"text": "one"},\n\n {"prompt": ""},\n {"text":\n "two"}\n'


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (ARRAY, 6),  # cut short
        (ARRAY + ",]", 7),
        (ARRAY + " oops]", 7),
        ('[\n{"text": correct horse}]', 2),
        ('{"text": "not an array"}', 1),
        ("", 1),
    ],
)
def test_a_broken_array_cannot_be_skipped(tmp_path: Path, text: str, line: int) -> None:
    file = tmp_path / "rows.json"
    file.write_text(text)
    with pytest.raises(CorpusError, match=rf"rows\.json line {line}: ") as error:
        build_corpus(Corpus(source=str(file), on_error="skip"), tmp_path / "out")
    assert SECRET not in str(error.value)


def test_a_bad_row_of_an_array(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(ARRAY + "]")
    with pytest.raises(CorpusError, match=r"rows\.json row 2: prompt is empty"):
        read_documents(file)
    counts = build_corpus(Corpus(source=str(file), on_error="skip", held_out=0.0), tmp_path / "out")
    assert (counts["train_documents"], counts["skipped_rows"]) == (2, 1)


def test_other_json_in_a_folder_is_text(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number, text in enumerate(['{"a": 1}', "[1, 2]", '["x"]', "[", '[{"b": 2}]']):
        (source / f"{number}.json").write_text(text)
    documents = read_documents(source)
    assert sorted(document.id for document in documents) == [f"{n}.json" for n in range(5)]


def test_damaged_files_name_the_line(tmp_path: Path) -> None:
    rows = b"".join(b'{"text": "%d"}\n' % number for number in range(1000))
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(rows)[:-100])
    fake = tmp_path / "fake.jsonl.gz"
    fake.write_bytes(rows)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"text": "fine"}\n{"text": "caf\xe9"}\n')
    for file, said in [
        (cut, r"cut\.jsonl\.gz line \d+: damaged gzip"),
        (fake, r"fake\.jsonl\.gz line 1: damaged gzip"),
        (latin, r"latin\.jsonl line 2: not UTF-8"),
    ]:
        with pytest.raises(CorpusError, match=said):
            read_documents(file)


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "big.txt").write_text("x" * 100)
    (tmp_path / "table.xml").write_text("a,b")
    for source, said in [
        ("nobody/hub-set", "no such file or folder"),
        (str(tmp_path / "empty"), "no text found"),
        (str(tmp_path / "table.xml"), "found a .xml file"),
        (str(tmp_path / "big.txt"), "raise corpus.max_bytes"),
    ]:
        with pytest.raises(CorpusError, match=said):
            build_corpus(Corpus(source=source, max_bytes=50), tmp_path / "out")


def test_one_document_is_never_held_out(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("only\n")
    build_corpus(Corpus(source=str(tmp_path / "one.txt"), held_out=0.9), tmp_path / "out")
    assert len(load_documents(tmp_path / "out", "train")) == 1


def test_rows_of_parquet(tmp_path: Path) -> None:
    rows = [{"text": "2024-01-01"}, {"text": " "}, {"text": "three"}]
    datasets: Any = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(CorpusError, match=r"rows\.parquet row 2: text is empty"):
        read_documents(tmp_path / "rows.parquet")
    spec = Corpus(source=str(tmp_path), on_error="skip", held_out=0.0)
    counts = build_corpus(spec, tmp_path / "out")
    assert (counts["skipped"], counts["skipped_rows"]) == (0, 1)
    found = {document.id: document.text for document in load_documents(tmp_path / "out", "train")}
    assert found == {"rows.parquet:1": "2024-01-01", "rows.parquet:3": "three"}


def test_files_of_text_and_json_need_no_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    for name, text in [
        ("a.jsonl", '{"text": "a"}\n'),
        ("b.json", '[{"text": "b"}]'),
        ("c.txt", "c"),
    ]:
        (tmp_path / name).write_text(text)
        assert [document.text for document in read_documents(tmp_path / name)] == [name[0]]
    (tmp_path / "d.parquet").touch()
    with pytest.raises(CorpusError, match=r"d\.parquet: reading it needs `pip install datasets`"):
        read_documents(tmp_path / "d.parquet")
