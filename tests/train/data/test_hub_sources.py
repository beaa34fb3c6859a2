"""Data sets on the Hub: the real clients against a local Hub."""

import io
import json
import re
import traceback
from collections.abc import Iterator
from typing import Any

import huggingface_hub
import pytest

from headstart.train.data.documents import CorpusError
from headstart.train.data.fingerprints import source_fingerprint
from headstart.train.data.reading import Skipped, read_source
from headstart.train.recipe import Corpus, Source
from tests.support.hub_server import TOKEN, Hub, serving

datasets: Any = pytest.importorskip("datasets")

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
        hub.add("datasets/me/table", {
            "README.md": card({"train": "train.csv"}), "train.csv": b"text\n007\n2024-01-01\n"
        })  # fmt: skip
        hub.add("datasets/me/script", {"script.py": b"raise SystemExit('it was run')"})
        hub.add("datasets/me/secret", {"train.jsonl": b'{"text": "one"}\n'}, private=True)
        yield hub


@pytest.fixture(autouse=True)
def clients(hub: Hub, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients talk to the local Hub, and keep what they fetch in a folder of the test."""
    constants, config = huggingface_hub.constants, datasets.config
    for module in (constants, config):  # the other tests forbid all talk
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(config, "HF_UPDATE_DOWNLOAD_COUNTS", False)
    place = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", place)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(config, "HF_ENDPOINT", hub.url)
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setenv("HF_TOKEN", TOKEN)


def read(source: str, **keys: Any) -> list[Any]:
    """Id, source and content of the documents."""
    found = read_source(Source(source, **keys), Skipped())
    return [[d.id, d.source, d.messages or d.text] for d in found]


def commit(source: str, **keys: Any) -> str:
    """The commit in the fingerprint of a corpus."""
    return source_fingerprint(Corpus(sources=[Source(source, **keys)]))["sources"][0]["commit"]


@pytest.mark.parametrize(
    ("preset", "count"), [("ultrachat", 3), ("sharegpt", 2), ("perfectblend", 1)]
)
def test_presets(hub: Hub, preset: str, count: int) -> None:
    assert read(preset) == [[f"{preset}:{n}", preset, CHAT] for n in range(1, count + 1)]
    (fingerprint,) = source_fingerprint(Corpus(source=preset))["sources"]
    assert list(hub.repositories[f"datasets/{fingerprint['name']}"].commits) == [
        fingerprint["commit"]
    ]


def test_names_splits_and_revisions(hub: Hub) -> None:
    name = "hub:HuggingFaceH4/ultrachat_200k"
    assert read(name, split="test_sft")[0][1:] == [name[4:], CHAT[:1]]
    with pytest.raises(CorpusError, match="no split 'train'; expected one of: train_sft, test_sft"):
        read(name)
    assert read("hub:me/lines") == [["me/lines:1", "me/lines", DATE]]
    repository = hub.repositories["datasets/me/lines"]
    (old,) = repository.commits
    new = repository.commit("main", {"train.jsonl": b'{"text": "new"}\n'})
    for revision, found, text in ((None, new, "new"), ("main", new, "new"), (old, old, DATE)):
        assert commit("hub:me/lines", revision=revision) == found
        assert read("hub:me/lines", revision=revision)[0][2] == text
    with pytest.raises(CorpusError, match="hub:me/lines row 2: text holds half a surr") as error:
        read("hub:me/lines", revision=old, split="broken")
    assert "UnicodeEncodeError" not in "".join(traceback.format_exception(error.value))


def test_tables_of_text_stay_text() -> None:
    assert [row[2] for row in read("hub:me/table")] == ["007", "2024-01-01"]


@pytest.mark.parametrize(
    ("source", "keys", "said"),
    [
        ("hub:me/script", {}, "loading script, which is code and is not run"),
        ("hub:me/nowhere", {}, "no such repository"),
        ("hub:me/lines", {"revision": "v9"}, "no such revision"),
        ("hub:me/table", {"config": "other"}, r"corpus\.config: .*other.*default"),
        ("hub:../lines", {}, "check the path or the name"),
    ],
)
def test_refusals(source: str, keys: dict[str, str], said: str) -> None:
    with pytest.raises(CorpusError, match=f"^{re.escape(source)}: .*{said}") as error:
        read(source, **keys)
    assert "\n" not in str(error.value) and TOKEN not in str(error.value)


def test_a_private_set_is_read_with_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read("hub:me/secret") == [["me/secret:1", "me/secret", "one"]]
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(CorpusError, match="no such repository, or a private or gated one"):
        read("hub:me/secret")


def test_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CorpusError, match="the Hub cannot be reached"):
        read("ultrachat")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CorpusError, match="HF_HUB_OFFLINE is set"):
        read("ultrachat")


def test_a_folder_of_the_same_name_is_not_the_set(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "me" / "table").mkdir(parents=True)
    (tmp_path / "me" / "table" / "train.csv").write_text("text\nnot this\n")
    monkeypatch.chdir(tmp_path)
    assert len(read("hub:me/table")) == 2
