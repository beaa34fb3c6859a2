"""The help of the commands: its order, its width, and the options that it hints at."""

import contextlib
import inspect
import sys
from pathlib import Path

import pytest

import headstart
from headstart.cli import main
from headstart.commands import COMMANDS


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns_but_for_examples(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    described, _, examples = help_of(command, capsys).partition("examples:")
    assert examples and all(len(line) <= 80 for line in described.splitlines())


def test_help_names_the_most_used_options_first(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of("generate", capsys)
    order = ["--drafter", "--prompt", "--max-new-tokens", "--temperature", "--tree", "--dtype"]
    places = [text.index(f"\n  {option}") for option in order]
    assert places == sorted(places)


def test_a_long_usage_has_only_what_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    usage = help_of("plan", capsys).splitlines()[0]
    assert usage == "usage: headstart plan [options] --drafter ARTIFACT --prompts FILE"
    assert "[--fresh]" in help_of("train", capsys).splitlines()[0]


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("-p", " (did you mean '--prompt'?)"),
        ("-z", ""),
        ("--promt", " (did you mean '--prompt'?)"),
        ("--model", " (did you mean '--target'?)"),
        ("--verbose", ""),
    ],
)
def test_hints_at_an_option(option: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", option]) == 2
    assert capsys.readouterr().err == (
        f"headstart: error: no option {option}{hint}; see headstart generate --help\n"
    )


@pytest.mark.parametrize("name", ["load", "Speculator", "Batcher", "Recorder", "Grammar"])
def test_signatures_of_the_public_names_are_readable(name: str) -> None:
    """`help` shows types by the names that the source has for them, without their modules."""
    said = str(inspect.signature(getattr(headstart, name)))
    assert "transformers." not in said and "headstart." not in said, said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["generate", "--help"]])
def test_help_that_cannot_be_written_is_an_error(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(words) == 2
        monkeypatch.undo()
        with contextlib.suppress(OSError):  # the last try to write what is left
            full.close()
    assert capsys.readouterr().err == "headstart: error: [Errno 28] No space left on device\n"
