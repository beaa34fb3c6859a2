"""Every command that README, docs and `--help` show is one that the command line takes.

`pytest -m docs` runs them as well, on a quickstart made small.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headstart.cli import parse
from headstart.commands import COMMANDS
from headstart.terminal import UsageError
from headstart.train.recipe import load_recipe, shipped_parts, shipped_recipes
from headstart.train.recipe.fields import RecipeError
from tests.support.documents import (
    Block,
    Command,
    blocks,
    commands_of,
    documents,
    help_examples,
    inline_commands,
)
from tests.support.paths import ROOT

BLOCKS = blocks()
LEFT_OUT = re.compile(r"are required|expected (one|at least one) argument")


def check(command: Command) -> None:
    """Parse a `headstart` command; of a shipped recipe, also its overrides."""
    if "headstart" not in command.words:
        return
    words = command.words[command.words.index("headstart") + 1 :]
    for mark in ("<", ">", "|"):  # what follows is the shell's
        words = words[: words.index(mark)] if mark in words else words
    if "--help" in words:
        return
    options = parse([word.rstrip(")") for word in words])
    recipe = getattr(options, "recipe", None)
    if words[0] in ("train", "distill", "check", "quickstart") and recipe != "RECIPE":
        known = {*shipped_recipes(), *shipped_parts()}
        theirs = recipe and "=" not in recipe and not known.issuperset(recipe.split("+"))
        load_recipe("own-model" if theirs else recipe or "quickstart", options.overrides)


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_what_documents_show_is_taken(path: Path) -> None:
    shown = [command for block in BLOCKS if block.path == path for command in block.commands]
    named = [command for where, command in inline_commands() if where == path]
    for command in (*shown, *named):
        try:
            check(command)
        except ValueError as error:  # a sentence may leave out what is required
            if command not in named or not LEFT_OUT.search(str(error)):
                pytest.fail(f"{command.text}: {error}")


def test_commands_are_found() -> None:
    shown = [command for block in BLOCKS for command in block.commands]
    assert len(shown) > 40 and sum(command.runs for command in shown) > 25


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("headstart bench --prompts x --node 8", UsageError),
        ("headstart train quickstart train.max_step=3", RecipeError),
        ("headstart train train.max_steps=3", RecipeError),
        ("headstart draw x", UsageError),
        ("headstart generate 'a prompt'", UsageError),
    ],
)
def test_a_wrong_command_is_found(text: str, error: type[ValueError]) -> None:
    with pytest.raises(error):
        check(Command(text))


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("headstart train own-model corpus.source=prompts.jsonl", True),
        ("headstart train own-model target.model=ORG/MODEL", False),
        ("headstart inspect FOLDER", False),
        ("headstart chat   # needs a GPU", False),
        ("headstart chat   # an answer a line", True),
        ("# needs a GPU\nheadstart chat", False),
        ("make docs", False),
    ],
)
def test_what_runs_is_seen(text: str, runs: bool) -> None:
    assert [command.runs for command in commands_of(text)] == [runs]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_two_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    examples = help_examples()[name]
    assert len(examples) == 2
    for command in examples:
        assert f"headstart {name}" in command.text
        check(command)
    with pytest.raises(SystemExit):
        parse([name, "--help"])
    shown = capsys.readouterr().out.rstrip().splitlines()
    assert [line.strip() for line in shown[-2:]] == [command.text for command in examples]


TINY = (
    "corpus.max_bytes=400000 target.scratch.max_seconds=null target.scratch.max_tokens=40000 "
    "target.scratch.layers=2 target.scratch.hidden_size=32 target.scratch.heads=4 "
    "target.scratch.intermediate_size=64 "
    "distill.examples=32 distill.shards=4 distill.prefix_tokens=32 distill.new_tokens=32 "
    "distill.max_seconds=null train.max_seconds=null train.max_steps=4 train.eval_every=4 "
    "decode.prompts=3 decode.new_tokens=32 decode.validation_prompts=2"
)
"""What makes a quickstart small; appended to every command that runs one."""
OWN = (
    "distill.examples=32 distill.shards=4 distill.new_tokens=16 train.max_steps=4 "
    "train.eval_every=4 decode.new_tokens=16 decode.validation_prompts=2"
)
"""The same for recipes that name their target."""


MEASURING = {
    "bench": "--limit 2 --new-tokens 16 --repeats 1",
    "plan": "--limit 2 --new-tokens 16",
    "doctor": "--limit 4 --new-tokens 8",
    "verify-lossless": "--limit 2 --new-tokens 16 --draws 128",
}
"""What makes commands that measure short."""
BENCHMARKS = {
    "-m benchmarks.architectures": "--type llama",
    "-m benchmarks.gpu": "--family medusa",
    "-m benchmarks.cpu limit": "--shape toy --megabytes 64 --new-tokens 8 --repeats 1",
    "-m benchmarks.cpu products": "--shape toy --rows 1 --repeats 1",
    "-m benchmarks.launches": "--nodes 1 --vocabulary 1024",
    "-m benchmarks.prefixes": "--first 64 --turns 2 --new-tokens 8 --repeats 1",
    "benchmarks/batching.py": "--threads 2 --rows 1 2 --texts 2 --new-tokens 8 --repeats 1",
    "benchmarks/compare_medusa2.py": "--limit 4",
    "benchmarks/compare_rules.py": "--limit 2",
    "benchmarks/compare_union.py": "--limit 2 --repeats 1",
    "benchmarks/sequoia.py": "--limit 4 --new-tokens 16",
}
"""The same for `python …`."""


def small(command: Command) -> str:
    """The command as it is run: with settings appended that make it small."""
    words = command.words
    if words[0] == "headstart" and words[1] in MEASURING:
        text = command.text.partition(" #")[0]
        text = text.replace("--batch-size 8", "--batch-size 2")  # the small corpus has two prompts
        return f"{text} {MEASURING[words[1]]}"
    if words[0] == "python":
        called = shlex.join(words[1:])
        for name, short in BENCHMARKS.items():
            if f"{called} ".startswith(f"{name} "):
                return f"{command.text.partition(' #')[0]} {short}"
    where = words.index("headstart") + 1 if "headstart" in words else 0
    if words[0] != "headstart" or words[where] not in ("train", "distill", "check", "quickstart"):
        return command.text
    if "--smoke" in words:
        return command.text
    recipe = words[where + 1] if words[where] != "quickstart" else "quickstart"
    own = recipe == "own-model" or recipe.endswith(".yaml")
    return f"{command.text.partition(' #')[0]} {OWN if own else TINY}"


def test_benchmarks_that_are_made_short_are_shown() -> None:
    run_as = [small(command) for block in BLOCKS for command in block.commands if command.runs]
    for name, short in BENCHMARKS.items():
        assert any(name in text and text.endswith(short) for text in run_as), name


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the documents' commands name: runs, prompts and a recipe."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    run(f"headstart quickstart {TINY}", folder)
    run(f"headstart train medusa2 {TINY}", folder)
    held_out = (folder / "runs/quickstart/corpus/held_out.jsonl").read_text().splitlines()
    train = (folder / "runs/quickstart/corpus/train.jsonl").read_text().splitlines()
    rows = [{"text": json.loads(row)["text"][:600]} for row in [*held_out, *train][:60]]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mine = "base: own-model\nname: my-model\n"
    mine += "target: {model: runs/quickstart/target, dtype: float32}\n"
    mine += "distill: {prefix: window, prefix_tokens: 32}\n"
    (folder / "my-model.yaml").write_text(mine)
    (matrix,) = re.findall(
        r"```yaml\n(.*?)```", (ROOT / "docs/measuring.md").read_text(), re.DOTALL
    )
    (folder / "matrix.yaml").write_text(matrix)
    shutil.copy(folder / "prompts.jsonl", folder / "question.jsonl")
    run(f"headstart train my-model.yaml {OWN}", folder)
    return folder


def run(script: str, folder: Path) -> None:
    """Run a script of the shell; a failing one fails the test with its last words.

    What judges may find fault with models as small as these: its status may be 1.
    """
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    bin = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [bash, "-euo", "pipefail", "-c", script],
        cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=900,
    )  # fmt: skip
    judges = script.split()[1] in ("check", "doctor", "verify-lossless")
    fine = done.returncode <= judges and "Traceback" not in done.stderr
    assert fine, f"{script}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"


@pytest.mark.docs
@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if any(c.runs for c in block.commands)], ids=str
)
def test_what_documents_show_runs(block: Block, scratch: Path) -> None:
    for command in block.commands:
        if command.runs:
            run(small(command), scratch)


def python_of(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


(FIRST,) = python_of(ROOT / "README.md")
"""What makes the `speculator` and the `inputs` that the pages go on with."""
PROGRAMS = [
    pytest.param(f"{FIRST}\n{program}" if program != FIRST else program, id=f"{path.name}:{place}")
    for path in documents()
    if path.name != "adding-a-drafter.md"  # whose code tests/test_documents.py runs
    for place, program in enumerate(python_of(path))
    if "ORG/MODEL" not in program
]


@pytest.mark.docs
@pytest.mark.parametrize("program", PROGRAMS)
def test_python_that_documents_show_runs(program: str, scratch: Path) -> None:
    run(f"{shlex.quote(sys.executable)} -c {shlex.quote(program)}", scratch)


@pytest.mark.docs
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_is_quick(name: str) -> None:
    """Below 0.3 s of processor time, which does not depend on what else runs."""
    program = (
        "import resource, subprocess, sys\n"
        "subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(used.ru_utime + used.ru_stime)\n"
    )
    command = [sys.executable, "-c", program, sys.executable, "-m", "headstart"]
    command += [*name.split(), "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert float(done.stdout) < 0.3, done.stderr
