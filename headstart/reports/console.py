"""Consoles and the two kinds of tables that every report is printed with."""

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table


def plain_console(out: TextIO, width: int | None = None) -> Console:
    """A console on `out`: colours on a terminal, plain text anywhere else.

    Without markup: a tree or a path may hold square brackets.
    """
    return Console(file=out, markup=False, emoji=False, highlight=False, width=width)


def titled(out: TextIO, title: str, width: int | None = None) -> Console:
    """A `plain_console` with a title printed on it, which is never cut into lines."""
    console = plain_console(out, width)
    console.print()
    console.print(title, style="bold", soft_wrap=True)
    return console


def grid(rows: Sequence[tuple[str, str]]) -> Table:
    """Labels, as wide in every grid, and values, of which those that start with NO are red."""
    table = Table.grid(padding=(0, 2))
    table.add_column(width=31, style="cyan")
    table.add_column()
    for label, value in rows:
        table.add_row(f"  {label}", value, style="bold red" if value.startswith("NO") else None)
    return table


def column_table(names: Sequence[str], figures: Sequence[str], gap: int = 2) -> Table:
    """An empty table with a header: columns of names, which may wrap, then columns of figures."""
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="cyan")
    for name in names:
        table.add_column(name, overflow="fold")
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    return table
