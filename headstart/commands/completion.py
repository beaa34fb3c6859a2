"""Print the script for completion in a shell.

source <(headstart completion bash)
headstart completion zsh > "${fpath[1]}/_headstart"
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, get_args

from . import options as shared

_SHELL = "bash, zsh or tcsh"
_FILES, _FOLDERS = {"FILE", "JSON"}, {"DIR", "FOLDER", "ARTIFACT", "MODEL", "CHECKPOINT"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "tcsh"), help=_SHELL)


def run(options: argparse.Namespace) -> int:
    """Print the script: commands, options and their values, shipped recipes, files and folders."""
    import shtab

    from headstart.cli import build_parser
    from headstart.heads.artifacts.engines import FORMATS
    from headstart.infer.rules.registry import RULES
    from headstart.infer.trees.expansions import Expansion

    parser = build_parser()
    values = {"FORMAT": FORMATS, "RULE": RULES, "EXPANSION": get_args(Expansion)}
    values["auto|on|off"] = shared.FASTER
    for action in _actions(parser):
        name = str(action.metavar)
        if name in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif name in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif name in values:
            action.choices = list(values[name])
        elif name == "RECIPE":
            action.complete = {  # type: ignore[attr-defined]
                "bash": "_headstart_recipes",
                "zsh": "_headstart_recipes",
                "tcsh": "f",
            }
    preamble: Any = _preamble()  # shtab's annotation says a string alone
    print(shtab.complete(parser, options.shell, preamble=preamble))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The arguments of a parser and of its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _actions(each)
        else:
            yield action


def _preamble() -> dict[str, str]:
    """By shell, the function that completes a recipe: a shipped name or a file."""
    from headstart.train.recipe import shipped_recipes

    names = " ".join(shipped_recipes())
    bash = f'compgen -W "{names}" -- "$1"; compgen -f -- "$1"'
    zsh = f"compadd {names}; _files"
    bodies = {"bash": bash, "zsh": zsh}
    return {shell: f"_headstart_recipes() {{ {body}; }}\n" for shell, body in bodies.items()}
