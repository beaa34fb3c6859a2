"""Wrong invocations and hostile files: one line and status 1 or 2, at once."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headstart.cli import main
from tests.support.bytewise import save_heads, save_target
from tests.support.paths import ROOT

SECONDS = 5.0
X = ["--prompt", "x"]
GENERATE = ["generate", "--target", "TARGET", *X]
HEADS = ["generate", "--drafter", "HEADS", *X]
BENCH = ["bench", "--target", "TARGET", "--prompts", "prompts.txt"]

INVOCATIONS = [
    ["nothing"], ["--nothing"], ["generate", "--nothing"], ["inspect", "a", "b"],
    ["inspect", "./none"], ["inspect", "../none/.."], ["inspect", "a b"], ["inspect", ""],
    ["inspect", "prompts.txt"], ["inspect", "EMPTY"], ["inspect", "org/none"],
    ["inspect", "TARGET", "--prompt"],
    ["inspect", "a/b/c"], ["inspect", "x" * 5000], ["inspect", "HEADS", "--target", "EMPTY"],
    ["inspect", "HEADS", "--target", "prompts.txt"], ["inspect", "HEADS", "--target", "HEADS"],
    ["generate", "--target", "HEADS", *X], ["generate", "--target", "prompts.txt", *X],
    ["generate", "--target", "EMPTY", *X], ["generate", "--target", "./none", *X],
    ["generate", "--target", "org/none", *X], ["generate", "--target", "", *X],
    ["generate", "--target", "TARGET", "--file", "none.txt"],
    ["generate", "--target", "TARGET", "--file", "EMPTY"],
    [*GENERATE, "--dtype", "float23"], [*GENERATE, "--dtype", "int8"],
    [*GENERATE, "--device", "toaster"], [*GENERATE, "--device", "cuda:99"],
    [*GENERATE, "--max-new-tokens", "100000000"], [*GENERATE, "--max-new-tokens", "3.0"],
    [*GENERATE, "--max-new-tokens", "-1"], [*GENERATE, "--temperature", "inf"],
    [*GENERATE, "--temperature", "1", "--top-k", "0"], [*GENERATE, "--seed", "x"],
    [*GENERATE, "--drafter", "./none"], [*GENERATE, "--drafter", "org/none"],
    [*GENERATE, "--drafter", "prompts.txt"], [*GENERATE, "--drafter", "EMPTY"],
    [*GENERATE, "--tree", "chain:2"], [*GENERATE, "--chat"], [*GENERATE, "--rule", "none"],
    [*GENERATE, "--max-memory", "cpu=-1GB"], ["generate", "--target", "TARGET", "--prompt", ""],
    [*HEADS, "--tree", "chain:1000000"], [*HEADS, "--tree", "cartesian:1000,1000,1000"],
    [*HEADS, "--tree", "best-first:1000000,5000,5"], [*HEADS, "--tree", "beam:1000000,2"],
    [*HEADS, "--tree", "sparse:1000000"], [*HEADS, "--tree", "none.json"],
    [*HEADS, "--tree", "[" * 100_000], [*HEADS, "--tree", "chain:9"],
    [*HEADS, "--expansion", "none"], [*GENERATE, "--top-p", "0.5"],
    [*BENCH, "--new-tokens", "100000000"], [*BENCH, "--limit", "0"],
    ["push", "HEADS", "org/name", "--license", "apache2", "--dry-run"],
    ["push", "HEADS", "name", "--dry-run"], ["push", "./none", "org/name"],
    ["convert", "HEADS", "OUT", "--target", "TARGET"],
    ["convert", "EMPTY", "OUT", "--target", "TARGET"],
    ["convert", "./none", "OUT", "--target", "TARGET"],
    ["train", "none"], ["train", "quickstart", "train.none=1"], ["export", "HEADS"],
]  # fmt: skip


def config(**change: Any) -> tuple[str, Any]:
    return "config.json", change


def manifest(**change: Any) -> tuple[str, Any]:
    return "headstart.json", change


FILES = [
    *(("tree.json", text) for text in (
        "[" * 100_000, "", "null", "5", "{}", "[[0.5]]", '[["a"]]', "[[-1]]", "[[]]", "[0]",
        json.dumps([[0] * 300]), json.dumps([[10**9]]), json.dumps([[i] for i in range(5000)]),
        "[" + "1" * 10_000 + "]",
    )),
    *(("plan.json", text) for text in ("[]", '{"a": 3}', '{"a": {}}', '{"a":' * 50_000, "\0")),
    config(heads=-1), config(heads=10**12), config(heads="4"), config(heads=[1]),
    config(layers=10**9), config(hidden_size=-5), config(hidden_size=10**12),
    config(hidden_size="x"), config(vocab_size="x"), config(feature_layers="abc"),
    config(feature_layers=[None]), config(feature_layers=[]), config(output="evil"),
    config(draft_vocab_size=5),
    config(model_type=5), config(auto_map={"AutoConfig": "x.Y"}), ("config.json", "[" * 100_000),
    ("config.json", "[]"), manifest(family=7), manifest(family="none"), manifest(target=3),
    manifest(versions=3), manifest(metrics=[]), manifest(weights_sha256=None), manifest(none=1),
    ("headstart.json", '{"a":' * 50_000), ("headstart.json", b"\xff\xfe"),
    ("model.safetensors", b""), ("model.safetensors", b"\xff" * 64),
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    save_target(folder / "model")
    save_heads(str(folder / "model"), folder / "heads")
    (folder / "empty").mkdir()
    (folder / "prompts.txt").write_text("abc\n")
    return folder


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail at once, and return what it printed."""
    started = time.perf_counter()
    status = main(arguments)
    seconds, printed = time.perf_counter() - started, capsys.readouterr()
    assert status in (1, 2), printed
    assert len(printed.err.splitlines()) == (1 if status == 2 else 0), printed.err
    assert len(printed.err) < 2000 and "Traceback" not in printed.out + printed.err
    assert seconds < SECONDS
    return printed.out + printed.err


@pytest.mark.parametrize("arguments", INVOCATIONS, ids=lambda each: " ".join(each)[:60])
def test_a_wrong_invocation(
    arguments: list[str],
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    names = {"TARGET": "model", "HEADS": "heads", "EMPTY": "empty", "OUT": str(tmp_path / "out")}
    said = fails([names.get(word, word) for word in arguments], capsys)
    assert said.startswith("headstart: error: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("file", "content"), FILES, ids=lambda each: str(each)[:40])
def test_a_hostile_file(
    file: str, content: Any, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "heads"
    shutil.copytree(place / "heads", folder)
    if isinstance(content, dict):
        content = json.dumps(json.loads((folder / file).read_text()) | content)
    (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)
    fails(["inspect", str(folder)], capsys)
    target = str(place / "model")
    said = fails(["generate", "--target", target, "--drafter", str(folder), *X], capsys)
    assert str(folder) in said or "tree" in said or "family" in said or "drafter." in said


def test_a_large_file_of_json_is_not_read(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(place / "heads", tmp_path / "heads")
    with (tmp_path / "heads" / "tree.json").open("wb") as out:
        out.truncate(2**28)
    assert "larger than" in " ".join(fails(["inspect", str(tmp_path / "heads")], capsys).split())


@pytest.mark.parametrize(
    "arguments",
    [["inspekt"], ["inspect", "./none"], [*GENERATE, "--dtype", "float23"],
     ["generate", "--target", "./none", *X]],
    ids=lambda each: " ".join(each)[:40],
)  # fmt: skip
def test_a_mistyped_name_is_answered_before_torch_is_imported(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom headstart.cli import main\nstatus = main(sys.argv[1:])\n"
        "sys.exit(status if 'torch' not in sys.modules else 99)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "0"},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_memory_stays_small(place: Path, tmp_path: Path) -> None:
    """A tree of a million paths, in a process of its own: under 2 GB, torch included."""
    shutil.copytree(place / "heads", tmp_path / "heads")
    (tmp_path / "heads" / "tree.json").write_text("[" + "[0]," * 10**6 + "[0]]")
    program = (
        "import resource, sys\nfrom headstart.cli import main\nstatus = main(sys.argv[1:])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "inspect", str(tmp_path / "heads")],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert int(done.stderr) < 2 * 2**20  # KiB; nothing else is on stderr


def test_no_network_is_one_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Hub that does not answer; the port was free a moment ago, so nobody listens."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    from headstart.heads.artifacts import hub

    class Elsewhere(hub.HfApi):
        def __init__(self) -> None:
            super().__init__(endpoint=address)

    monkeypatch.setattr(hub, "HfApi", Elsewhere)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    said = fails(["generate", "--target", "org/none", *X], capsys)
    assert "org/none" in said and "cannot be reached" in said


def test_a_template_that_does_not_end(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(place / "model", tmp_path / "model")
    loops = "".join(f"{{% for {name} in range(99999) %}}" for name in "abcd") + "{% endfor %}" * 4
    (tmp_path / "model" / "chat_template.jinja").write_text(loops)
    monkeypatch.setattr("headstart.train.data.documents._SECONDS", 0.5)
    said = fails(["generate", "--target", str(tmp_path / "model"), "--chat", *X], capsys)
    assert "chat template does not end" in said
