"""Completion in a shell: the script completes commands, options, recipes and files."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headstart.cli import main
from headstart.commands import COMMANDS

COMPLETE = """
function=$(complete -p headstart | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); "$function"; printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    done = subprocess.run(
        [sys.executable, "-m", "headstart", "completion", "bash"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (folder / "script").write_text(done.stdout + COMPLETE)
    (folder / "prompts.jsonl").touch()
    return folder / "script"


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        (["headstart", "verify"], "verify-lossless"),
        (["headstart", "bench", "--prompts"], "--prompts"),
        (["headstart", "bench", "--prompts", "pro"], "prompts.jsonl"),
        (["headstart", "train", "quickst"], "quickstart"),
        (["headstart", "completion", "z"], "zsh"),
        (["headstart", "export", "--to", "sg"], "sglang"),
        (["headstart", "generate", "--rule", "tr"], "traversal"),
        (["headstart", "bench", "--expansion", "with_"], "with_replacement"),
        (["headstart", "generate", "--compile", "of"], "off"),
    ],
)
def test_bash_completes(script: Path, typed: list[str], found: str) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    done = subprocess.run(
        [bash, str(script), *typed], cwd=script.parent, capture_output=True, text=True
    )
    assert found in done.stdout.split(), done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_every_command_is_completed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in COMMANDS)


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 2
    assert "choose from" in capsys.readouterr().err
