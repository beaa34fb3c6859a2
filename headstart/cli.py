"""The command line: parser, errors and exit status; what each command does is in `commands`.

Results go to stdout; progress, statistics and errors go to stderr. A mistake of the user's ends
with one line and exit status 2; set HEADSTART_DEBUG=1 to see its traceback.
"""

import argparse
import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from textwrap import dedent, fill, indent, wrap
from typing import Any, NoReturn

from safetensors import SafetensorError

from headstart import __version__
from headstart.commands import COMMANDS
from headstart.terminal import UsageError, one_line
from headstart.train.processes.stopping import CtrlC

_SEE_HELP = "see headstart --help"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Without `argv` it is that of the process, which then ends within a second of Ctrl-C.
    """
    return exit_status("headstart", lambda: _run(argv), ends=argv is None)


def exit_status(program: str, run: Callable[[], int], ends: bool = False) -> int:
    """The exit status of `run`: its own, 2 on a mistake of the user's, 130 on Ctrl-C.

    Every error is printed on one line, after the program's name. Where the program `ends` with it,
    Ctrl-C leaves at once, so that nothing is printed after its message.
    """
    _prepare_streams()
    try:
        try:
            status = run()
        except SystemExit:  # of --help and --version
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return status
    except KeyboardInterrupt as error:
        sys.stdout.flush()
        print(f"{program}: {str(error) or 'interrupted'}", file=sys.stderr, flush=True)
        if ends:
            os._exit(130)
        return 130
    except BrokenPipeError:
        # The reader has gone; without this the interpreter's last flush would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, SafetensorError) as error:
        if os.environ.get("HEADSTART_DEBUG") == "1":
            raise
        message = one_line(error)
        if _is_to_say(message):
            print(f"{program}: error: {message}", file=sys.stderr, flush=True)
        return 2


def _is_to_say(message: str) -> bool:
    """Whether this process is to print an error: of several that a launcher started, the first."""
    if "RANK" not in os.environ:
        return True
    from headstart.train.processes.lifetime import is_to_say

    return is_to_say(message)


def _prepare_streams() -> None:
    """Let no standard stream be missing, and none fail at a character or byte.

    What cannot be decoded is read as lone surrogates, which the readers of texts refuse.
    """
    modes = {"stdin": "r", "stdout": "w", "stderr": "w"}
    for name, mode in modes.items():
        if getattr(sys, name) is None:  # it was closed when the process began
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # an encoding without τ prints a ?, and goes on
            errors = "surrogateescape" if name == "stdin" else "replace"
            with contextlib.suppress(io.UnsupportedOperation):  # the caller has read from it
                stream.reconfigure(errors=errors)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; each command's function is its `run`."""
    parser = Parser(
        prog="headstart",
        description="Train draft heads for a causal language model and decode with them faster, "
        "with the same output.",
    )
    parser.add_argument("--version", action="version", version=f"headstart {__version__}")
    table = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in COMMANDS:
        command = import_module(f"headstart.commands.{name.replace('-', '_')}")
        summary, _, examples = (command.__doc__ or "").partition("\n")
        brief = summary[:1].lower() + summary[1:].rstrip(".")
        own = table.add_parser(
            name,
            help=brief,
            description=summary,
            epilog="examples:\n" + indent(dedent(examples).strip(), "  "),
            formatter_class=Help,
        )
        own.set_defaults(run=command.run, kept=getattr(command, "KEPT", ""), parser=own)
        command.add_arguments(own)
    return parser


_NAMED = 8  # a usage with more options than these names only those that must be given


class Help(argparse.RawDescriptionHelpFormatter):
    """Wraps the help of an argument between words alone, so that `best-first` stays whole.

    A long list of options is not repeated in the usage, since the help lists them below it.
    """

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:
        optional = [action for action in actions if action.option_strings and not action.required]
        if len(optional) > _NAMED:
            actions = [action for action in actions if action not in optional]
            groups = []
            self._prog += " [options]"
        super().add_usage(usage, actions, groups, prefix)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        raw = "\n" in text  # examples keep their lines
        return super()._fill_text(text if raw else fill(text, width), width, indent)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(" ".join(text.split()), width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """Raises a mistake as a UsageError, so that it is printed on one line like every other."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print with the whole usage."""
        raise UsageError(f"{message} (see {self.prog} --help)")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help; a failed write is an error, which argparse would pass over."""
        (file or sys.stderr).write(message)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of one command, whose function is `run`. Raises UsageError."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words and words[0] not in COMMANDS:
        _check_first(words[0])
    # Overrides may stand anywhere, which argparse cannot express: it fills an optional list of
    # positionals once, at the first gap between options.
    options, rest = build_parser().parse_known_args(words)
    if rest:
        _refuse_unknown(rest, options.parser)
        options.overrides += rest
    return options


def _check_first(word: str) -> None:
    """A UsageError for a word that stands in the place of the command and is none."""
    if not re.match(r"--?[a-zA-Z]", word):
        raise UsageError(f"no command {word!r}{_nearest(word, COMMANDS)}; {_SEE_HELP}")
    flags = ("-h", "--help", "--version")
    if not any(flag.startswith(word) for flag in flags):
        near = _nearest_option(word, flags)
        raise UsageError(f"no option {word}{near} before a command; {_SEE_HELP}")


def _refuse_unknown(rest: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """A UsageError for what is left of a command line, but for overrides of a recipe.

    Only names of options are repeated: another word may belong to a prompt.
    """
    actions = parser._actions
    flags = [flag for action in actions for flag in action.option_strings]
    named = [word.partition("=")[0] for word in rest if re.match(r"--?[a-zA-Z]", word)]
    see = f"see {parser.prog} --help"
    overridable = any(action.dest == "overrides" for action in actions)
    if named:
        hint = _setting_for(named[0]) if overridable and "--target" not in flags else ""
        raise UsageError(f"no option {named[0]}{hint or _nearest_option(named[0], flags)}; {see}")
    if overridable:
        if wrong := [word for word in rest if "=" not in word]:
            raise UsageError(
                f"unknown argument {wrong[0]!r}; a setting of the recipe has the form a.b=value"
            )
        return
    prompt = "; give the prompt with --prompt" if "--prompt" in flags else ""
    raise UsageError(f"too many arguments: {len(rest)} more than expected{prompt} ({see})")


def _nearest_option(name: str, flags: Sequence[str]) -> str:
    """A hint at the options that a mistyped or shortened one may stand for.

    >>> _nearest_option("-p", ["-h", "--prompt", "--top-p"])
    " (did you mean '--prompt'?)"
    """
    if re.fullmatch("-[a-zA-Z]", name):  # there are no short options but -h
        begin_so = [repr(flag) for flag in flags if flag.startswith(f"-{name}")]
        return f" (did you mean {' or '.join(begin_so)}?)" if begin_so else ""
    if name == "--model" and "--target" in flags:  # its name in most other programs
        return " (did you mean '--target'?)"
    near = _nearest(name.lstrip("-"), [flag.lstrip("-") for flag in flags if flag != "-h"])
    return near.replace("'", "'--", 1)


def _setting_for(option: str) -> str:
    """A hint at the setting of a recipe that says what other commands have an option for.

    >>> _setting_for("--target"), _setting_for("--fresh")
    (" (give the setting 'target.model=…')", '')
    """
    settings = {
        "--model": "target.model",
        "--target": "target.model",
        "--drafter": "drafter.family",
    }
    return f" (give the setting '{settings[option]}=…')" if option in settings else ""


def _nearest(name: str, known: Sequence[str]) -> str:
    from headstart.train.recipe.fields import nearest

    return nearest(name, known)


def _run(argv: Sequence[str] | None) -> int:
    if not (sys.argv[1:] if argv is None else argv):
        build_parser().print_help(sys.stderr)
        return 2
    options = parse(argv)
    message = "interrupted" + options.kept
    try:
        if argv is not None:
            return options.run(options)
        with CtrlC(message):
            return options.run(options)
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(str(error) or message) from None
