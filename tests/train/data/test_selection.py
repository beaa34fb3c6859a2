"""Which documents are taken, once each, and which are held out; and reading them back."""

import json
import logging
import pickle
import random
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart.train.data.corpus import build_corpus, cut_short, load_documents
from headstart.train.data.document_files import Documents, write_documents
from headstart.train.data.documents import CorpusError, Document
from headstart.train.data.selection import RECORD, Spool, choose, hold_out
from headstart.train.recipe import Corpus, Source
from tests.support.paths import SHARED


def expected(documents: list[Document], budget: int, dedup: bool) -> list[str]:
    """What `choose` says in words: in the order of a hash, equal ones once, up to the budget."""
    taken, seen, size = [], set(), 0
    for document in sorted(documents, key=lambda document: sha256(document.id.encode()).digest()):
        if dedup and document.text in seen:
            continue
        size += len(document.text.encode())
        if size > budget:
            break
        seen.add(document.text)
        taken.append(document.id)
    return taken


@pytest.mark.parametrize("dedup", [True, False])
@pytest.mark.parametrize("budget", [50, 700, 10**6])
def test_what_is_taken_does_not_depend_on_the_order(
    tmp_path: Path, budget: int, dedup: bool
) -> None:
    draw = random.Random(budget)
    documents = [Document(str(i), "é" * draw.randint(1, 40)) for i in range(300)]
    found = set()
    for _ in range(3):
        draw.shuffle(documents)
        spool = Spool(tmp_path / "spool", [budget], dedup, seed=0)
        for document in documents:
            key = int.from_bytes(sha256(document.id.encode()).digest()[:8], "big")
            spool.add(document, 0, key)
        spool.end_of(0)
        records = spool.records()
        lines = list(spool.lines(records[choose(records, [1.0], budget)]))
        ids = [json.loads(bytes(line))["id"] for line in lines]
        assert ids == expected(documents, budget, dedup)
        found.add((spool.duplicates(), b"".join(lines)))
        del lines
        spool.close()
        assert not (tmp_path / "spool").exists()
    assert len(found) == 1


def chat(question: str, answer: str) -> dict[str, list[dict[str, str]]]:
    turns = {"user": question, "assistant": answer}
    return {"messages": [{"role": role, "content": text} for role, text in turns.items()]}


def build(
    tmp_path: Path, rows: list[dict[str, Any]], **settings: Any
) -> tuple[dict[str, Any], Documents, Documents]:
    """The counts, the training documents and the held-out ones."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = Corpus(source=str(file), **settings)
    counts = build_corpus(spec, tmp_path / "out", seed=3)
    out = tmp_path / "out"
    return counts, load_documents(out, "train"), load_documents(out, "held_out")


def test_no_chat_is_on_both_sides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of chats that come twice one is taken; without dedup both are on one side."""
    caplog.set_level(logging.INFO)
    rows = 2 * [chat(f"question {n}?", f"answer {n}") for n in range(120)]
    counts, train, held_out = build(tmp_path, rows, held_out=0.2)
    assert (counts["duplicates"], len(train), len(held_out)) == (120, 96, 24)
    assert "120 documents left out that are equal to another" in caplog.text
    counts, train, held_out = build(tmp_path, rows, held_out=0.2, dedup=False)
    assert (counts["duplicates"], len(train), len(held_out)) == (0, 192, 48)
    assert not {document.text for document in train} & {document.text for document in held_out}


def test_equal_prompts_are_on_one_side(tmp_path: Path) -> None:
    spellings = ("Why is {}?", "why IS  {}?\n", "Why is {}? ")
    rows = [chat(text.format(f"caf\u00e9 {n}"), f"{text}") for n in range(60) for text in spellings]
    rows += [chat(f"Why is cafe\u0301 {n}?", "decomposed") for n in range(60)]
    counts, train, held_out = build(tmp_path, rows, held_out=0.25)
    assert (counts["duplicates"], len(train), len(held_out)) == (0, 180, 60)
    sides = [{str(d.messages[0]["content"]).split()[3].strip("?") for d in side if d.messages}
             for side in (train, held_out)]  # fmt: skip
    assert len(sides[0]) == 45 and len(sides[1]) == 15 and not sides[0] & sides[1]


def test_a_common_prompt_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [chat("Hello", str(n)) for n in range(50)]
    counts, train, held_out = build(tmp_path, rows, held_out=0.1)
    assert (len(train), len(held_out)) == (50, 0)
    assert "all documents begin with the same prompt" in caplog.text
    _, train, held_out = build(tmp_path, [*rows, chat("Bye", "x")], held_out=0.1)
    assert [document.text for document in held_out] == ["User: Bye\n\nAssistant: x"]
    assert counts["held_out_bytes"] == 0
    _, train, held_out = build(tmp_path, [chat("Hello", "x"), chat("Bye", "x")], held_out=0.9)
    assert len(train) == len(held_out) == 1


def test_text_beyond_the_bytes_is_not_read(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for n in range(40):
        (texts / f"{n}.txt").write_text(f"{n:04}")
    names = sorted(
        (path.name for path in texts.iterdir()), key=lambda n: sha256(n.encode()).digest()
    )
    for name in names[11:]:
        (texts / name).write_bytes(b"\xff")  # would be counted as no text
    counts = build_corpus(Corpus(source=str(texts), max_bytes=40, held_out=0.0), tmp_path / "out")
    assert (counts["train_documents"], counts["skipped"]) == (10, 0)
    assert {d.id for d in load_documents(tmp_path / "out", "train")} == set(names[:10])


@pytest.mark.parametrize("first_rows", [False, True])
def test_a_corpus_that_its_bytes_end_is_told(tmp_path: Path, first_rows: bool) -> None:
    def told(spec: Corpus) -> str:
        counts = build_corpus(spec, tmp_path / "out", first_rows=first_rows)
        said = cut_short(spec, counts)
        assert counts["ended_by_max_bytes"] == bool(said)
        return said

    file, other = tmp_path / "rows.jsonl", tmp_path / "others.jsonl"
    file.write_text("".join(json.dumps({"text": f"{n:04}"}) + "\n" for n in range(10)))
    other.write_text("".join(json.dumps({"text": f"o{n:03}"}) + "\n" for n in range(5)))
    spec = Corpus(source=str(file), max_bytes=36, held_out=0.2)
    assert told(spec) == "corpus.max_bytes 36 ends the corpus after 9 documents"
    assert not told(replace(spec, max_bytes=40))
    mixed = Corpus(sources=[Source(str(file)), Source(str(other))], max_bytes=32)
    assert told(mixed) == "corpus.max_bytes 32 ends the corpus after 8 documents"
    # Of 20 bytes a source, the other's: the weights end it, and say so themselves.
    assert not told(replace(mixed, max_bytes=70))
    assert not told(Corpus(max_bytes=20_000))  # of the standard library nobody wants all


def test_the_first_rows_are_a_sample(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": f"{n:04}"}) for n in range(20)]
    file.write_text("\n".join([*lines, "not JSON"]))
    spec = Corpus(source=str(file), max_bytes=40, held_out=0.2)
    counts = build_corpus(spec, tmp_path / "out", first_rows=True)
    found = [d.text for s in ("train", "held_out") for d in load_documents(tmp_path / "out", s)]
    assert sorted(found) == [f"{n:04}" for n in range(10)] and counts["held_out_documents"] == 2
    with pytest.raises(CorpusError, match="line 21: not valid JSON"):
        build_corpus(spec, tmp_path / "out")


def test_documents_are_read_one_by_one(tmp_path: Path) -> None:
    rows = [chat(f"question {n} é?", "yes") | {"tools": [{"n": n}]} for n in range(20)]
    _, documents, _ = build(tmp_path, rows, held_out=0.0)
    everything = list(documents)
    assert len(documents) == 20 and everything == list(documents) and everything[3] in documents
    assert documents[-1] == everything[19] and documents[2:19:5] == everything[2:19:5]
    assert [d.tools for d in documents] == [[{"n": int(d.id.split(":")[1]) - 1}] for d in documents]
    with pytest.raises(IndexError):
        documents[20]
    assert list(pickle.loads(pickle.dumps(documents))) == everything

    # Files written by hand, or since, have no index that fits.
    file = tmp_path / "out" / "train.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[1:]))
    assert list(load_documents(tmp_path / "out", "train")) == everything[1:]
    (tmp_path / "out" / "train.offsets.npy").unlink()
    assert list(load_documents(tmp_path / "out", "train")) == everything[1:]
    write_documents(tmp_path / "none.jsonl", [])
    assert list(Documents(tmp_path / "none.jsonl")) == []


def test_older_files_are_read(tmp_path: Path) -> None:
    """Once the text of a chat was written too, and no source."""
    row = {"id": "a:1", "text": "User: hi\n\nAssistant:", "answer": None}
    row |= {"messages": [{"role": "user", "content": "hi"}]}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    (document,) = load_documents(tmp_path, "train")
    assert (document.text, document.messages, document.source) == (row["text"], row["messages"], "")


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="../shared/data is not on this machine")
def test_every_public_chat_twice(tmp_path: Path) -> None:
    """The corpus of a file whose rows all come twice is that of the file."""
    text = (SHARED / "data/synthetic_chats/synthetic_conversations_1k.jsonl").read_text()
    (tmp_path / "twice.jsonl").write_text(text + text)
    spec = Corpus(source=str(tmp_path / "twice.jsonl"), max_bytes=10**8, held_out=0.024)
    counts = build_corpus(spec, tmp_path / "out")
    assert counts["duplicates"] == 1000 and counts["held_out_documents"] == 24
    train = {document.text for document in load_documents(tmp_path / "out", "train")}
    assert len(train) == 976
    assert not any(d.text in train for d in load_documents(tmp_path / "out", "held_out"))


def test_the_draw_depends_on_the_seed_alone() -> None:
    records = np.zeros(1000, RECORD)
    records["prompt"] = np.random.default_rng(0).integers(0, 1 << 62, 1000)
    mask = hold_out(records, 0.1)
    assert mask.sum() == 100
    order = np.random.default_rng(1).permutation(1000)
    assert (hold_out(records[order], 0.1) == mask[order]).all()
