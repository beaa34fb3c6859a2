"""What reports are made of: consoles, two kinds of tables, and JSON documents."""

import json
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.table import Table

Report = Mapping[str, Any]
"""What a benchmark returns; what was not measured is None."""


def to_json(report: Report) -> str:
    """One JSON document; a number that is not finite becomes null, which every reader accepts.

    >>> to_json({"tau": 2.5, "ms_per_round": float("nan")})
    '{\\n  "tau": 2.5,\\n  "ms_per_round": null\\n}'
    """
    finite = json.loads(json.dumps(report), parse_constant=lambda _: None)
    return json.dumps(finite, indent=2, ensure_ascii=False)


def said_of_forwards(forwards: str) -> str:
    """The end of a line on decoding, where forwards do not run by torch alone.

    >>> said_of_forwards("kernels"), said_of_forwards("torch")
    (', with kernels', '')
    """
    return "" if forwards == "torch" else f", with {forwards}"


class _Console(Console):
    """Leaves it to the command line what happens when the reader of its output has gone."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise BrokenPipeError


def plain_console(out: TextIO, width: int | None = None) -> Console:
    """A console on `out`: colours on a terminal, plain text anywhere else."""
    # Without markup: a tree or a path may hold square brackets.
    return _Console(file=out, markup=False, emoji=False, highlight=False, width=width)


def titled(out: TextIO, title: str, width: int | None = None) -> Console:
    """A `plain_console` with a title printed on it, which is never cut into lines."""
    console = plain_console(out, width)
    console.print()
    console.print(title, style="bold", soft_wrap=True)
    return console


def print_apart(console: Console, *parts: RenderableType, style: str | None = None) -> None:
    """Print each part after an empty line; tables without a row are left out."""
    for part in parts:
        if isinstance(part, Table) and not part.row_count:
            continue
        console.print()
        console.print(part, style=style)


def grid(rows: Sequence[tuple[str, str]]) -> Table:
    """Labels, as wide in every grid if they are short, and values, red where they start with NO.

    A row with an empty value is left out. What files of others say may be endless: long texts are
    cut, and so are many rows.
    """
    table = Table.grid(padding=(0, 2))
    told = [(label, value) for label, value in rows if value]
    longest = max((len(label) + 2 for label, _ in told), default=0)
    room = shutil.get_terminal_size().columns * 3 // 5
    table.add_column(width=max(31, min(longest, room)), overflow="fold", style="cyan")
    table.add_column(overflow="fold")
    for label, value in told[:_ROWS]:
        style = "bold red" if value.startswith("NO") else None
        table.add_row(f"  {_cut(label, _LABEL)}", _cut(value, _VALUE), style=style)
    if more := len(told[_ROWS:]):
        table.add_row("  …", f"and {more:,} more")
    return table


_ROWS, _LABEL, _VALUE = 500, 200, 2000  # at most, of a grid: rows, and characters


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}…"


def column_table(names: Sequence[str], figures: Sequence[str], gap: int = 2) -> Table:
    """An empty table with a header: columns of names, which may wrap, then columns of figures."""
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="cyan")
    for name in names:
        table.add_column(name, overflow="fold")
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    return table
