"""The command line: what it passes on, what it prints where, and how it fails."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headstart import cli
from headstart.cli import main

ROOT = Path(__file__).resolve().parents[2]
SECRET = "the secret words"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random Llama and its byte-level tokenizer, saved as any model is."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=256, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
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
    door = Door({"tau": 2.5, "artifact": "runs/quickstart/heads"})
    monkeypatch.setattr("headstart.train.pipeline.run", door)
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
    door = Door({"tau": 2.5, "artifact": "runs/quickstart/heads"})
    monkeypatch.setattr("headstart.train.pipeline.run", door)
    assert main(["quickstart"]) == 0
    assert door.calls[0][1] == {"fresh": False}
    printed = capsys.readouterr().out
    assert printed.index("2.50") < printed.index("The drafter is in runs/quickstart/heads")
    assert "headstart generate --drafter runs/quickstart/heads" in printed


def test_train_is_the_module_s_main(monkeypatch: pytest.MonkeyPatch) -> None:
    door = Door(0)
    monkeypatch.setattr("headstart.train.main", door)
    assert main(["train", "quickstart", "--fresh", "seed=1", "decode.prompts=2"]) == 0
    assert door.calls == [((["quickstart", "seed=1", "decode.prompts=2", "--fresh"],), {})]


def test_bench_loads_and_measures(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    door = Door({"tau": 1.0, "artifact": None})
    monkeypatch.setattr("headstart.infer.bench.bench", door)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abcdef\nghijkl\nmnopqr\n")
    arguments = ["bench", "--target", target, "--prompts", str(prompts), "--dtype", "float64"]
    arguments += ["--limit", "2", "--prefix-tokens", "3", "--new-tokens", "9", "--json"]
    assert main(arguments) == 0
    (((speculator, given), named),) = door.calls
    assert str(speculator.model.dtype) == "torch.float64"
    assert [tuple(ids.shape) for ids in given] == [(1, 3), (1, 3)]
    decoded = {speculator.tokenizer.decode(ids[0]) for ids in given}
    assert decoded < {"abc", "ghi", "mno"}
    assert named == {"new_tokens": 9}
    assert json.loads(capsys.readouterr().out)["tau"] == 1.0


# generate, on a real model.


def test_generate_streams_what_the_model_writes(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--target", target, "--prompt", "hi", "--max-new-tokens", "12"]) == 0
    printed = capsys.readouterr()
    assert printed.out.rstrip("\n") == plain_text(target, "hi", 12).rstrip("\n")
    assert "τ 1.00 tokens per round: 11 tokens after the first, 11 rounds" in printed.err


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


def test_a_seed_repeats_a_sample(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    def sample(seed: str) -> str:
        command = ["generate", "--target", target, "--prompt", "hi", "--max-new-tokens", "16"]
        assert main([*command, "--temperature", "1.5", "--top-k", "200", "--seed", seed]) == 0
        return capsys.readouterr().out

    assert sample("1") == sample("1")
    assert sample("1") != sample("2")


def test_the_artifact_names_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained_for(name: str) -> None:
        manifest = SimpleNamespace(target=name)
        monkeypatch.setattr("headstart.heads.artifact.read_manifest", lambda _: manifest)

    here, moved = tmp_path / "here", tmp_path / "run" / "target"
    here.mkdir()
    moved.mkdir(parents=True)
    trained_for(str(here))
    assert cli._own_target("somewhere") == str(here)
    trained_for("runs/elsewhere/target")
    assert cli._own_target(str(tmp_path / "run" / "heads")) == str(moved)
    trained_for("runs/elsewhere/gone")
    with pytest.raises(cli.UsageError, match="pass --target runs/elsewhere/gone"):
        cli._own_target(str(tmp_path / "run" / "heads"))


# How it fails.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["quickstart", "--frsh"], "unknown argument '--frsh'"),
        (["quickstart", "loose"], "override 'loose'"),
        (["quickstart", "train.max_stps=3"], "did you mean 'max_steps'"),
        (["quickstart", "--recipe", "quickstrat"], "did you mean 'quickstart'"),
        (["train"], "RECIPE"),
        (["train", "quickstart", "decode.rule=greedier"], "decode.rule"),
        (["generate", "--prompt", "x"], "neither --target nor --drafter"),
        (["generate", "--target", "t", "--prompt", " "], "--prompt: the prompt is empty"),
        (["generate", "--target", "t", "--prompt", "\udcff"], "--prompt: not valid UTF-8"),
        (["generate", "--target", "t", "--file", "none.txt"], "none.txt"),
        (["generate", "--target", "t", "--file", "latin.txt"], "latin.txt: not valid UTF-8"),
        (["generate", "--prompt", "a", "--file", "b"], "not allowed with"),
        (["generate", "--target", "t", "--prompt", "x", "--top-p", "0.9"], "--temperature"),
        (["generate", "--temperature", "nan"], "found 'nan', expected a finite number from 0"),
        (["generate", "--temperature", "-1"], "--temperature"),
        (["generate", "--max-new-tokens", "0"], "found '0', expected a whole number from 1"),
        (["generate", "--top-p", "1.5"], "found '1.5', expected a number above 0, at most 1"),
        (["generate", "--target", "no/such-model", "--prompt", SECRET], "no/such-model"),
        (["generate", "--drafter", "./no-such-folder", "--prompt", SECRET], "no-such-folder"),
        (["generate", SECRET], "arguments too many: 1"),
        (["bench", "--target", "t"], "--prompts"),
        (["bench", "--target", "t", "--prompts", "none.txt"], "none.txt"),
        (["bench", "--target", "t", "--prompts", "empty.txt"], "empty.txt: no prompts found"),
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
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (error,) = printed.err.splitlines()
    assert error.startswith("headstart: error: ")
    assert said in error
    assert SECRET not in error


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
    assert capsys.readouterr().err == "headstart: interrupted; finished stages are kept\n"


def test_tokens_and_passwords_are_blanked() -> None:
    error = OSError("401 for hf_" + "a" * 30 + "\n at https://user:word@host/x")
    assert cli.one_line(error) == "401 for hf_… at https://…@host/x"


def test_a_reader_that_goes_away_is_no_error() -> None:
    program = (
        "import sys, headstart.cli as cli\n"
        "def long(_):\n    [print('x' * 80) for _ in range(100_000)]\n    return 0\n"
        "cli._train = long\n"
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
