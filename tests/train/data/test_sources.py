"""What a corpus is read from: formats, column names, globs, tables, mixtures."""

import csv
import gzip
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from headstart.train.data.corpus import build_corpus, load_documents
from headstart.train.data.documents import CorpusError, Document
from headstart.train.data.file_rows import json_array
from headstart.train.data.fingerprints import source_fingerprint
from headstart.train.data.reading import read_documents
from headstart.train.recipe import Corpus, RecipeError, Source, load_recipe

USER = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "hello"}
SYSTEM = {"role": "system", "content": "be kind"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {}}]}
RESULT = {"role": "tool", "content": "", "tool_call_id": "1"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def corpus(tmp_path: Path, source: Path | str, **settings: Any) -> list[Document]:
    """All documents of a corpus of the source."""
    settings = {"held_out": 0.0, "max_bytes": 10**9, **settings}
    build_corpus(Corpus(source=str(source), **settings), tmp_path / "out")
    return list(load_documents(tmp_path / "out", "train"))


ROWS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"prompt": "hi", "response": "hello"}, [USER, REPLY]),
    ({"prompt": "hi", "response": ""}, [USER]),
    ({"question": "hi", "answer": "hello", "system": "be kind"}, [SYSTEM, USER, REPLY]),
    ({"messages": [USER, REPLY], "system": "be kind"}, [SYSTEM, USER, REPLY]),
    ({"messages": [SYSTEM, USER, REPLY], "system": "not this"}, [SYSTEM, USER, REPLY]),
    ({"conversations": [{"from": "gpt", "value": "before"}, {"from": "human", "value": "hi"},
                        {"from": "chatgpt", "value": "hello"}]}, [USER, REPLY]),
    ({"messages": [SYSTEM, REPLY, REPLY, USER]}, [SYSTEM, USER]),
    ({"messages": [USER, CALL, RESULT, RESULT, REPLY, USER]},
     [USER, CALL, RESULT, RESULT, REPLY, USER]),
    ({"messages": [USER | {"name": None}, REPLY | {"tool_calls": None}]}, [USER, REPLY]),
]  # fmt: skip


@pytest.mark.parametrize(("row", "messages"), ROWS, ids=range(len(ROWS)))
def test_chats(tmp_path: Path, row: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    (document,) = corpus(tmp_path, write_rows(tmp_path / "rows.jsonl", [row]))
    assert document.messages == messages and document.source == "rows.jsonl"
    assert document == read_documents(tmp_path / "rows.jsonl", answers=True)[0]


def test_answers_without_a_question_are_counted(tmp_path: Path) -> None:
    opened = [REPLY, USER, REPLY]
    rows = [{"messages": opened}, {"messages": [SYSTEM, REPLY, *opened]}, {"messages": [REPLY]}]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    spec = Corpus(source=str(file), held_out=0.0, on_error="skip")
    counts = build_corpus(spec, tmp_path / "out")
    assert counts["answers_without_question"] == 3
    assert (counts["train_documents"], counts["skipped_rows"]) == (2, 1)


def test_tools_are_kept(tmp_path: Path) -> None:
    rows = [{"messages": [USER, REPLY], "tools": tools} for tools in (TOOLS, json.dumps(TOOLS))]
    rows += [{"messages": [USER, REPLY]}, {"messages": [USER, REPLY], "tools": []}]
    found = corpus(tmp_path, write_rows(tmp_path / "rows.jsonl", rows), dedup=False)
    assert sorted(document.tools == TOOLS for document in found) == [False, False, True, True]
    assert len(corpus(tmp_path, tmp_path / "rows.jsonl")) == 2
    prompts = [prompt for document in found for prompt in document.prompts()]
    assert {repr(prompt.tools) for prompt in prompts} == {"None", repr(TOOLS)}
    write_rows(tmp_path / "rows.jsonl", [{"messages": [USER], "tools": "correct horse"}])
    with pytest.raises(CorpusError, match=r"rows\.jsonl line 1: tools is not valid JSON"):
        corpus(tmp_path, tmp_path / "rows.jsonl")


@pytest.mark.parametrize("roles", ["ut", "uatu", "aa", "s", "uasu", "uau a".replace(" ", "a")])
def test_roles_that_take_no_turns(tmp_path: Path, roles: str) -> None:
    names = {"u": USER, "a": REPLY, "t": RESULT, "s": SYSTEM}
    file = write_rows(tmp_path / "rows.jsonl", [{"messages": [names[role] for role in roles]}])
    with pytest.raises(CorpusError, match="the roles do not take turns"):
        corpus(tmp_path, file)


def test_columns(tmp_path: Path) -> None:
    rows = [{"task": "hi", "text": "not this", "gold": "hello", "sys": "be kind"},
            {"task": "hi", "gold": "hello"}]  # fmt: skip
    file = write_rows(tmp_path / "rows.jsonl", rows)
    columns = {"prompt": "task", "response": "gold", "system": "sys"}
    found = corpus(tmp_path, file, columns=columns)
    assert sorted([len(document.messages or []) for document in found]) == [2, 3]
    with pytest.raises(CorpusError, match=r"line 1: no value in the column .*\(prompt: tusk\)"):
        corpus(tmp_path, file, columns=columns | {"prompt": "tusk"})
    with pytest.raises(
        RecipeError, match=r"corpus\.columns: found 'promt' \(did you mean 'prompt'"
    ):
        load_recipe("quickstart", ["corpus.columns={promt: task}"])


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".csv.gz"])
def test_tables_of_text(tmp_path: Path, suffix: str) -> None:
    rows = [["instruction", "output", "date"], ["2024-01-01", "007", "x"]]
    rows += [["two\nlines", "1.50", ""], ["long", "x" * 200_000, "NA"]]
    text = io.StringIO()
    csv.writer(text, delimiter="\t" if suffix == ".tsv" else ",").writerows(rows)
    file = tmp_path / f"rows{suffix}"
    data = ("\ufeff" + text.getvalue()).encode()
    file.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    for number, source in enumerate((file, tmp_path, f"{tmp_path}/r*{suffix}")):
        to = tmp_path.with_name(f"{tmp_path.name}-{number}")
        found = {d.id: d.messages for d in corpus(to, source)}
        assert {id: [m["content"] for m in messages or []] for id, messages in found.items()} == {
            f"{file.name}:2": ["2024-01-01", "007"],
            f"{file.name}:3": ["two\nlines", "1.50"],  # and so its line 4
            f"{file.name}:5": ["long", "x" * 200_000],
        }


def test_broken_tables_name_the_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('text\none\n"a ""b"" c"\nthree,correct horse\n')
    with pytest.raises(CorpusError, match=r"rows\.csv line 4: found 2 fields, expected the 1"):
        corpus(tmp_path, file)
    found = corpus(tmp_path, file, on_error="skip")
    assert {document.text for document in found} == {"one", 'a "b" c'}
    file.write_text('text\n"correct" horse\n')
    with pytest.raises(CorpusError, match=r"rows\.csv line 2: not valid CSV") as error:
        corpus(tmp_path, file)
    assert "horse" not in str(error.value)
    file.write_text("a,b\n1,2\n")  # in a folder it is text like any other
    assert [d.text for d in corpus(tmp_path, str(tmp_path / "*.csv"))] == ["a,b\n1,2\n"]


def test_parquet_keeps_dates_and_chats(tmp_path: Path) -> None:
    rows = [{"messages": [USER, REPLY], "at": "2024-01-01"}, {"messages": [USER], "at": "x"}]
    datasets: Any = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    found = {d.id: d.messages for d in corpus(tmp_path, tmp_path / "rows.parquet")}
    assert found == {"rows.parquet:1": [USER, REPLY], "rows.parquet:2": [USER]}
    (tmp_path / "rows.parquet").write_bytes(b"correct horse")
    with pytest.raises(CorpusError, match=r"rows\.parquet row 1: not Parquet"):
        corpus(tmp_path, tmp_path / "rows.parquet")


def test_globs(tmp_path: Path) -> None:
    for name in ("a/x.jsonl", "b/x.jsonl", "b/y.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    found = {d.id: d.text for d in corpus(tmp_path, f"{tmp_path}/*/x.jsonl")}
    assert found == {"a/x.jsonl:1": "a/x.jsonl", "b/x.jsonl:1": "b/x.jsonl"}
    found = corpus(tmp_path, f"{tmp_path}/b/**")
    assert {document.id for document in found} == {"x.jsonl:1", "y.txt"}
    with pytest.raises(CorpusError, match="no file matches"):
        corpus(tmp_path, f"{tmp_path}/c*")
    with pytest.raises(CorpusError, match=r"corpus\.split is of data sets on the Hub only"):
        corpus(tmp_path, f"{tmp_path}/b", split="train")


def test_long_arrays_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the parts that are read at once, numbers, escapes and letters are whole."""
    rows = [
        {"text": "é漢\U0001f600" * n, "n": [12345, -1.5e3, True, "\\u00e9\n"]} for n in range(9)
    ]
    rows += [{"text": "x" * 300}, 123456]  # type: ignore[list-item]
    file = tmp_path / "rows.json"
    for indent in (None, 1):
        file.write_text(json.dumps(rows, indent=indent, ensure_ascii=indent is None))
        for size in (1, 2, 7, 1 << 20):
            monkeypatch.setattr("headstart.train.data.file_rows._CHUNK", size)
            assert [row for _, row in json_array(file)] == rows
    file.write_text("[]")
    assert list(json_array(file)) == []
    for text, line in (("[1,\n2 3]", 2), ("[1,\n]", 2), ("[1]\nx", 2), ("[\n\n", 1), ("[nul", 1)):
        file.write_text(text)
        with pytest.raises(CorpusError, match=f"line {line}: not valid JSON"):
            list(json_array(file))
    file.write_bytes(b'[1,\n\n"\xe9"]')
    with pytest.raises(CorpusError, match="line 3: not UTF-8"):
        list(json_array(file))


def test_mixtures(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, count in (("a", 400), ("b", 400)):
        (tmp_path / name).mkdir()
        rows = [{"text": f"{name} {n:03} {'x' * 34}"} for n in range(count)]  # of 40 bytes
        write_rows(tmp_path / name / "rows.jsonl", rows)
    parts = [Source(source=f"{tmp_path}/a/rows.jsonl", weight=3.0),
             Source(source=f"{tmp_path}/b/rows.jsonl", weight=1.0)]  # fmt: skip
    spec = Corpus(sources=parts, max_bytes=16_000, held_out=0.25)
    counts = build_corpus(spec, tmp_path / "out")
    assert counts["source_bytes"] == {"rows.jsonl": 12_000, "rows.jsonl#2": 4_000}
    train, held_out = (load_documents(tmp_path / "out", s) for s in ("train", "held_out"))
    assert (len(train), len(held_out)) == (300, 100)
    for documents in (train, held_out):
        assert {document.source for document in documents} == {"rows.jsonl", "rows.jsonl#2"}
    found = [*train, *held_out]
    assert len({document.id for document in found}) == 400
    assert all(document.id.startswith(document.source + ":") for document in found)
    assert not caplog.messages
    build_corpus(spec, tmp_path / "again")
    for name in ("train.jsonl", "held_out.jsonl"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()

    # b has 16,000 bytes, and so a no more than three times as many: all of its own.
    counts = build_corpus(Corpus(sources=parts, max_bytes=10**6), tmp_path / "more")
    assert counts["source_bytes"] == {"rows.jsonl": 16_000, "rows.jsonl#2": 5_320}
    assert "rows.jsonl has no more than 16000" in caplog.text


def test_mixtures_in_a_recipe() -> None:
    mixed = "corpus.sources=[{source: a.jsonl, weight: 2}, {source: sharegpt, revision: main}]"
    recipe = load_recipe("quickstart", [mixed])
    assert recipe.corpus.parts() == [Source("a.jsonl", 2.0), Source("sharegpt", revision="main")]
    assert recipe.to_dict()["corpus"]["sources"][0]["weight"] == 2.0
    for overrides, said in [
        ([mixed, "corpus.source=x.jsonl"], r"found corpus\.source 'x\.jsonl' too"),
        ([mixed, "corpus.split=train"], r"corpus\.split: found together with corpus\.sources"),
        (["corpus.sources=[{source: target}]"], "target, which writes a corpus of its own"),
        (["corpus.sources=[{weight: 2}]"], r"corpus\.sources\[0\]\.source: missing"),
        (["corpus.sources=[{source: a, weight: 0}]"], r"corpus\.sources\[0\]\.weight: found 0"),
        (["corpus.sources=[{source: a, wieght: 1}]"], r"sources\[0\]\.wieght: unknown key \(did"),
        (["corpus.sources=a.jsonl"], r"corpus\.sources: found the string .*expected a list"),
    ]:
        with pytest.raises(RecipeError, match=said):
            load_recipe("quickstart", overrides)


def test_a_source_rewritten_in_place_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    (folder / "b.txt").write_text("two")
    seen = set()
    for source in (folder, folder / "a.txt", f"{folder}/*.txt"):
        spec = Corpus(source=str(source))
        before, stat = source_fingerprint(spec), (folder / "a.txt").stat()
        assert source_fingerprint(spec) == before == json.loads(json.dumps(before))
        (folder / "a.txt").write_text("six")  # as long as before
        os.utime(folder / "a.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert source_fingerprint(spec) != before
        (folder / "a.txt").write_text("one")
        seen.add(json.dumps(before))
    (folder / "b.txt").rename(folder / "c.txt")
    assert json.dumps(source_fingerprint(Corpus(source=str(folder)))) not in seen
    assert source_fingerprint(Corpus(source="stdlib")) == source_fingerprint(Corpus())
    with pytest.raises(CorpusError, match="no such file or folder"):
        source_fingerprint(Corpus(source=str(folder / "d.txt")))
    pinned = Corpus(source="ultrachat", revision="0" * 40)  # asks nobody
    assert source_fingerprint(pinned)["sources"] == [
        {"name": "HuggingFaceH4/ultrachat_200k", "commit": "0" * 40}
    ]


def test_a_folder_of_a_run_is_refused(tmp_path: Path) -> None:
    """Its held-out documents would be trained on."""
    run = tmp_path / "run"
    made = run / "corpus-1a2b3c4d"
    made.mkdir(parents=True)
    (run / "corpus").symlink_to(made.name)
    for split in ("train", "held_out"):
        (made / f"{split}.jsonl").write_text(json.dumps({"text": split}) + "\n")
    assert len(corpus(tmp_path, made)) == 2  # as any other folder
    (made / "stage.json").write_text(json.dumps({"fingerprint": "1a2b3c4d"}))
    for folder in (run, made, run / "corpus"):
        with pytest.raises(
            CorpusError, match=rf"a run; expected its .* {run}/corpus/train\.jsonl$"
        ):
            corpus(tmp_path, folder)
    assert [document.text for document in corpus(tmp_path, made / "train.jsonl")] == ["train"]
    (made / "train.jsonl").unlink()
    with pytest.raises(CorpusError, match='a folder of a run; expected "stdlib"'):
        corpus(tmp_path, run)


def test_what_is_read_without_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    (tmp_path / "rows.csv").write_text("text\none\n")
    assert [document.text for document in corpus(tmp_path, tmp_path / "rows.csv")] == ["one"]
    with pytest.raises(CorpusError, match=r"hub:a/b: reading it needs `pip install datasets`"):
        corpus(tmp_path, "hub:a/b")
