"""Wrong invocations and hostile files: one line and status 1 or 2, at once."""

import hashlib
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
from tests.support.memory import peak_bytes, reset_peak
from tests.support.paths import ROOT

SECONDS, MEMORY = 5.0, 2**30  # bytes beyond those that torch and the libraries take
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
    ["train", "quickstart", "output=OUT", "drafter.heads=1000000"],
    ["train", "quickstart", "output=OUT", "drafter.heads=4096"],
    ["train", "quickstart", "output=OUT", "train.batch_size=1000000"],
    ["train", "quickstart", "output=OUT", "drafter.family=medusaa"],
    ["generate", "--target", "ENDLESS", *X, "--max-new-tokens", "100000000000"],
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
    config(heads=3), config(layers=2), config(output="own"),
    config(layers=10**9), config(hidden_size=-5), config(hidden_size=10**12),
    config(hidden_size="x"), config(vocab_size="x"), config(feature_layers="abc"),
    config(feature_layers=[None]), config(feature_layers=[]), config(output="evil"),
    config(draft_vocab_size=5),
    config(model_type=5), config(auto_map={"AutoConfig": "x.Y"}), ("config.json", "[" * 100_000),
    ("config.json", "[]"), manifest(family=7), manifest(family="none"), manifest(target=3),
    manifest(versions=3), manifest(metrics=[]), manifest(weights_sha256=None), manifest(trained=[]),
    ("headstart.json", '{"a":' * 50_000), ("headstart.json", b"\xff\xfe"),
    ("model.safetensors", b""), ("model.safetensors", b"\xff" * 64),
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    save_target(folder / "model")
    save_heads(str(folder / "model"), folder / "heads")
    (folder / "empty").mkdir()
    shutil.copytree(folder / "model", folder / "endless")  # its config says what cannot be
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "endless" / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": 10**12})
    )
    (folder / "prompts.txt").write_text("abc\n")
    return folder


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail at once, and return what it printed."""
    before, started = reset_peak(), time.perf_counter()
    status = main(arguments)
    seconds, printed = time.perf_counter() - started, capsys.readouterr()
    assert status in (1, 2), printed
    assert len(printed.err.splitlines()) == (1 if status == 2 else 0), printed.err
    assert len(printed.err) < 2000 and "Traceback" not in printed.out + printed.err
    assert seconds < SECONDS
    assert peak_bytes() - before < MEMORY
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
    out = str(tmp_path / "out")
    names = {"TARGET": "model", "HEADS": "heads", "EMPTY": "empty", "ENDLESS": "endless"}
    words = [names.get(word, word) for word in arguments]
    said = fails([out if w == "OUT" else w.replace("=OUT", f"={out}") for w in words], capsys)
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


PROGRAM = """
import sys
from headstart.cli import main
from tests.support.memory import peak_bytes
try:
    status = main(sys.argv[1:])
except SystemExit as stop:
    status = stop.code
slow = {"torch", "transformers", "datasets", "peft"} & set(sys.modules)
print("", peak_bytes(), *slow, sep="\\n", file=sys.stderr)
sys.exit(status)
"""


def alone(arguments: list[str], folder: Path) -> tuple[int, str, set[str], float, int]:
    """A command in a process of its own.

    Returns:
        Its status, what it printed, those of the slow libraries that it imported, the CPU seconds
        that it took and its largest memory in bytes.
    """
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert child.stdout is not None
    printed, _, told = child.stdout.read().rpartition("\n\n")
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    memory, *slow = told.split()
    seconds = used.ru_utime + used.ru_stime
    return child.returncode, printed.strip(), {*slow}, seconds, int(memory)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--help"], 0), (["inspect", "--help"], 0), (["inspekt"], 2), (["inspect", "heads"], 0),
        (["inspect", "heads", "--json"], 0), (["inspect", "eagle"], 0), (["inspect", "huge"], 1),
        (["inspect", "renamed"], 1), (["inspect", "strange"], 1), (["inspect", "bomb"], 1),
        (["inspect", "./none"], 2), (["inspect", "prompts.txt"], 2), (["inspect", "none"], 2),
        (["generate", "--target", "model", "--dtype", "float23", *X], 2),
        (["generate", "--target", "./none", *X], 2),
        (["generate", "--target", "model", "--drafter", "./none", *X], 2),
        ([*BENCH[:1], "--target", "model", "--drafter", "./none", "--prompts", "prompts.txt"], 2),
        (["generate", "--target", "nonesuch", *X], 2),
        (["generate", "--target", "model", "--drafter", "nonesuch", *X], 2),
        (["train", "quickstrat"], 2), (["train", "quickstart", "drafter.family=medusaa"], 2),
        (["train", "quickstart", "drafter.hedas=3"], 2), (["train", "quickstart", "x"], 2),
        (["train", "quickstart", "drafter.heads=1000000"], 2), (["check", "quickstrat"], 2),
        (["push", "heads", "org/name", "--target-name", "org/model", "--dry-run"], 0),
        (["push", "./none", "org/name"], 2), (["export", "./none", "out", "--to", "vllm"], 2),
    ],
    ids=lambda each: " ".join(each)[:40] if isinstance(each, list) else "",
)  # fmt: skip
def test_what_needs_no_torch_is_answered_without_it(
    arguments: list[str], expected: int, judged: Path
) -> None:
    status, printed, slow, seconds, memory = alone(arguments, judged)
    assert status == expected, printed
    assert not slow, slow
    assert "Traceback" not in printed and (expected != 2 or len(printed.splitlines()) == 1)
    assert seconds < 2, "a second on a quiet machine"
    assert memory < 2**28


@pytest.fixture(scope="module")
def judged(place: Path) -> Path:
    """Beside the folders of `place` damaged artifacts, and an EAGLE head."""
    for name in ("huge", "renamed", "strange", "bomb"):
        shutil.copytree(place / "heads", place / name)
    (place / "huge" / "model.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{" * 64)
    (place / "renamed" / "model.safetensors").write_bytes(b"\x80\x04cos\nsystem\n")
    file = place / "strange" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"stranger": 1}))
    (place / "bomb" / "plan.json").write_text('{"a":' * 50_000)
    save_heads(str(place / "model"), place / "eagle", name="eagle")
    return place


def test_memory_stays_small(place: Path, tmp_path: Path) -> None:
    """A tree of a million paths, in a process of its own: under 2 GB, torch included."""
    shutil.copytree(place / "heads", tmp_path / "heads")
    (tmp_path / "heads" / "tree.json").write_text("[" + "[0]," * 10**6 + "[0]]")
    status, _, slow, _, memory = alone(["inspect", "heads"], tmp_path)
    assert (status, slow) == (1, set())
    assert memory < 2**31


@pytest.mark.parametrize("kind", ["tensors", "texts", "files"])
def test_files_of_any_length_are_told_in_a_few_lines(
    kind: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "heads"
    shutil.copytree(place / "heads", folder)
    path = folder / "headstart.json"
    manifest, expected = json.loads(path.read_text()), 0
    if kind == "tensors":
        empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        header = json.dumps({f"t{i}": empty for i in range(100_000)}).encode()
        weights, expected = len(header).to_bytes(8, "little") + header, 1
        (folder / "model.safetensors").write_bytes(weights)
        manifest["weights_sha256"] = hashlib.sha256(weights).hexdigest()
    elif kind == "texts":
        manifest["versions"] = {str(number): "x" * 10 for number in range(50_000)}
        manifest["metrics"]["acceptance_by_depth"] = [0.5] * 100_000
    else:
        with (folder / "notes.bin").open("wb") as out:
            out.truncate(2**38)
        for number in range(1000):
            (folder / f"{number}.txt").touch()
    path.write_text(json.dumps(manifest))
    started = time.process_time()
    assert main(["inspect", str(folder)]) == expected
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) < 1000 and len(printed.out) < 100_000
    assert time.process_time() - started < SECONDS


def test_a_run_is_no_artifact_and_no_target(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What stands in its folder is named."""
    for name, there in (("heads", "heads"), ("model", "target")):
        shutil.copytree(place / name, tmp_path / "run" / there)
    run = str(tmp_path / "run")
    assert f"its drafter is in {run}/heads" in fails(["inspect", run], capsys)
    assert f"its target is in {run}/target" in fails(["generate", "--target", run, *X], capsys)


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
