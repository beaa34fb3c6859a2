"""Rows that the target writes itself, with a drafter or without, and rows of given answers."""

import json
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import numpy as np
import pytest
import torch

from headstart.train.data.distill import distill, summary, write_manifest
from headstart.train.data.documents import Document
from headstart.train.data.prefixes import DistillError
from headstart.train.data.rendering import ChatRenderer, Rendered
from headstart.train.data.training_rows import Row, Rows
from headstart.train.data.writers import not_taken, taken, units
from headstart.train.data.writers.counting import count_prompts, per_document
from headstart.train.data.writers.drafting import Drafting, second_best
from headstart.train.data.writers.replay import Replay
from headstart.train.recipe import Chat, Distill, OpenAI
from tests.support.answered import CHATS, END, SPEC, WORDS, chat, same
from tests.support.chats import CHATML, GEMMA, HARMONY, QWEN3, REASONER, chat_tokenizer
from tests.support.talker import talker


@pytest.mark.parametrize(
    ("supervised", "openings"),
    [("0011011", 2), ("0001011", 1), ("0010011", 1), ("0011001", 1), ("0001001", 0)],
)
def test_openings_are_counted(supervised: str, openings: int) -> None:
    """Answers at tokens 2 and 3, and at 5 and 6: their first token and the one after it."""
    mask = np.array([each == "1" for each in supervised])
    row = Rendered(np.arange(7), mask, [(2, 4), (5, 7)])
    counts = units.written("x", [row], units.Counts()).counts
    assert (counts.answers, counts.openings) == (2, openings)
    short = Rendered(np.arange(3), np.arange(3) > 1, [(2, 3)])  # an answer of one token
    assert units.written("x", [row, short], units.Counts()).counts.openings == openings + 1


def written(folder: Path, spec: Distill = SPEC, model: Any = None, **how: Any) -> list[Row]:
    tokenizer = chat_tokenizer(how.pop("template", CHATML))
    model = model or talker(tokenizer, END)
    documents = how.pop("documents", CHATS)
    distill(spec, model, tokenizer, documents, folder, progress=False, **how)
    rows = Rows.load(folder)
    return [replace(rows.row(n), id=rows.id(n)) for n in range(len(rows))]


def spoken(
    model: Any, document: Document, spec: Distill, template: str, settings: Chat
) -> list[Row]:
    """The same by `generate` of transformers, a turn at a time."""
    tokenizer = chat_tokenizer(template)
    renderer, history = ChatRenderer(tokenizer, settings), []
    rows: list[tuple[list[int], list[bool]]] = []
    for message in document.messages or ():
        if message["role"] != "user":
            continue
        history.append(message)
        prompt = renderer.prompt(history)
        room = min(spec.new_tokens, spec.row_tokens - len(prompt))
        if room <= 0:
            break
        ids = torch.tensor([prompt])
        text = model.generate(ids, max_new_tokens=room, do_sample=False)[0].tolist()
        answer = text[len(prompt) :]
        taught = [True] * len(answer)
        if rows and prompt[: len(rows[-1][0])] == rows[-1][0]:
            before = rows.pop()[1]
            taught = before + [False] * (len(prompt) - len(before)) + taught
        else:
            taught = [False] * len(prompt) + taught
        rows.append((text, taught))
        if answer[-1] != model.config.eos_token_id or len(answer) == 1:
            break  # not finished, or empty
        history.append({"role": "assistant", "content": tokenizer.decode(answer[:-1])})
    return [Row(document.id, np.array(t, np.int32), np.array(on)) for t, on in rows]


@pytest.mark.parametrize("template", [CHATML, QWEN3])
def test_chats_are_replayed_with_the_targets_own_history(tmp_path: Path, template: str) -> None:
    model = talker(chat_tokenizer(template), END)
    settings = Chat(template_kwargs={"enable_thinking": False})
    rows = written(tmp_path, model=model, template=template, chat=settings)
    expected = [row for d in CHATS for row in spoken(model, d, SPEC, template, settings)]
    assert same(rows, expected)
    turns = {d.id: sum(row.id == d.id for row in rows) for d in CHATS}
    # ChatML: one row a chat, of up to three turns; Qwen3's template drops the empty thinking that
    # the prompt held.
    assert max(turns.values()) == (1 if template == CHATML else 3)
    assert len({len(row.tokens) for row in rows}) > 3
    starts = [np.flatnonzero(np.diff(row.supervised.astype(int)) == 1) for row in rows]
    assert max(map(len, starts)) == (3 if template == CHATML else 1)


def test_what_is_asked_again_is_answered_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the answers would be equal: greedily, whatever answers the documents have."""
    given = [chat(f"{d.id}.{n}", *_asked(d), answer=f"So {n}.") for n in range(3) for d in CHATS]
    every = written(tmp_path / "all", replace(SPEC, examples=27), documents=given)
    once = {tuple(row.tokens.tolist()) for row in written(tmp_path / "once")}
    assert len(every) == len(once) and {tuple(row.tokens.tolist()) for row in every} == once
    counts = summary(SPEC, tmp_path / "all")
    assert (counts["kept"], counts["skipped"]) == (9, 18)
    assert "18 documents skipped: each asks what another one does" in caplog.text
    some = written(tmp_path / "some", replace(SPEC, examples=5), documents=given)
    assert len({tuple(row.tokens.tolist()) for row in some}) == len(some) == 5
    warm = replace(SPEC, examples=27, temperature=1.0)
    assert len({row.id for row in written(tmp_path / "warm", warm, documents=given)}) == 27
    first = written(tmp_path / "first", replace(SPEC, turns="first"), documents=given)
    assert len(first) == len({message[0] for message in map(_asked, CHATS)})


def _asked(document: Document) -> list[str]:
    return [m["content"] for m in document.messages or () if m["role"] == "user"]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("train-*")}


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.proof), 1.0])
def test_a_drafter_changes_no_byte(tmp_path: Path, temperature: float) -> None:
    spec = replace(SPEC, temperature=temperature)
    plain = written(tmp_path / "plain", spec)
    drafted = replace(spec, drafter="lookup", use_drafter="always")
    written(tmp_path / "drafted", drafted)
    assert contents(tmp_path / "plain") == contents(tmp_path / "drafted")
    for rank in (1, 0):
        written(tmp_path / "two", spec, rank=rank, world=2)
    assert contents(tmp_path / "plain") == contents(tmp_path / "two")
    assert not same(plain, written(tmp_path / "other", replace(SPEC, temperature=1.5)))


@pytest.mark.parametrize(
    ("prefix", "temperature"),
    [
        pytest.param("prompt", 0.0, marks=pytest.mark.proof),
        ("prompt", 0.8),
        pytest.param("start", 0.8, marks=pytest.mark.proof),
    ],
)
def test_near_ties_are_counted_and_nothing_else_differs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, prefix: str, temperature: float
) -> None:
    tokenizer: Any = chat_tokenizer(CHATML)
    spec = replace(
        SPEC, drafter="lookup", use_drafter="always", new_tokens=40 if temperature else 120,
        max_length=400, batch_size=8, prefix=prefix,
        prefix_tokens=200 if prefix == "prompt" else 30, temperature=temperature,
    )  # fmt: skip
    several = range(8 if temperature else 32)
    documents = [chat(f"chats:{n}", f"{n} {WORDS[n:]}", "So?") for n in several]
    counts = {}
    for name, dtype in (("exact", torch.float64), ("rounded", torch.bfloat16)):
        model = talker(tokenizer, END, eagerness=1.0).to(dtype)
        written(tmp_path / name, spec, model, documents=documents)
        counts[name] = summary(spec, tmp_path / name)
    assert "near_ties" not in counts["exact"]
    assert counts["rounded"].get("near_ties", 0) < counts["rounded"]["supervised"] / 20
    assert "are not what the target writes" not in caplog.text

    rows, model = Rows.load(tmp_path / "exact"), talker(tokenizer, END, eagerness=1.0)
    other, far = np.zeros(400, np.int64), 0  # seeds of other noise
    for number in range(4):
        gaps, noise = second_best(model, rows.row(number), temperature, other)
        far += int((gaps > 2 * noise).sum())
    assert (far > 0) == (temperature > 0), "noise of another seed is seen"


def test_a_near_tie_is_told_from_another_token(tmp_path: Path) -> None:
    tokenizer: Any = chat_tokenizer(CHATML)
    written(tmp_path)
    row = Rows.load(tmp_path).row(0)
    small, large = (
        tokenizer.convert_tokens_to_ids([*letters])
        for letters in (ascii_lowercase, ascii_uppercase)
    )
    capital = dict(zip(small, large, strict=True))
    pairs = zip(row.tokens.tolist(), row.supervised, strict=True)
    changed = [capital.get(token, token) if ours else token for token, ours in pairs]
    tokens = np.asarray(changed, row.tokens.dtype)
    for dtype, near in ((torch.float32, True), (torch.float64, False)):
        model = talker(tokenizer, END).to(dtype)
        with torch.no_grad():  # a capital is its letter, but that its score is a rounding lower
            model.model.embed_tokens.weight[large] = model.model.embed_tokens.weight[small]
            model.lm_head.weight[large] = model.lm_head.weight[small] * (1 - 2**-23)
        gaps, noise = second_best(model, replace(row, tokens=tokens))
        assert len(gaps) and {gap <= 2 * noise for gap in gaps.tolist()} == {near}


def test_the_drafter_is_used_where_it_is_faster_and_the_choice_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(SPEC, drafter="lookup")
    written(tmp_path, spec)
    choice = json.loads((tmp_path / "drafting.json").read_text())
    speeds = choice["tokens_per_second"]
    assert choice["used"] == (speeds["drafted"] > speeds["plain"]) and choice["batch"] == 4
    (tmp_path / "drafting.json").write_text(json.dumps(choice | {"used": not choice["used"]}))
    (tmp_path / "train-00001-of-00002.json").unlink()
    monkeypatch.setattr(Drafting, "_trial", None)  # a resumed run makes no other choice
    written(tmp_path, spec)
    tokenizer = chat_tokenizer(CHATML)
    pace = distill(spec, talker(tokenizer, END), tokenizer, CHATS, tmp_path, progress=False)
    assert pace.tokens == 0  # all was there
    counts = write_manifest(spec, tmp_path, tokenizer, None, "m", pace)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [each["used"] for each in manifest["drafting"]] == [not choice["used"]]
    assert manifest["counts"] == counts and counts["kept"] == 9
    assert manifest["template_hash"] and manifest["settings"]["distill"]["drafter"] == "lookup"


def test_a_resumed_run_follows_settings_that_were_changed(tmp_path: Path) -> None:
    def chosen(**changes: Any) -> Any:
        (tmp_path / "train-00001-of-00002.json").unlink(missing_ok=True)
        written(tmp_path, replace(SPEC, **changes))
        return json.loads((tmp_path / "drafting.json").read_text())

    chosen(drafter="lookup")
    old = {"drafter": "another", "used": False}
    (tmp_path / "drafting.json").write_text(json.dumps(old))
    assert chosen(drafter="lookup").keys() > old.keys()  # a trial of its own
    (tmp_path / "drafting.json").write_text(json.dumps(old | {"drafter": "lookup"}))
    always = {"drafter": "lookup", "used": True}
    assert chosen(drafter="lookup", use_drafter="always") == always


def test_a_drafter_that_adapts_the_target_is_refused(tmp_path: Path) -> None:
    manifest = {"family": "medusa2", "target": "t", "target_fingerprint": "f"}
    manifest["adapter_sha256"] = "a" * 64
    (tmp_path / "headstart.json").write_text(json.dumps(manifest))
    with pytest.raises(DistillError, match="changes the target by an adapter"):
        written(tmp_path / "rows", replace(SPEC, drafter=str(tmp_path)))


def test_limits_cut_chats_at_a_turn_and_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = chat("chats:long", "why " * 40, "how")
    rows = written(tmp_path, replace(SPEC, max_length=70), documents=[*CHATS, long])
    assert max(len(row.tokens) for row in rows) <= 70
    counts = summary(SPEC, tmp_path)
    assert counts["too_long"] == 1 and counts["cut"] >= 1 and counts["kept"] == 9
    assert "1 text left out: longer than distill.prefix_tokens 60" in caplog.text
    first = written(tmp_path / "first", replace(SPEC, turns="first"))
    assert len(first) == 9 and all(np.diff(row.supervised.astype(int)).sum() == 1 for row in first)
    with pytest.raises(DistillError, match="none of 9 training documents has a prompt"):
        written(tmp_path / "none", replace(SPEC, prefix_tokens=3))


def test_what_answers_are_written_without_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = talker(chat_tokenizer(CHATML), END)
    rows = written(tmp_path / "plain", model=model)
    assert "generation config" not in caplog.text
    model.generation_config.update(min_new_tokens=2, bad_words_ids=[[7]])
    assert same(written(tmp_path / "without", model=model), rows)
    told = "without the min_new_tokens and the bad_words_ids of the target's generation config"
    assert told in caplog.text


@pytest.mark.parametrize("prefix", ["prompt", "start"])
@pytest.mark.parametrize("name", ["repetition_penalty", "no_repeat_ngram_size"])
def test_what_reads_the_text_in_the_generation_config_applies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, prefix: str
) -> None:
    """To chats and to prefixes, with a drafter and without, and where near-ties are looked for."""
    plain = replace(SPEC, prefix=prefix, prefix_tokens=60 if prefix == "prompt" else 20)
    drafted = replace(plain, drafter="lookup", use_drafter="always")
    model = talker(chat_tokenizer(CHATML), END, eagerness=1.0).double()
    without = written(tmp_path / "without", plain, model)
    setattr(model.generation_config, name, 1.3 if name == "repetition_penalty" else 2)
    rows = written(tmp_path / "plain", plain, model)
    assert same(written(tmp_path / "drafted", drafted, model), rows) and not same(rows, without)
    assert "are not what the target writes" not in caplog.text
    assert "near_ties" not in summary(drafted, tmp_path / "drafted")
    if prefix == "prompt":
        assert same(rows, [row for d in CHATS for row in spoken(model, d, plain, CHATML, Chat())])
    setattr(model.generation_config, name, None)  # a control: it is seen where it was not
    found = [second_best(model, row)[0] for row in rows]
    assert sum(map(len, found)) > 0


def test_the_history_is_what_was_written_to_the_space() -> None:
    """Tokenizers may take a space before a full stop away; the next prompt has it."""
    tokenizer = chat_tokenizer(CHATML)
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    said = tokenizer("no , it is not .", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(said) == "no, it is not."
    end: Any = tokenizer.convert_tokens_to_ids(END)
    replay = Replay(CHATS[1], ChatRenderer(tokenizer), SPEC, {end})
    assert replay.ask() is not None
    replay.take([*said, end])
    assert replay.history[-1]["content"] == "no , it is not ."
    assert replay.ask() is not None
    replay.take([end])
    assert len(replay.rows) == 1


HARMONY_ANSWER = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    "<|channel|>final<|message|>Hello.<|end|>"
)


def harmony_replay(refused: str = "skip", form: Any = None) -> Replay:
    """A chat of two questions, the first of which was answered with thinking."""
    tokenizer: Any = chat_tokenizer(HARMONY)
    tokenizer.response_template = form
    end: Any = tokenizer.convert_tokens_to_ids("<|end|>")
    spec = replace(SPEC, prefix_tokens=300, max_length=900)
    renderer = ChatRenderer(tokenizer, Chat(refused=refused))
    replay = Replay(chat("c:1", "Hi", "Why?"), renderer, spec, {end})
    assert replay.ask() is not None
    replay.take(tokenizer(HARMONY_ANSWER, add_special_tokens=False)["input_ids"])
    return replay


def test_own_answers_that_the_template_refuses_end_a_chat() -> None:
    replay = harmony_replay()
    assert replay.ask() is None
    counts = replay.result().counts
    assert (counts.kept, counts.refused, counts.cut, counts.empty) == (1, 1, 0, 0)
    said = "1 chat left out or ended early: refused by the chat template"
    assert list(counts.left_out(SPEC)) == [said]
    with pytest.raises(DistillError) as refused:
        harmony_replay("raise").ask()
    assert str(refused.value) == (
        "c:1: the tokenizer's chat template refuses a chat of the roles user, assistant, user "
        "(found <|channel|> in content); its answers are the target's own: set "
        "distill.turns=first, set chat.refused=skip, or set distill.chat=plain."
    )


def test_answers_are_taken_apart_as_the_tokenizer_says() -> None:
    fields: dict[str, dict[str, Any]] = {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        "content": {"open": "<|channel|>final<|message|>", "close": "<|end|>"},
    }
    form = {"start_anchor": "<|start|>assistant", "fields": fields}
    replay = harmony_replay(form=form)
    asked = replay.ask()
    assert asked is not None and replay.counts == units.Counts()
    assert asked.messages[1] == {"role": "assistant", "content": "Hello.", "thinking": "Hm."}
    fields["thinking"] |= {"open": "<other>", "optional": False}  # the answer is of no such form
    assert harmony_replay(form=form).ask() is None


@pytest.mark.parametrize("writer", ["own", "given"])
def test_chats_that_the_template_refuses_are_left_out_where_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, writer: str
) -> None:
    """Behind those that are looked at before the work begins, too."""
    system = {"role": "system", "content": "Be kind."}
    refused = Document.chat("chats:refused", [system, *(CHATS[0].messages or ())])
    spec = replace(SPEC, writer=writer)
    how = {"template": GEMMA, "model": talker(chat_tokenizer(GEMMA), "<end_of_turn>")}
    with pytest.raises(DistillError, match=r"chats:refused: .* refuses .* chat\.refused=skip"):
        written(tmp_path / "raise", spec, documents=[*CHATS, refused], **how)
    skip = {"chat": Chat(refused="skip"), **how}
    rows = written(tmp_path / "skip", spec, documents=[CHATS[0], refused, *CHATS[1:]], **skip)
    assert {row.id for row in rows} == {document.id for document in CHATS}
    counts = summary(spec, tmp_path / "skip")
    assert (counts["kept"], counts["refused"]) == (9, 1)
    what = "left out" if writer == "given" else "left out or ended early"
    assert f"1 chat {what}: refused by the chat template" in caplog.text
    with pytest.raises(DistillError, match=r"none of 1 training .* the chat template refuses 1"):
        written(tmp_path / "none", spec, documents=[refused], **skip)


GIVEN = [
    chat("g:1", "Hi", "Why?"),
    Document.chat("g:2", [{"role": "user", "content": "No answer"}]),
    Document("g:3", "def one():", answer="\n    return 1"),
    Document("g:4", "some text"),
    chat("g:5", "Hi", "w" * 90),
    chat("g:6", "w" * 99),
]


@pytest.mark.parametrize("supervise", ["all", "last"])
def test_given_answers(tmp_path: Path, supervise: str) -> None:
    spec = replace(SPEC, writer="given", max_length=90)
    settings = Chat(supervise=supervise)

    def load() -> Any:
        raise AssertionError("the target is not needed")

    tokenizer = chat_tokenizer(CHATML)
    given = [*GIVEN, Document("g:7", "def two():", answer="")]
    distill(spec, load, tokenizer, given, tmp_path, progress=False, chat=settings)
    rows = Rows.load(tmp_path)
    found = {}
    for number in range(len(rows)):
        row = rows.row(number)
        taught = tokenizer.decode(row.tokens[row.supervised])
        found[rows.id(number)] = (tokenizer.decode(row.tokens), taught)
    head, answer = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", f"yes it is{END}"
    more = "\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    every = supervise == "all"
    expected = {
        "g:1": (head + answer + more + answer, answer * (2 if every else 1)),
        "g:3": ("def one():\n    return 1</s>", "\n    return 1</s>"),
        "g:4": ("some text", "ome text"),
    }
    cut = {"g:5": (head + answer, answer)} if every else {}  # whose last answer does not fit
    assert found == expected | cut
    counts = summary(spec, tmp_path)
    assert {k: counts.get(k, 0) for k in ("kept", "cut", "empty", "too_long", "rows")} == {
        "kept": 3 + every, "cut": int(every), "empty": 2, "too_long": 2 - every, "rows": 3 + every,
    }  # fmt: skip
    told = count_prompts(spec, tokenizer, given, settings).known()
    assert told == {name: counts[name] for name in told}


def test_all_of_a_long_text_is_taught(tmp_path: Path) -> None:
    """In rows that follow one another, the same whichever process writes them."""
    texts = [Document(f"t:{n}", WORDS[n:] * (1 + 3 * n)) for n in range(5)]
    spec = replace(SPEC, writer="given", max_length=20, examples=4)
    rows = written(tmp_path / "one", spec, documents=texts)
    tokenizer = chat_tokenizer(CHATML)
    for document in texts:
        mine = [row for row in rows if row.id == document.id]
        assert all(len(row.tokens) == 20 for row in mine[:-1])
        assert all(not row.supervised[0] and row.supervised[1:].all() for row in mine)
        text = tokenizer.decode(np.concatenate([[], *(row.tokens for row in mine)]).astype(int))
        if mine:  # a token that is left over would be a row that teaches nothing
            assert text in (document.text, document.text[:-1])
    assert len({row.id for row in rows}) == 4  # as many texts as examples
    counts = summary(spec, tmp_path / "one")
    assert (counts["kept"], counts["split"], counts["rows"]) == (4, 4, len(rows))
    assert "cut" not in counts and "truncated" not in counts
    for rank in (1, 0):
        how = {"documents": texts, "rank": rank, "world": 2}
        again = written(tmp_path / "two", spec, **how)
    assert same(again, rows) and len(again) == len(rows)


def test_long_answers_to_prompts_are_truncated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = replace(SPEC, writer="given", max_length=20)
    (row,) = written(tmp_path, spec, documents=[Document("p", "def one():", answer="w" * 99)])
    assert chat_tokenizer(CHATML).decode(row.tokens[row.supervised]) == "w" * 10
    assert summary(spec, tmp_path)["truncated"] == 1 and "cut" not in summary(spec, tmp_path)
    assert "1 answer truncated: longer than max_length allows" in caplog.text


@pytest.mark.parametrize(("supervise", "kept"), [("all", ["long"]), ("last", ["long", "g:5"])])
def test_a_long_answer_of_a_chat_is_truncated_where_asked(
    tmp_path: Path, supervise: str, kept: list[str]
) -> None:
    spec = replace(SPEC, writer="given", max_length=90, too_long="truncate")
    long = chat("long", "Hi", answer="w" * 99)
    late = Document.chat("g:5", [*(GIVEN[0].messages or ())[:3], *(long.messages or ())[1:]])
    settings = Chat(supervise=supervise)
    rows = written(tmp_path, spec, documents=[long, late, GIVEN[5]], chat=settings)
    tokenizer = chat_tokenizer(CHATML)
    for row in rows:
        if row.id in kept:
            assert set(tokenizer.decode(row.tokens[row.supervised])) == {"w"}
            assert len(row.tokens) == 90 and row.supervised[-1]
    counts = summary(spec, tmp_path)
    assert (counts["kept"], counts["too_long"]) == (2, 1)  # one question does not fit
    assert (counts["truncated"], counts.get("cut", 0)) == (len(kept), 2 - len(kept))


@pytest.mark.parametrize("writer", ["given", "own"])
def test_documents_that_are_not_taken_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, writer: str
) -> None:
    tokenizer = chat_tokenizer(CHATML)
    model = talker(tokenizer, END).float()
    spec = replace(SPEC, writer=writer, prefix="prompt", max_length=90)
    said = "distill: 3 of 6 documents are taken (distill.examples)"
    for examples, left in ((3, 3), (6, 0)):
        caplog.clear()
        made, folder = replace(spec, examples=examples), tmp_path / f"{examples}"
        for rank in range(2):
            distill(made, model, tokenizer, GIVEN, folder, rank=rank, world=2, progress=False)
        assert caplog.messages.count(said) == bool(left)  # by one process
        assert summary(made, folder).get("not_taken", 0) == left
    windows = replace(spec, writer="own", prefix="window", examples=3)  # of which any are drawn
    assert not taken(windows, 6) and not not_taken(windows, 6)


def test_counts_are_known_before_work_begins() -> None:
    spec = replace(SPEC, prefix_tokens=30, max_length=80)
    told = count_prompts(spec, chat_tokenizer(CHATML), GIVEN)
    assert told.kept == 5 and told.too_long == 1 and told.cut == 1


@pytest.mark.parametrize(
    ("template", "rows"), [(CHATML, 1), (GEMMA, 1), (QWEN3, 3), (REASONER, 3)],
    ids=["ChatML", "Gemma", "Qwen3", "a reasoner"],
)  # fmt: skip
def test_rows_of_a_chat_that_is_answered_anew(template: str, rows: int) -> None:
    """Templates that drop the thinking of earlier turns make a row of each answer."""
    tokenizer, spec = chat_tokenizer(template), replace(SPEC, prefix="prompt")
    turns = [{"role": "user", "content": f"What of {n}?"} for n in range(3)]
    given = [turn for each in turns for turn in (each, {"role": "assistant", "content": "That."})]
    for writer in ("own", "openai"):
        some = [Document.chat("1", given), Document("2", "a text")]
        made = replace(spec, writer=writer, openai=OpenAI())
        assert per_document(made, tokenizer, some) == ((rows + 1) / 2, 2.0)
        assert per_document(replace(made, turns="first"), tokenizer, some) == (1.0, 1.0)
    assert per_document(replace(spec, prefix="window"), tokenizer, some) == (1.0, 1.0)


def test_rows_of_given_chats() -> None:
    tokenizer, spec = chat_tokenizer(CHATML), replace(SPEC, writer="given", max_length=90)
    counts = count_prompts(spec, tokenizer, GIVEN)
    found = counts.rows / len(GIVEN), counts.answers / len(GIVEN)
    assert per_document(spec, tokenizer, GIVEN) == found and found[0] != found[1]
