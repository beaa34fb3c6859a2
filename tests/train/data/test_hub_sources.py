"""Data sets on the Hub: the real clients against a local Hub, in a process of their own."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import pytest

from tests.support.hub_server import TOKEN, Hub, serving
from tests.support.paths import ROOT

# Reads a line of JSON, the keys of a Source, and answers with one: ids and chats, or the error.
CLIENT = """
import json, os, sys
from headstart.train.data.documents import CorpusError
from headstart.train.data.fingerprints import source_fingerprint
from headstart.train.data.reading import Skipped, read_source
from headstart.train.recipe import Corpus, Source

for line in sys.stdin:
    try:
        source = Source(**json.loads(line))
        print_ = source_fingerprint(Corpus(sources=[source]))["sources"][0]
        found = [[d.id, d.source, d.messages or d.text] for d in read_source(source, Skipped())]
        answer = {"documents": found, "fingerprint": print_}
    except CorpusError as error:
        answer = {"error": str(error), "chained": repr(error.__cause__)}
    sys.__stdout__.write(json.dumps(answer) + "\\n")
    sys.__stdout__.flush()
"""
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
SHARE = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
DATE = "2024-01-01"


def parquet(rows: list[dict[str, Any]]) -> bytes:
    data = io.BytesIO()
    datasets.Dataset.from_list(rows).to_parquet(data)
    return data.getvalue()


def card(splits: dict[str, str], config: str = "default") -> bytes:
    files = "".join(f"  - split: {split}\n    path: {path}\n" for split, path in splits.items())
    return f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n".encode()


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serving() as hub:
        hub.add("datasets/HuggingFaceH4/ultrachat_200k", {
            "README.md": card({"train_sft": "data/train_sft-*", "test_sft": "data/test_sft-*"}),
            "data/train_sft-0.parquet": parquet([{"prompt": "hi", "messages": CHAT}] * 2),
            "data/train_sft-1.parquet": parquet([{"prompt": "hi", "messages": CHAT}]),
            "data/test_sft-0.parquet": parquet([{"prompt": "test", "messages": CHAT[:1]}]),
        })  # fmt: skip
        rows = [{"conversations": SHARE, "at": DATE}, {"conversations": SHARE, "at": 3}]
        hub.add("datasets/Aeala/ShareGPT_Vicuna_unfiltered", {"a.json": json.dumps(rows).encode()})
        blend = parquet([{"conversations": SHARE, "source": "x"}])
        hub.add("datasets/mlabonne/open-perfectblend", {"data/train-0.parquet": blend})
        lines = [{"text": DATE}, {"text": "\ud800"}, {"text": 3}]
        hub.add("datasets/me/lines", {
            "train.jsonl": "".join(json.dumps(row) + "\n" for row in lines[:1]).encode(),
            "broken.jsonl": "".join(json.dumps(row) + "\n" for row in lines).encode(),
            "README.md": card({"train": "train.jsonl", "broken": "broken.jsonl"}),
        })  # fmt: skip
        hub.add("datasets/me/script", {"script.py": b"raise SystemExit('it was run')"})
        hub.add("datasets/me/secret", {"train.jsonl": b'{"text": "one"}\n'}, private=True)
        yield hub


@pytest.fixture(scope="module")
def ask(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    home = tmp_path_factory.mktemp("hub")
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING_FACE"))}
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        cwd=home, env=kept | settings | {"PYTHONPATH": str(ROOT), "HF_TOKEN": TOKEN}, text=True,
    )  # fmt: skip
    assert client.stdin is not None and client.stdout is not None

    def ask(source: str, **keys: Any) -> Any:
        client.stdin.write(json.dumps({"source": source, **keys}) + "\n")  # type: ignore[union-attr]
        client.stdin.flush()  # type: ignore[union-attr]
        return json.loads(client.stdout.readline())  # type: ignore[union-attr]

    yield ask
    client.stdin.close()
    assert client.wait(timeout=60) == 0


@pytest.mark.parametrize(
    ("preset", "count"), [("ultrachat", 3), ("sharegpt", 2), ("perfectblend", 1)]
)
def test_presets(ask: Callable[..., Any], hub: Hub, preset: str, count: int) -> None:
    answer = ask(preset)
    expected = [[f"{preset}:{n}", preset, CHAT] for n in range(1, count + 1)]
    assert answer["documents"] == expected
    (commit,) = hub.repositories[f"datasets/{answer['fingerprint']['name']}"].commits
    assert answer["fingerprint"]["commit"] == commit


def test_names_splits_and_revisions(ask: Callable[..., Any], hub: Hub) -> None:
    name = "hub:HuggingFaceH4/ultrachat_200k"
    assert ask(name, split="test_sft")["documents"][0][1:] == [name[4:], CHAT[:1]]
    assert "has no split 'train'; expected one of: train_sft, test_sft" in ask(name)["error"]
    assert ask("hub:me/lines")["documents"] == [["me/lines:1", "me/lines", DATE]]
    assert "corpus.config" in ask("hub:me/lines", config="other")["error"]
    repository = hub.repositories["datasets/me/lines"]
    (old,) = repository.commits
    new = repository.commit("main", {"train.jsonl": b'{"text": "new"}\n'})
    answers = [ask("hub:me/lines", revision=revision) for revision in (None, "main", old)]
    assert [answer["fingerprint"]["commit"] for answer in answers] == [new, new, old]
    assert [answer["documents"][0][2] for answer in answers] == ["new", "new", DATE]
    broken = ask("hub:me/lines", revision=old, split="broken")
    assert "hub:me/lines row 2: text holds half a surrogate" in broken["error"]
    assert broken["chained"] == "None"


@pytest.mark.parametrize(
    ("source", "keys", "said"),
    [
        ("hub:me/script", {}, "loading script, which is code and is not run"),
        ("hub:me/nowhere", {}, "no such repository|the name is wrong"),
        ("hub:me/lines", {"revision": "v9"}, "no such revision"),
        ("hub:../lines", {}, "name"),
    ],
)
def test_refusals(ask: Callable[..., Any], source: str, keys: dict[str, str], said: str) -> None:
    import re

    answer = ask(source, **keys)
    assert re.search(said, answer["error"]) and "\n" not in answer["error"]
    assert answer["error"].startswith(source) and TOKEN not in str(answer)


def test_a_private_set_is_read_with_the_token(ask: Callable[..., Any]) -> None:
    assert ask("hub:me/secret")["documents"] == [["me/secret:1", "me/secret", "one"]]
