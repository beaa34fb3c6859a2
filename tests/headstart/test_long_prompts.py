"""Whole documents as prompts: what does not fit is cut, what costs much is told of before."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headstart.cli import main
from headstart.infer import Speculator
from headstart.long_prompts import TAKEN, prompts_of
from headstart.matrix import Matrix
from headstart.measuring import _chats
from headstart.terminal import UsageError
from headstart.train.data.documents import Document, plain_chat
from headstart.train.data.questions import Question
from tests.support.bytewise import save_target
from tests.support.chats import TOOLS, chat_tokenizer

CONTEXT = 1000


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A target of a context of 1,000 tokens, and its tokenizer."""
    folder = tmp_path_factory.mktemp("target")
    model, tokenizer = save_target(folder, CONTEXT)
    runner = Speculator(model).target
    return SimpleNamespace(
        model=model, tokenizer=tokenizer, folder=folder, target=runner, device=model.device
    )


def test_a_text_that_does_not_fit_is_cut(loaded: Any) -> None:
    documents = [Document("a", "x" * 5000), Document("b", "x" * 900), Document("c", "x" * 700)]
    found, (note,) = prompts_of(documents, loaded, None, new_tokens=200)
    assert [ids.shape[1] for ids in found] == [TAKEN, TAKEN, 700]
    assert note.startswith("2 of 3 texts are longer than the 800 tokens") and "first 512" in note
    found, (note,) = prompts_of(documents[:1], loaded, None, new_tokens=900)
    assert found[0].shape[1] == 100 and "first 100" in note
    found, notes = prompts_of(documents, loaded, 30, new_tokens=200)
    assert [ids.shape[1] for ids in found] == [30] * 3 and not notes


def test_a_chats_own_tools_are_in_its_prompt(loaded: Any) -> None:
    tokenizer, messages = chat_tokenizer(TOOLS), [{"role": "user", "content": "Rain?"}]
    speculator = SimpleNamespace(**vars(loaded) | {"tokenizer": tokenizer})
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    found, _ = prompts_of([Document.chat("a", messages, tools=tools)], speculator, None, 9)  # type: ignore[arg-type]
    template: Any = tokenizer.apply_chat_template
    assert found[0][0].tolist() == template(
        messages, tools=tools, add_generation_prompt=True, return_dict=False
    )
    assert '"weather"' in tokenizer.decode(found[0][0])


@pytest.mark.parametrize(("messages", "limit"), [(True, None), (False, 950)])
def test_what_is_asked_whole_is_refused(loaded: Any, messages: bool, limit: int | None) -> None:
    long = Document("a", "x" * 5000)
    if messages:
        long = Document.chat("a", [{"role": "user", "content": "x" * 5000}])
    with pytest.raises(UsageError, match="has room for 800; cut prompts with --prefix-tokens"):
        prompts_of([long], loaded, limit, new_tokens=200)


def test_a_chat_that_does_not_fit_loses_its_oldest_turns(loaded: Any) -> None:
    said = [("user", "a" * 300), ("assistant", "b" * 300), ("user", "c" * 200)]
    said += [("assistant", "d" * 100), ("user", "e" * 100)]
    messages = [{"role": role, "content": text} for role, text in [("system", "s"), *said]]
    long = [{"role": "user", "content": "x" * 999}]
    questions = [
        Question(name, "", Document.chat(name, each), later)
        for name, each, later in (("a", messages, ["f" * 300]), ("b", long, []))
    ]
    chats, cut, _ = _chats(loaded, questions, Matrix("none", new_tokens=500), [])
    assert cut == {"a", "b"}
    kept = loaded.tokenizer.decode(chats[0].prompt([]))
    assert kept == plain_chat([messages[0], *messages[3:]])  # the system's message stays
    kept = loaded.tokenizer.decode(chats[0].prompt([[65] * 40]))
    assert kept.startswith("System: s\n\nUser: eee") and kept.endswith("fff\n\nAssistant:")
    assert len(chats[1].prompt([])) == 500  # of a single message the end stays


def test_the_cost_of_long_prompts_is_told(loaded: Any) -> None:
    loaded.model.config.max_position_embeddings = 9000
    try:
        _, (note,) = prompts_of([Document("a", "x" * 5000)] * 2, loaded, None, new_tokens=200)
    finally:
        loaded.model.config.max_position_embeddings = CONTEXT
    config = loaded.model.config
    width = config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    assert f"about {5000 * 2 * 4 * width / 1e9:.2g} GB" in note
    assert "have 10,000 tokens, up to 5,000" in note


def test_bench_tells_first(loaded: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "documents.jsonl"
    prompts.write_text(json.dumps({"text": "abc" * 900}) + "\n" + json.dumps({"text": "abc"}))
    command = ["bench", "--target", str(loaded.folder), "--drafter", "lookup", "--repeats", "1"]
    command += ["--prompts", str(prompts), "--new-tokens", "3", "--report", "none", "--json"]
    assert main([*command, "--against", "none"]) == 0
    out, err = capsys.readouterr()
    line = "1 of 2 texts are longer than the 997 tokens"
    assert line in err and any(line in note for note in json.loads(out)["notes"])
