"""The reference pages in Markdown: every key of a recipe and every command.

They are made from the dataclasses of `train/recipe/schema.py` and `text.py`, from the config
classes of the drafters, and from the parser of the command line, so they cannot differ from them.
"""

import argparse
import ast
import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.cli import build_parser
from headstart.heads.families import FAMILIES, family
from headstart.train.recipe import Recipe, schema

ROOT = Path(__file__).resolve().parents[2]
_KINDS = {int: "integer", float: "number", str: "text", bool: "`true` or `false`", Any: "text"}


@dataclass(frozen=True)
class Key:
    """A key of a recipe's section.

    Attributes:
        default: as it is written in YAML; empty where the key must be given.
        allowed: the values or the range, beyond the type.
        section: the dataclass of the section that the key holds, if it holds one.
    """

    name: str
    kind: str
    default: str
    allowed: str
    meaning: str
    section: type | None = None


def keys_of(cls: type) -> list[Key]:
    """The keys of a section, in the order of its dataclass.

    >>> key = next(key for key in keys_of(schema.Train) if key.name == "learning_rate")
    >>> key.kind, key.default, key.allowed
    ('number', '0.001', '> 0')
    """
    comments, calls = _comments(cls), _calls(cls)
    return [
        Key(
            field.name.removesuffix("_"),
            _kind(field.type),
            _default(field),
            _allowed(calls.get(field.name)),
            comments.get(field.name, ""),
            _section(field.type),
        )
        for field in dataclasses.fields(cls)
    ]


def sections() -> Iterator[tuple[str, type]]:
    """Every section of a recipe by its path; the recipe itself has the empty one."""

    def walk(path: str, cls: type) -> Iterator[tuple[str, type]]:
        yield path, cls
        for key in keys_of(cls):
            if key.section is not None and key.section is not schema.DrafterSpec:
                yield from walk(f"{path}.{key.name}".lstrip("."), key.section)

    return walk("", Recipe)


def recipe_page() -> str:
    """The page of all keys, a table for each section and for each drafter family."""
    lines = []
    for path, cls in sections():
        lines += [f"## {path or 'The recipe'}", "", inspect.cleandoc(cls.__doc__ or ""), ""]
        lines += [*_table(keys_of(cls), path), ""]
    lines += [
        "## drafter",
        "",
        "`family` names one of those below, whose options are the other keys.",
    ]
    about = {row.split(" | ")[0]: row.split(" | ")[1] for row in results()[2:]}
    for name in FAMILIES:
        words = about[f"| `{name}`"]
        lines += ["", f"### family: {name}", "", f"{words[0].upper()}{words[1:]}.", ""]
        lines += _options(name)
    return "\n".join(lines) + "\n"


def results() -> list[str]:
    """The lines of the README's table of all families."""
    _, _, below = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Families\n")
    lines = below.partition("\n## ")[0].splitlines()
    return [line for line in lines if line.startswith("|")]


def commands_page() -> str:
    """The page of all commands: usage, arguments and examples."""
    lines = []
    for name, parser in _commands().items():
        usage = re.sub(r"\s+", " ", parser.format_usage().removeprefix("usage: ")).strip()
        lines += [f"## {name}", "", f"{parser.description}", ""]
        lines += [
            "```text",
            *textwrap.wrap(usage, 100, subsequent_indent="    ", break_on_hyphens=False),
            "```",
            "",
        ]
        lines += ["| argument | meaning |", "|---|---|"]
        for action in parser._actions:
            # A pipe within backticks ends no cell, and would be shown with its escape.
            flags = ", ".join(f"`{flag}`" for flag in _flags(action))
            lines.append(f"| {flags} | {_cell(_meaning(action))} |")
        examples = (parser.epilog or "").removeprefix("examples:\n")
        lines += ["", "```bash", textwrap.dedent(examples), "```", ""]
    return "\n".join(lines)


def _commands() -> dict[str, argparse.ArgumentParser]:
    for action in build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    raise AssertionError("the parser has no commands")


def _flags(action: argparse.Action) -> list[str]:
    """`--tree TREE`, or what a positional argument is called."""
    value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    return [f"{flag}{value}" for flag in action.option_strings] or [value.strip()]


def _meaning(action: argparse.Action) -> str:
    said = (action.help or "").replace("%%", "%")
    default = action.default
    if default in (None, False, argparse.SUPPRESS) or default == [] or "default" in said:
        return said
    return f"{said} (default: {default})".strip()


def _options(name: str) -> list[str]:
    """The table of a family's options."""
    config: Any = family(name).config_class
    if config is None or not getattr(config, "OPTIONS", ()):
        return ["It has no options."]
    ranges = {
        option: words
        for words, options in getattr(config, "RANGES", {}).items()
        for option in options
    }
    meanings: dict[str, str] = {}
    hints: dict[str, Any] = {}
    for cls in reversed(config.__mro__):
        if cls.__module__.startswith("headstart."):
            meanings |= _attributes(cls) | _comments(cls)
            hints |= inspect.get_annotations(cls)
    keys = [
        Key(
            option,
            _kind(hints[option]),
            _yaml(getattr(config, option, None)),
            ranges.get(option, ""),
            meanings.get(option, ""),
        )
        for option in config.OPTIONS
    ]
    return _table(keys, "drafter")


def _table(keys: list[Key], path: str) -> list[str]:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in keys:
        full = f"{path}.{key.name}".lstrip(".")
        meaning = key.meaning
        if key.section is not None:
            where = "drafter" if key.section is schema.DrafterSpec else full
            anchor = re.sub(r"[^\w-]", "", where.lower())
            meaning = f"{meaning} [The keys of this section](#{anchor})".strip()
        kind = f"{key.kind}, {key.allowed}" if key.allowed else key.kind
        default = f"`{key.default}`" if key.default else "must be given"
        lines.append(f"| `{full}` | {_cell(kind)} | {default} | {_cell(meaning)} |")
    return lines


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _kind(hint: Any) -> str:
    """A type in words: `number or null`."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        kinds = dict.fromkeys(map(_kind, typing.get_args(hint)))
        return " or ".join(kind for kind in kinds if kind != "integer" or "number" not in kinds)
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(hint))
    if hint is types.NoneType:
        return "`null`"
    if hint in _KINDS:
        return _KINDS[hint]
    listed = typing.get_origin(hint) or hint
    return "list" if listed in (list, tuple) else "mapping"


def _section(hint: Any) -> type | None:
    members = [hint, *typing.get_args(hint)]
    return next((m for m in members if isinstance(m, type) and dataclasses.is_dataclass(m)), None)


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return _yaml(field.default)
    if field.default_factory is dataclasses.MISSING:
        return ""
    value = field.default_factory()
    return "{}" if dataclasses.is_dataclass(value) else _yaml(value)


def _yaml(value: Any) -> str:
    words = {None: "null", True: "true", False: "false", (): "[]"}
    if isinstance(value, bool | tuple) or value is None:
        return words.get(value, str(value))
    return '""' if value == "" else str(value)


def _allowed(call: ast.Call | None) -> str:
    """What a field's function allows: a range, or one of several words."""
    if call is None or not isinstance(call.func, ast.Name):
        return ""
    values = dict(vars(schema))
    if call.func.id in ("one_of", "loss_field"):
        choices = schema.LOSSES
        if call.func.id == "one_of":
            choices = eval(f"({', '.join(map(ast.unparse, call.args))},)", values)
        return "one of " + ", ".join(f"`{choice}`" for choice in choices)
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    bounds = [f"{signs[k.arg]} {ast.unparse(k.value)}" for k in call.keywords if k.arg in signs]
    return ", ".join(["> 0"] * (call.func.id == "positive") + bounds)


def _calls(cls: type) -> dict[str, ast.Call]:
    """The function that makes each field, as it is called in the source."""
    found = {}
    for node in _body(cls):
        if isinstance(node.value, ast.Call) and isinstance(node.target, ast.Name):
            found[node.target.id] = node.value
    return found


def _body(cls: type) -> list[ast.AnnAssign]:
    tree: Any = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    return [node for node in tree.body[0].body if isinstance(node, ast.AnnAssign)]


def _comments(cls: type) -> dict[str, str]:
    """What the comments above and behind each field say."""
    lines = textwrap.dedent(inspect.getsource(cls)).splitlines()
    found = {}
    for node in _body(cls):
        above, at = [], node.lineno - 2
        while lines[at].lstrip().startswith("#"):
            above.insert(0, lines[at].lstrip(" #"))
            at -= 1
        behind = lines[(node.end_lineno or node.lineno) - 1][node.end_col_offset or 0 :]
        behind = behind.replace("# noqa: RUF009", "").strip(" #")
        words = " ".join([*above, behind]).strip()
        if words and isinstance(node.target, ast.Name):
            found[node.target.id] = words
    return found


def _attributes(cls: type) -> dict[str, str]:
    """What the docstring's `Attributes` say."""
    _, _, listed = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", listed, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
