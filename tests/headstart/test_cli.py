"""The command line: what it passes on, what it prints where, and how it fails."""

import hashlib
import io
import json
import os
import pickle
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from headstart import cli, inputs
from headstart.cli import main, parse
from headstart.heads import ArtifactError
from headstart.heads.artifacts.source import DrafterSource
from headstart.inputs import encode
from tests.support.paths import ROOT, SHARED

SECRET = "the secret words"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.support.bytewise import save_target

    folder = tmp_path_factory.mktemp("model")
    save_target(folder)
    return str(folder)


def plain_text(target: str, prompt: str, new_tokens: int) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    inputs = tokenizer(prompt, return_tensors="pt")
    model: Any = AutoModelForCausalLM.from_pretrained(target)
    output = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    return tokenizer.decode(output[0, inputs.input_ids.shape[1] :])


# What is passed on.


class Door:
    """Stands in for a function of another room: keeps the calls, prints, and returns `result`."""

    def __init__(self, result: Any = None):
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.result = result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        print("noise of a library")
        return self.result


def quickstart_door(monkeypatch: pytest.MonkeyPatch) -> Door:
    door = Door({"tau": 2.5, "artifact": "runs/quickstart/heads"})
    monkeypatch.setattr("headstart.train.pipeline.run", door)
    page = Path("runs/quickstart/report.html")
    monkeypatch.setattr("headstart.reports.pages.write_quickstart_page", lambda *given: page)
    return door


@pytest.mark.parametrize(
    "arguments",
    [
        ["--fresh", "decode.prompts=3", "seed=7"],
        ["decode.prompts=3", "--fresh", "seed=7"],
        ["decode.prompts=3", "seed=7", "--fresh", "--recipe", "quickstart"],
    ],
)
def test_quickstart_runs_the_recipe_with_its_overrides(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    door = quickstart_door(monkeypatch)
    assert main(["quickstart", "--json", *arguments]) == 0
    (((recipe,), named),) = door.calls
    assert (recipe.name, recipe.decode.prompts, recipe.seed) == ("quickstart", 3, 7)
    assert named == {"fresh": True}
    printed = capsys.readouterr()
    assert json.loads(printed.out) == door.result  # and nothing else on stdout
    assert "noise of a library" in printed.err


def test_quickstart_prints_table_folder_and_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    door = quickstart_door(monkeypatch)
    assert main(["quickstart"]) == 0
    assert door.calls[0][1] == {"fresh": False}
    printed = capsys.readouterr().out
    assert printed.index("2.50") < printed.index("The drafter is in runs/quickstart/heads")
    assert "headstart generate --drafter runs/quickstart/heads" in printed
    assert "The report is runs/quickstart/report.html" in printed


def test_train_is_the_module_s_main(monkeypatch: pytest.MonkeyPatch) -> None:
    door = Door(0)
    monkeypatch.setattr("headstart.train.main", door)
    assert main(["train", "quickstart", "--fresh", "seed=1", "decode.prompts=2"]) == 0
    assert door.calls == [((["quickstart", "seed=1", "decode.prompts=2", "--fresh"],), {})]


def test_bench_loads_and_measures(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abcdef\nghijkl\nmnopqr\n")
    arguments = ["bench", "--target", target, "--prompts", str(prompts), "--dtype", "float64"]
    arguments += ["--limit", "2", "--prefix-tokens", "3", "--new-tokens", "9", "--json"]
    assert main([*arguments, "--report", str(tmp_path / "out")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["dtype"], report["tau"], report["prompts"]) == ("float64", 1.0, 2)
    assert report["identical_to_plain"] is report["identical_to_generate"] is True
    written = (tmp_path / "out" / "emitted.jsonl").read_text().splitlines()
    assert [len(json.loads(line)["ids"]) for line in written] == [9, 9]


def test_bench_compares_trees_and_rules(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run for each pair, tree by tree; a wrong one shows before any is measured."""
    heads, prompts = artifact(target, tmp_path / "heads"), tmp_path / "prompts.txt"
    prompts.write_text("abcdef\n")
    command = ["bench", "--drafter", heads, "--prompts", str(prompts), "--new-tokens", "6"]
    command += ["--report", "none"]
    pairs = ["--tree", "chain:1", "--tree", "cartesian:2,2", "--rule", "match", "--rule", "coupled"]
    assert main([*command, *pairs, "--temperature", "1", "--seed", "3", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["runs", "notes"]
    found = [(run["tree"], run["rule"], run["nodes"]) for run in document["runs"]]
    assert found == [
        ("chain:1", "match", 2), ("chain:1", "coupled", 2),
        ("cartesian:2,2", "match", 7), ("cartesian:2,2", "coupled", 7),
    ]  # fmt: skip
    for run in document["runs"]:
        assert run["identical_to_plain"] is True and run["identical_to_generate"] is None
        assert run["tau"] >= 1 and run["ms_per_round"] > 0
    assert main([*command, *pairs[:4]]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if "greedy" in line]
    assert [(row[0], row[1], row[2], row[-1]) for row in rows] == [
        ("chain:1", "greedy", "2", "yes"), ("cartesian:2,2", "greedy", "7", "yes"),
    ]  # fmt: skip
    monkeypatch.setenv("COLUMNS", "50")
    assert main([*command, *pairs[:4]]) == 0
    printed = capsys.readouterr().out
    assert "Fewer than 6 prompts" in printed and max(map(len, printed.splitlines())) <= 50

    door = Door()
    monkeypatch.setattr("headstart.infer.measure.matrix.measure_cell", door)
    for wrong in (["--tree", "chain:9"], ["--tree", "chian:2"], ["--rule", "greedier"]):
        assert main([*command, *pairs[:6], *wrong]) == 2
        assert wrong[1].partition(":")[0] in last_line(capsys)
    assert main([*command, "--rule", "greedy", "--temperature", "1"]) == 2
    assert "use one that samples" in last_line(capsys)
    assert not door.calls


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The line that an error is; loading models shows no progress before it."""
    (error,) = filter(None, capsys.readouterr().err.splitlines())
    assert error.startswith("headstart: error: ")
    return error


def artifact(target: str, folder: Path, tree: str | None = "[[0], [1], [0, 0]]") -> str:
    """See `save_heads`, which imports torch."""
    from tests.support.bytewise import save_heads

    return save_heads(target, folder, tree)


# inspect, on a real artifact.


def test_inspect_says_what_it_is(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = artifact(target, tmp_path / "heads")
    (tmp_path / "heads" / "notes.txt").write_text("mine")
    assert main(["inspect", heads, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["family"], found["target"], found["problem"]) == ("medusa", target, None)
    assert (found["hidden_size"], found["vocab_size"]) == (32, 256)
    assert found["options"]["heads"] == 2 and found["feature_layers"] == [-1]
    assert found["tensors"]["weight"] == {"shape": [1, 2, 32, 32], "dtype": "F32"}
    assert found["parameters"] == 2 * 32 * 32 + 2 * 32
    assert found["tree"] == {"name": "sparse 2/1", "nodes": 4, "depth": 2}
    assert found["metrics"]["tau"] == 1.25 and found["recipe"]["name"] == "small"
    assert {"torch", "transformers"} <= set(found["versions"])
    checks = {file["name"]: file["check"] for file in found["files"]}
    assert checks == {
        "README.md": "unchecked", "config.json": "ok", "headstart.json": "ok",
        "model.safetensors": "ok", "notes.txt": "unchecked", "tree.json": "ok",
    }  # fmt: skip
    assert "fits" not in found

    assert main(["inspect", heads]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert max(map(len, printed.split("\n", 2)[2].splitlines())) <= 80
    for said in ("2,112, ", "sparse 2/1, 4 nodes", "1.25", "small", "texts.jsonl", "not pushed"):
        assert said in printed
    assert "NO" not in printed


def test_inspect_says_how_far_a_target_moved() -> None:
    from headstart.reports.description import _moved

    def said(base: float, adapted: float) -> str:
        ((_, text),) = _moved({"held_out_loss": {"base": base, "adapted": adapted}})
        return text

    assert said(4.0, 4.1) == "4.0000 to 4.1000 nats per token (+2.50%)"
    assert said(4.0, 4.0).startswith("not at all")
    assert _moved({}) == []


def test_inspect_says_whether_it_fits(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    heads, other = artifact(target, tmp_path / "heads"), tmp_path / "other"
    model: Any = AutoModelForCausalLM.from_pretrained(target)
    model.get_input_embeddings().weight.data[0] += 1
    model.save_pretrained(other)
    AutoTokenizer.from_pretrained(target).save_pretrained(other)
    assert main(["inspect", heads, "--target", target, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True
    assert main(["inspect", heads, "--target", str(other)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "fits --target NO" in printed and "trained for another target" in printed
    assert main(["inspect", heads, "--target", "no/such-model"]) == 2
    assert "no/such-model" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tree.json"])
@pytest.mark.parametrize("how", ["cut", "gone"])
def test_inspect_sees_damage(
    file: str, how: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = artifact(target, tmp_path / "heads")
    path = tmp_path / "heads" / file
    path.write_bytes(path.read_bytes()[:9]) if how == "cut" else path.unlink()
    expected = 0 if (file, how) == ("tree.json", "gone") else 1  # a tree is not needed
    assert main(["inspect", heads, "--json"]) == expected
    found = json.loads(capsys.readouterr().out)
    checks = {entry["name"]: entry["check"] for entry in found["files"]}
    assert checks.get(file) == ("damaged" if how == "cut" else None)
    assert (found["problem"] or file).count(file)
    assert main(["inspect", heads]) == expected
    assert ("NO" in capsys.readouterr().out) == bool(expected)


def test_inspect_prints_no_token(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = artifact(target, tmp_path / "heads")
    path = tmp_path / "heads" / "headstart.json"
    manifest = json.loads(path.read_text())
    token = "hf_" + "a" * 30
    manifest["recipe"] = {"name": token, "note": f"https://user:word@host/{token}"}
    path.write_text(json.dumps(manifest))
    for arguments in (["inspect", heads], ["inspect", heads, "--json"]):
        assert main(arguments) == 0
        printed = capsys.readouterr().out
        assert token not in printed and "word" not in printed and "hf_…" in printed


CONTROL = "\x1b[31mred\x07\x9b2J\u202e"


def shows_no_control(text: str) -> None:
    assert "red" in text and not set(text) & set("\x1b\x07\x9b\u202e")


def test_control_characters_of_a_file_are_shown_as_escapes(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = artifact(target, tmp_path / "heads")
    path, config = (tmp_path / "heads" / name for name in ("headstart.json", "config.json"))
    manifest = json.loads(path.read_text()) | {"target": CONTROL, "recipe": {"name": CONTROL}}
    path.write_text(json.dumps(manifest | {"versions": {CONTROL: CONTROL}, "origin": CONTROL}))
    for arguments in (["inspect", heads], ["inspect", heads, "--json"]):
        assert main(arguments) == 0
        shows_no_control(capsys.readouterr().out)
    (tmp_path / "heads" / "README.md").write_text("# red \x1b[2J\n")
    assert main(["push", heads, "org/name", "--target-name", "x", "--dry-run"]) == 0
    shows_no_control(capsys.readouterr().out)
    assert main(["generate", "--drafter", heads, "--prompt", "x"]) == 2
    shows_no_control(capsys.readouterr().err)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": CONTROL}))
    assert main(["inspect", heads]) == 1
    shows_no_control(capsys.readouterr().out)
    assert main(["generate", "--target", target, "--drafter", heads, "--prompt", "x"]) == 2
    shows_no_control(capsys.readouterr().err)


HUGE = json.dumps({"w": {"dtype": "F32", "shape": [2**50], "data_offsets": [0, 2**52]}}).encode()


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({"weight": [1.0]}),
        (2**60).to_bytes(8, "little") + b"{}",
        len(HUGE).to_bytes(8, "little") + HUGE,
    ],
    ids=["pickle", "header", "tensor"],
)
def test_weights_that_are_no_safetensors(
    content: bytes, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The manifest may vouch for such a file, and it is not whole."""
    heads = artifact(target, tmp_path / "heads")
    weights, path = (tmp_path / "heads" / name for name in ("model.safetensors", "headstart.json"))
    weights.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"weights_sha256": digest}))
    assert main(["inspect", heads, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    checks = {entry["name"]: entry["check"] for entry in found["files"]}
    assert checks["model.safetensors"] == "damaged"
    assert str(weights) in found["problem"] and "\n" not in found["problem"]
    assert main(["generate", "--target", target, "--drafter", heads, "--prompt", "x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(weights) in line


# generate, on a real model.


def test_generate_streams_what_the_model_writes(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--target", target, "--prompt", "hi", "--max-new-tokens", "12"]) == 0
    printed = capsys.readouterr()
    assert printed.out.rstrip("\n") == plain_text(target, "hi", 12).rstrip("\n")
    assert "τ 1.00 tokens per round: 11 tokens after the first, 11 rounds" in printed.err


def test_the_space_before_a_continuation_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    stories = SHARED / "models" / "stories260k"
    if not stories.is_dir():
        pytest.skip("no shared data here")
    command = ["generate", "--target", str(stories), "--prompt", "Once upon"]
    assert main([*command, "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out == " a time,\n"


@pytest.mark.parametrize("command", ["generate", "chat", "bench", "plan", "verify-lossless"])
def test_decoding_is_made_faster_unless_it_is_turned_off(command: str) -> None:
    needed = ["--drafter", "a", "--prompts", "b"] if command in ("plan", "verify-lossless") else []
    for given, meant in (
        ([], "auto"), (["auto"], "auto"), (["on"], True), (["off"], False), ([None], True),
    ):  # fmt: skip
        option = ["--compile", *filter(None, given)] if given else []
        assert parse([command, *needed, *option]).compile == meant


def test_generate_says_what_it_runs_with(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from headstart.heads.core import packing
    from headstart.infer import target as module

    monkeypatch.setattr(packing, "_LEAST", dict.fromkeys(packing._LEAST, 0))
    monkeypatch.setattr(packing, "_LEAST_OF_KERNELS", {})
    monkeypatch.setattr(module, "packing_pays", lambda model: True)
    command = ["generate", "--target", target, "--prompt", "hi", "--max-new-tokens", "12"]
    for option, said in (([], True), (["--compile", "off"], False)):
        assert main([*command, *option]) == 0
        printed = capsys.readouterr()
        assert printed.out.rstrip("\n") == plain_text(target, "hi", 12).rstrip("\n")
        assert printed.err.rstrip().endswith(", with packed weights") == said


def test_generate_reads_a_file_or_stdin(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "--target", target, "--max-new-tokens", "8"]
    file = tmp_path / "prompt.txt"
    file.write_text("from a file")
    assert main([*command, "--file", str(file)]) == 0
    assert capsys.readouterr().out.rstrip("\n") == plain_text(target, "from a file", 8).rstrip("\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin"))
    assert main(command) == 0
    assert capsys.readouterr().out.rstrip("\n") == plain_text(target, "from stdin", 8).rstrip("\n")


def test_generate_takes_the_artifact_sown_target_and_tree(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = artifact(target, tmp_path / "heads")
    command = ["generate", "--drafter", heads, "--prompt", "hi", "--max-new-tokens", "12"]
    assert main(command) == 0
    assert capsys.readouterr().out.rstrip("\n") == plain_text(target, "hi", 12).rstrip("\n")
    options = Namespace(target=None, drafter=heads, tree=None, rule=None)
    tree: Any = inputs.load_speculator(options).tree
    assert tree.paths == ((0,), (1,), (0, 0))
    options = Namespace(target=None, drafter=heads, tree="chain:1", rule=None)
    assert str(inputs.load_speculator(options).tree) == "chain:1"
    plain = artifact(target, tmp_path / "without", tree=None)
    options = Namespace(target=None, drafter=plain, tree=None, rule=None)
    assert str(inputs.load_speculator(options).tree) == "chain:2"


def test_several_drafters_decode_together(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The target of the one that knows it; each one's tree, or a tree with a part for each."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abcdef\n")
    both = ["--drafter", "lookup", "--drafter", artifact(target, tmp_path / "heads")]
    assert main(["generate", *both, "--prompt", "hi", "--max-new-tokens", "12"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == plain_text(target, "hi", 12).rstrip("\n")
    options = Namespace(target=None, drafter=both[1::2], tree=None, rule=None)
    assert str(inputs.load_speculator(options).tree) == "chain:4+[[1],[0,0]]"
    command = ["bench", *both, "--prompts", str(prompts), "--new-tokens", "6", "--json"]
    command += ["--report", "none"]
    trees = ["chain:3+chain:1", "cartesian:2,1+chain:2"]
    assert main([*command, "--tree", trees[0], "--tree", trees[1]]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["tree"], run["nodes"]) for run in runs] == [
        ("chain:3+chain:1", 5), ("cartesian:2,1+chain:2", 7),
    ]  # fmt: skip
    assert all(run["identical_to_generate"] for run in runs)
    assert all(run["loop_overhead_ms"] < run["ms_per_round"] for run in runs)
    assert main([*command, "--tree", "chain:3"]) == 2
    assert "no tree of chain:3 has a part for each" in capsys.readouterr().err
    assert main(["generate", "--drafter", "lookup", "--drafter", "lookup", "--prompt", "x"]) == 2
    assert "lookup --drafter lookup does not say which model it drafts" in capsys.readouterr().err


@pytest.fixture(scope="module")
def chat_target(target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same model with a chat template that takes users' and assistants' turns alone."""
    import shutil

    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(target, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
        "{{ raise_exception('only user and assistant') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>"
        "{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_generate_chats_only_when_asked(
    chat_target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["generate", "--target", chat_target, "--max-new-tokens", "8"]
    file = tmp_path / "chat.jsonl"
    turns = [("user", "a"), ("assistant", "b"), ("user", "c")]
    file.write_text(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}))
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    for arguments, prompt in (
        (["--prompt", "hello"], "hello"),
        (["--chat", "--prompt", "hello"], "<user>hello<assistant>"),
        (["--chat"], "<user>hello<assistant>"),
        (["--chat", "--file", str(file)], "<user>a<assistant>b<user>c<assistant>"),
    ):
        assert main([*command, *arguments]) == 0
        printed = capsys.readouterr().out
        assert printed.rstrip("\n") == plain_text(chat_target, prompt, 8).rstrip("\n"), prompt


def test_prompts_that_are_chats_go_through_the_template(chat_target: str, target: str) -> None:
    from headstart.train.data.documents import Document

    for folder, before in ((chat_target, "<user>a<assistant>"), (target, "")):
        options = Namespace(target=folder, drafter=None)
        speculator = inputs.load_speculator(options)
        messages = [{"role": "user", "content": "a"}]
        ids = encode(Document("1", "a", messages), speculator, None)
        tokenizer: Any = speculator.tokenizer
        wanted = tokenizer(before or "a", add_special_tokens=not before).input_ids
        assert ids.tolist() == [wanted]


def test_a_chat_that_does_not_fit(
    target: str, chat_target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    system, two, broken = (tmp_path / f"{name}.jsonl" for name in ("system", "two", "broken"))
    turns = [{"role": role, "content": SECRET} for role in ("system", "user")]
    row = json.dumps({"messages": turns})
    system.write_text(row)
    two.write_text(f"{row}\n{row}\n")
    broken.write_text(f'{{"messages": "{SECRET}"}}')
    for model, arguments, said in (
        (target, ["--prompt", SECRET], "no chat template"),
        (chat_target, ["--file", str(system)], "refuses a chat of the roles system, user"),
        (chat_target, ["--file", str(two)], "found 2 conversations, expected one"),
        (chat_target, ["--file", str(broken)], "line 1: messages is not a list"),
        (chat_target, ["--prompt", " "], "the prompt is empty"),
    ):
        assert main(["generate", "--target", model, "--chat", *arguments]) == 2
        error = last_line(capsys)
        assert said in error and SECRET not in error


def test_a_traceback_shows_no_prompt(
    target: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An error in the middle of decoding, with the traceback that was asked for."""
    done = subprocess.run(
        [
            sys.executable, "-c",
            "import sys\nfrom headstart import cli\nfrom headstart.infer.target import Target\n"
            "def broken(*_, **__):\n    raise ValueError('in the middle')\n"
            "Target.verify = broken\nsys.exit(cli.main(sys.argv[1:]))\n",
            "generate", "--target", target, "--prompt", SECRET,
        ],
        cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "HEADSTART_DEBUG": "1", "HF_TOKEN": "hf_" + "b" * 30},
    )  # fmt: skip
    assert done.returncode == 1 and "ValueError: in the middle" in done.stderr
    assert "Traceback" in done.stderr
    assert SECRET not in done.stdout + done.stderr and "hf_b" not in done.stdout + done.stderr


def test_what_does_not_fit_is_streamed_in(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from headstart.heads.core import streamed_from
    from headstart.infer import Speculator

    places, generate = [], Speculator.generate

    def noted(self: Speculator, *args: Any, **options: Any) -> Any:
        places.append(streamed_from(self.model))
        return generate(self, *args, **options)

    monkeypatch.setattr(Speculator, "generate", noted)
    command = ["generate", "--drafter", artifact(target, tmp_path / "heads"), "--prompt", "hello"]
    for memory in ("cpu=1GB", "cpu=0MB"):
        assert main([*command, "--max-new-tokens", "8", "--max-memory", memory]) == 0
        assert capsys.readouterr().out.rstrip("\n") == plain_text(target, "hello", 8).rstrip("\n")
    assert places == ["", "100% from disk"]


def test_a_seed_repeats_a_sample(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    def sample(seed: str) -> str:
        command = ["generate", "--target", target, "--prompt", "hi", "--max-new-tokens", "16"]
        assert main([*command, "--temperature", "1.5", "--top-k", "200", "--seed", seed]) == 0
        return capsys.readouterr().out

    assert sample("1") == sample("1")
    assert sample("1") != sample("2")


def test_the_artifact_names_its_target(tmp_path: Path) -> None:
    def own_target(folder: Path, trained_for: str) -> str:
        source = DrafterSource("org/drafter")
        vars(source).update(folder=folder, manifest=SimpleNamespace(target=trained_for))
        return source.own_target

    here, moved, heads = tmp_path / "here", tmp_path / "run" / "target", tmp_path / "run" / "heads"
    here.mkdir()
    moved.mkdir(parents=True)
    assert own_target(Path("somewhere"), str(here)) == str(here)
    assert own_target(heads, "runs/elsewhere/target") == str(moved)
    (beside := tmp_path / "models" / "mine").mkdir(parents=True)  # given as a relative path
    trained = tmp_path / "runs" / "mine" / "heads"
    assert own_target(trained, "models/mine") == str(beside)
    assert own_target(Path("somewhere"), "org/model") == "org/model"  # on the Hub
    with pytest.raises(ArtifactError, match="'runs/elsewhere/gone', is not on this machine; pass"):
        own_target(heads, "runs/elsewhere/gone")


# How it fails.

_PLACED = ["generate", "--target", "t", "--prompt", "x"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fly"], "no command 'fly'; see headstart --help"),
        (["--", "generate"], "no command '--'; see headstart --help"),
        (["--hepl"], "no option --hepl (did you mean '--help'?) before a command; see headstart"),
        (["--seed", "1", "generate"], "no option --seed before a command; see headstart --help"),
        (["trian"], "no command 'trian' (did you mean 'train'?)"),
        (["version"], "no command 'version'; see headstart --help"),
        (["gen"], "no command 'gen' (did you mean 'generate'?)"),
        (["quickstart", "--frsh"], "no option --frsh (did you mean '--fresh'?)"),
        (["train", "own-model", "--target", "t"], "(give the setting 'target.model=…')"),
        (["train", "--drafter", "eagle3"], "(give the setting 'drafter.family=…')"),
        (["generate", "--promt", SECRET], "no option --promt (did you mean '--prompt'?)"),
        (["bench", "--promts", "x.txt"], "no option --promts (did you mean '--prompts'?)"),
        (["quickstart", "loose"], "unknown argument 'loose'"),
        (["quickstart", "train.max_stps=3"], "did you mean 'max_steps'"),
        (["quickstart", "--recipe", "quickstrat"], "did you mean 'quickstart'"),
        (["train"], "RECIPE"),
        (["train", "quickstart", "decode.rule=greedier"], "decode.rule"),
        (["generate", "--prompt", "x"], "neither --target nor --drafter"),
        (["generate", "--target", "t", "--prompt", " "], "--prompt: the prompt is empty"),
        ([*_PLACED, "--rule", "match"], "--rule match is for sampled text; give --temperature"),
        ([*_PLACED, "--expansion", "topk"], "--expansion topk is for sampled text; give"),
        ([*_PLACED, "--rule", "best"], "rule is 'best'; expected one of"),
        (["generate", "--target", "t", "--prompt", "\udcff"], "--prompt: not valid UTF-8"),
        (["chat", "--target", "t", "--system", "\udcff"], "--system: not valid UTF-8 text; conv"),
        (["inspect", "t", "--round", "3", "--rule", "block"], "--round is for a round of decoding"),
        (["inspect", "t", "--seed", "0"], "--seed is for a round of decoding; give --prompt too"),
        (["inspect", "t", "--prompt", "\udcff"], "--prompt: not valid UTF-8 text; convert it"),
        (["generate", "--target", "t", "--file", "none.txt"], "none.txt"),
        (["generate", "--target", "t", "--file", "latin.txt"], "latin.txt: not valid UTF-8"),
        (["generate", "--target", "t", "--file", "empty.txt"], "empty.txt: the prompt is empty"),
        (["generate", "--target", "t", "--file", "."], "--file .: a folder; expected a text file"),
        (["generate", "--chat", "--target", "t", "--file", "none.jsonl"], "none.jsonl"),
        (["generate", "--prompt", "a", "--file", "b"], "not allowed with"),
        (["generate", "--target", "t", "--prompt", "x", "--top-p", "0.9"], "--temperature"),
        (["generate", "--temperature", "nan"], "found 'nan', expected a finite number from 0"),
        (["generate", "--temperature", "-1"], "--temperature"),
        (["generate", "--max-new-tokens", "0"], "found '0', expected a whole number from 1"),
        (["generate", "--top-p", "1.5"], "found '1.5', expected a number above 0, at most 1"),
        (["generate", "--target", "no/such-model", "--prompt", SECRET], "no/such-model"),
        (["generate", "--drafter", "./no-such-folder", "--prompt", SECRET], "no-such-folder"),
        (["generate", "--max-memory", "cpu=2"], "found 'cpu=2', expected a size for each device"),
        ([*_PLACED, "--max-memory", "99=1GB,cpu=1GB"], "--max-memory names GPU 99"),
        ([*_PLACED, "--max-memory", "cpu=1GB", "--device", "cpu"], "leave --device out"),
        ([*_PLACED, "--offload-folder", "there"], "--offload-folder without --max-memory"),
        (
            [*_PLACED, "--tensor-parallel", "2", "--device", "cpu"],
            "--device with --tensor-parallel, which takes the first 2 GPUs",
        ),
        (["generate", "--tensor-parallel", "0"], "found '0', expected a whole number from 1"),
        (["generate", "--compile", "fast"], "found 'fast', expected auto, on or off"),
        (["generate", SECRET], "1 more than expected; give the prompt with --prompt"),
        (["runs", "--output", "nosuch"], "--output nosuch: no such folder; give the one"),
        (["runs", "a", "--output", "nosuch"], "--output nosuch: no such folder"),
        (
            ["serve", "--host", "no such host", "--target", "t"],
            "cannot listen at no such host:8000",
        ),
        (["runs", "a", "b"], "too many arguments: 1 more than expected (see headstart runs"),
        (["generate", "--drafter", "medusa", "--prompt", "x"], "quickstart --drafter medusa"),
        (["inspect", "."], "neither headstart.json nor config.json"),
        (["recipes", "quickstrat"], "did you mean 'quickstart'"),
        (["check", "own-model", "corpus.source=x.txt"], "ORG/MODEL stands for a model of yours"),
        (["generate", "--target", "ORG/MODEL", "--prompt", "x"], "ORG/MODEL stands for a model"),
        (["bench", "--target", "t"], "--prompts"),
        (["bench", "run"], "run is a folder; expected a YAML file (a drafter follows --drafter)"),
        (["plan", "--drafter", "lookup", "--prompts", "ok.txt"], "compare trees with headstart be"),
        (
            ["adapt", "--drafter", "t", "--traffic", "no"],
            "no traffic at no: no such file or folder",
        ),
        (["quickstart", "eagle3"], "unknown argument 'eagle3'; expected settings of the form"),
        (["bench", "--target", "t", "--prompts", "none.txt"], "no such file or folder; exp"),
        (["plan", "--drafter", "t", "--prompts", "none.jsonl"], "no such file or folder; exp"),
        (
            ["bench", "--target", "t", "--prompts", "run"],
            "expected its held-out prompts, run/corpus",
        ),
        (["bench", "--target", "t", "--prompts", "empty.txt"], "empty.txt: no prompts found"),
        (["bench", "--target", "t", "--prompts", "latin.txt"], "latin.txt line 1: not UTF-8"),
        (["bench", "--target", "t", "--prompts", "bad.jsonl"], "bad.jsonl line 2: not valid JSON"),
        (["bench", "--target", "t", "--prompts", "x.csv"], "x.csv"),
        (["inspect"], "ARTIFACT"),
        (["inspect", "./no-such-folder"], "no-such-folder"),
        (["push", "."], "ORG/NAME"),
        (["push", ".", "name"], "expected ORG/NAME"),
        (["push", "org/name", "."], "The drafter is the first argument"),
        (["push", ".", "org/name"], "headstart.json"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "ok.txt").write_text("a\nb\n")
    (tmp_path / "run" / "corpus").mkdir(parents=True)
    (tmp_path / "run" / "corpus" / "held_out.jsonl").touch()
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt"\n')
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (error,) = printed.err.splitlines()
    assert error.startswith("headstart: error: ")
    assert said in error
    assert SECRET not in error


def test_a_closed_standard_stream_is_an_empty_one(target: str) -> None:
    ask = f"-m headstart generate --target {target} --max-new-tokens 2"
    for command, said in (
        (f"{ask} <&-", "error: no prompt; give --prompt or --file"),
        (f"{ask} --prompt a >&-", "0.0"),
        (f"{ask} --prompt a <&- >&- 2>&-", ""),
    ):
        line = f'exec "{sys.executable}" {command}'
        done = subprocess.run(["sh", "-c", line], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == (2 if "error" in said else 0), done.stderr
        assert said in done.stderr and "Traceback" not in done.stderr


def test_bytes_that_are_no_text_end_no_chat(target: str, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    command = [sys.executable, "-m", "headstart", "chat", "--target", target]
    typed = b"hello\nwor\xffld\nhi\n/save " + bytes(file) + b"\n"
    env = os.environ | {"LC_ALL": "C.UTF-8", "PYTHONUTF8": "0"}  # where decoding is strict
    command += ["--max-new-tokens", "5"]
    done = subprocess.run(command, cwd=ROOT, input=typed, env=env, capture_output=True)
    said = done.stderr.decode()
    assert done.returncode == 0 and "Traceback" not in said
    assert said.count("error: the message is not valid UTF-8 text; write it again") == 1, said
    users = [m["content"] for m in json.loads(file.read_text())["messages"][::2]]
    assert users == ["hello", "hi"]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_check_says_on_a_terminal_that_it_takes_long(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: Any, told: Any) -> None:
        told("loading the target")
        raise ValueError("refused")

    monkeypatch.setattr("headstart.train.checks.inspect.inspect_run", refuse)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert main(["check", "quickstart"]) == 2
    said = capsys.readouterr().err.splitlines()
    first = ["Checking quickstart, which takes a minute or two"] * terminal
    assert said[:-1] == [*first, "check: loading the target"]


def test_help_names_every_rule_and_expansion() -> None:
    from headstart.commands import options
    from headstart.infer.rules.registry import RULES
    from headstart.infer.trees.expansions import Expansion

    assert all(re.search(rf"\b{name}\b", options.RULE) for name in RULES)
    assert all(re.search(rf"\b{name}\b", options.EXPANSION) for name in get_args(Expansion))


def test_help_breaks_lines_between_words_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    assert "best-first:NODES,WIDTH,DEPTH" in capsys.readouterr().out


def test_a_terminal_is_told_what_is_loaded(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "--target", target, "--prompt", "hi", "--max-new-tokens", "2"]
    assert main(command) == 0
    assert "Loading" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(command) == 0
    assert capsys.readouterr().err.startswith(f"Loading {target}\n")


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "usage: headstart" in printed.err and "quickstart" in printed.err


@pytest.mark.parametrize("option", ["--tree", "--rule", "--expansion"])
def test_a_mistyped_way_of_decoding_is_told_before_torch_is_imported(
    option: str, tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("import os\n")
    for command in (
        ["generate", "--target", "t", "--prompt", "x"],
        ["bench", "--target", "t", "--prompts", "prompts.txt"],
        ["chat", "--target", "t"],
        ["inspect", "t", "--prompt", "x"],
    ):
        program = (
            "import sys; from headstart.cli import main; "
            f"status = main({[*command, option, 'chian:4']!r}); "
            "sys.exit(9 if 'torch' in sys.modules else status)"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert "is 'chian:4'; expected" in done.stderr


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_DEBUG", "1")
    with pytest.raises(ValueError, match="loose"):
        main(["quickstart", "loose"])


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise TypeError("ours")

    monkeypatch.setattr("headstart.train.recipe.load_recipe", broken)
    with pytest.raises(TypeError):
        main(["quickstart"])


def test_no_prompt_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    assert main(["generate", "--target", "t"]) == 2
    assert "--prompt or --file" in capsys.readouterr().err


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headstart.train.recipe.load_recipe", interrupted)
    assert main(["quickstart"]) == 130
    assert (
        capsys.readouterr().err
        == "headstart: interrupted; finished stages are kept, and the same command continues\n"
    )


def test_tokens_and_passwords_are_blanked() -> None:
    error = OSError("401 for hf_" + "a" * 30 + "\n at https://user:word@host/x")
    assert cli.one_line(error) == "401 for hf_… at https://…@host/x"


@pytest.mark.parametrize("prints", ["print", "plain_console(sys.stdout).print"])
def test_a_reader_that_goes_away_is_no_error(prints: str) -> None:
    program = (
        "import sys\nfrom headstart import cli\nfrom headstart.commands import train\n"
        "from headstart.reports.tables import plain_console\n"
        f"def long(_):\n    [{prints}('x' * 80) for _ in range(100_000)]\n    return 0\n"
        "train.run = long\n"
        "sys.exit(cli.main(['train', 'quickstart']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stderr
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr.read() == ""
    process.stderr.close()


def test_python_m_headstart_on_a_narrow_encoding() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headstart", "generate", "--help"],
        cwd=ROOT,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert b"cartesian:A,B,?" in done.stdout
