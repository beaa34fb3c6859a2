"""Rows whose tokens are known: they are trained on and prompted with as they were decoded."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headstart.train.data.corpus import build_corpus, load_documents
from headstart.train.data.distill import Pace, distill, write_manifest
from headstart.train.data.documents import CorpusError, Document
from headstart.train.data.earlier import add_earlier
from headstart.train.data.held_out import held_out_prompts
from headstart.train.data.parsing import parse_row
from headstart.train.data.prefixes import DistillError
from headstart.train.data.reading import read_documents
from headstart.train.data.rendering import ChatRenderer
from headstart.train.data.training_rows import Rows
from headstart.train.data.writers.replay import Replay
from headstart.train.recipe import Corpus, Distill
from tests.support.chats import CHATML, chat_tokenizer
from tests.support.talker import talker

END = "<|im_end|>"
CHAT = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "me"}]
MORE = [*CHAT, {"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}]


def rows_of(documents: Sequence[Document], folder: Path, **more: Any) -> Rows:
    tokenizer = chat_tokenizer(CHATML, END)
    spec = Distill(writer="given", shards=1, max_length=12, **more)
    distill(spec, lambda: talker(tokenizer, END), tokenizer, documents, folder, progress=False)
    return Rows.load(folder)


def test_a_row_is_the_tokens_and_not_the_text(tmp_path: Path) -> None:
    """In the corpus, and in training; the last answer alone is taught, and cut at a token."""
    given = {"prompt_token_ids": [5, 6, 7], "token_ids": [8, 9]}
    rows = [
        {"prompt": "ab", "completion": "c", **given},
        {"messages": MORE, **given, "token_ids": [*range(1, 20)]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_corpus(Corpus(source=str(path), held_out=0.0), tmp_path / "corpus")
    documents = load_documents(tmp_path / "corpus", "train")
    assert sum(document.ids is not None for document in documents) == 2
    found = rows_of(documents, tmp_path / "rows")
    taught = {tuple(r.tokens.tolist()): r.supervised.tolist() for r in map(found.row, range(2))}
    assert taught[5, 6, 7, 8, 9] == [False] * 3 + [True] * 2
    assert taught[5, 6, 7, 1, 2, 3, 4, 5, 6, 7, 8, 9] == [False] * 3 + [True] * 9


GIVEN = {"prompt_token_ids": [5, 6, 7], "token_ids": [8, 9]}
NO_CHAT = [  # what a log of a server may hold, and no chat does
    [CHAT[0], *CHAT], [{"role": "user", "content": ""}, CHAT[1]], [], [CHAT[0], {"role": "x"}],
    [CHAT[0], {"role": "assistant", "content": None}],
]  # fmt: skip


@pytest.mark.parametrize("messages", NO_CHAT, ids=range(len(NO_CHAT)))
def test_messages_that_are_no_chat_need_the_tokens(tmp_path: Path, messages: list[Any]) -> None:
    """In a corpus alone: a prompt that is to be shown needs its text."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": messages, **GIVEN}) + "\n")
    counts = build_corpus(Corpus(source=str(path), held_out=0.0), tmp_path / "corpus")
    assert counts["rows_of_ids_alone"] == 1 and counts["train_bytes"] == 4 * 5
    documents = load_documents(tmp_path / "corpus", "train")
    assert rows_of(documents, tmp_path / "rows").row(0).tokens.tolist() == [5, 6, 7, 8, 9]
    with pytest.raises(CorpusError, match=r"rows\.jsonl line 1: "):
        read_documents(path)
    path.write_text(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(CorpusError, match=r"rows\.jsonl line 1: "):
        build_corpus(Corpus(source=str(path)), tmp_path / "corpus")


def test_rows_of_tokens_alone_are_prompts_and_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        {"messages": [{**CHAT[0], "content": f"{n // 2}?"}, *CHAT],
         "prompt_token_ids": [n // 2, 1], "token_ids": [n]}
        for n in range(40)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_corpus(Corpus(source=str(path), held_out=0.3), tmp_path / "corpus")
    train = load_documents(tmp_path / "corpus", "train")
    held_out = load_documents(tmp_path / "corpus", "held_out")
    assert len(held_out) >= 6
    groups = [{d.ids[0][0] for d in split if d.ids} for split in (train, held_out)]
    assert not groups[0] & groups[1], "equal prompts are held out together"
    tokenizer = chat_tokenizer(CHATML, END)
    for decoded in (True, False):  # there is nothing else to render
        found = held_out_prompts(tokenizer, held_out, 1, 9, prefix="prompt", decoded=decoded)
        assert found[0].tokens.tolist()[1:] == [1]
    spec = Distill(prefix="prompt", new_tokens=2)
    asked = Replay(train[0], ChatRenderer(tokenizer), spec, set()).ask()
    assert asked is not None and asked.tokens == (train[0].ids or [[]])[0]


@pytest.mark.parametrize("before", [[], [CHAT[0]], [{"role": "system", "content": "Be kind."}]])
def test_turns_of_one_conversation_are_held_out_together(tmp_path: Path, before: list[Any]) -> None:
    """Also where the system prompt tells the time, and where it is no chat but for its tokens."""
    rows = []
    for chat in range(30):
        said: list[Any] = []
        for turn in range(3):
            said += [{"role": "user", "content": f"{chat}, {turn}?"}]
            clock = {"role": "system", "content": f"It is {chat % 24}:0{turn}."}
            answer = {"role": "assistant", "content": "so"}
            ids = {"prompt_token_ids": [chat, turn], "token_ids": [chat]}
            rows.append({"messages": [*before, clock, *said, answer], **ids})
            said += [answer]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = build_corpus(Corpus(source=str(path), held_out=0.2), tmp_path / "corpus")
    assert counts.get("rows_of_ids_alone", 0) == (len(rows) if before else 0)
    splits = [load_documents(tmp_path / "corpus", name) for name in ("train", "held_out")]
    chats = [{document.ids[0][0] for document in split if document.ids} for split in splits]
    assert not chats[0] & chats[1] and len(chats[1]) == 6
    # Whoever judges by them knows which belong together.
    assert len({document.first_prompt() for document in splits[1]}) == 6


def test_parts_of_text_are_joined_and_others_refused() -> None:
    parts = [{"type": "text", "text": "who"}, {"type": "input_text", "text": "are you?"}]
    row = {"messages": [{"role": "user", "content": parts}, CHAT[1]]}
    assert parse_row(row, "1").messages == [{"role": "user", "content": "who\nare you?"}, CHAT[1]]
    for part, found in (({"type": "image_url"}, "of the type image_url"), ("x", "without a type")):
        row = {"messages": [{"role": "user", "content": [*parts, part]}, CHAT[1]], **GIVEN}
        with pytest.raises(CorpusError, match=f"messages: message 1 has a part {found}; expected"):
            parse_row(row, "1", ids_alone=True)  # what a picture shows is not in its tokens


def test_held_out_prompts_are_those_that_were_decoded() -> None:
    tokenizer = chat_tokenizer(CHATML, END)
    documents = [
        Document.chat(str(n), own) if n % 2 else parse_row(
            {"messages": own, "prompt_token_ids": [n, 1], "token_ids": [2]}, str(n)
        )
        for n in range(12)
        for own in [[*CHAT, {"role": "user", "content": "why?" * (n + 1)}, MORE[-1]]]
    ]  # fmt: skip
    how = {"count": 6, "tokens": 400, "prefix": "prompt"}
    decoded = held_out_prompts(tokenizer, documents, **how, decoded=True)
    assert any(len(p.tokens) == 2 and p.tokens[1] == 1 for p in decoded)
    assert all((len(p.tokens) == 2) == (int(p.document) % 2 == 0) for p in decoded)
    rendered = held_out_prompts(tokenizer, documents, **how)
    assert all(len(p.tokens) > 2 for p in rendered)


@pytest.mark.parametrize("ids", [[], [1, -1], [True], "12", [1.0], [1 << 31]])
def test_what_is_no_token_is_refused(ids: Any) -> None:
    row = {"messages": CHAT, "prompt_token_ids": [1], "token_ids": ids}
    with pytest.raises(CorpusError, match=r"^token_ids is not a list of token ids"):
        parse_row(row, "1")


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    row = {"messages": CHAT, "prompt_token_ids": [1], "token_ids": [99_999]}
    with pytest.raises(DistillError, match=r"logs:3: token 99999 is not in the vocabulary of \d+"):
        rows_of([parse_row(row, "logs:3")], tmp_path)


def test_rows_of_another_run_are_added_up_to_their_share(tmp_path: Path) -> None:
    documents = [
        parse_row({"messages": CHAT, "prompt_token_ids": [n], "token_ids": [n] * 8}, str(n))
        for n in range(1, 25)
    ]
    tokenizer = chat_tokenizer(CHATML, END)
    old, new = tmp_path / "old", tmp_path / "new"
    rows_of(documents[:12], old)
    rows_of(documents[12:], new)
    spec = Distill(writer="given", earlier=str(old), earlier_share=0.25)
    with pytest.raises(DistillError, match="holds no manifest"):
        add_earlier(spec, new, tokenizer, 0)
    write_manifest(spec, old, tokenizer, None, "target", Pace(0, 0.0))
    for _ in range(2):  # as after a kill
        assert add_earlier(spec, new, tokenizer, 0) == {"earlier_rows": 4}
    found = Rows.load(new)
    assert len(found) == 16
    assert {int(found.row(n).tokens[0]) for n in range(12)} == set(range(13, 25))
    assert {int(found.row(n).tokens[0]) for n in range(12, 16)} < set(range(1, 13))
    other = chat_tokenizer(CHATML, END)
    other.add_tokens(["another"])
    with pytest.raises(DistillError, match="of another tokenizer"):
        add_earlier(spec, new, other, 0)
