"""How progress is shown: a bar on a terminal, now and then a line where there is none."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TextIO, TypeVar

from tqdm import tqdm

from headstart.heads.core import counted

SHARE = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
"""The form of a bar over a share of 1."""

EVERY = 30.0
"""Seconds between lines."""

_Item = TypeVar("_Item")


class Lines:
    """Takes a bar's place in a log: a line every `EVERY` seconds and at the end.

    It has those parts of tqdm that are used here.
    """

    def __init__(
        self,
        total: float,
        desc: str,
        unit: str = "",
        file: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
        initial: float = 0,
    ):
        self.total, self.desc, self.unit = total, desc, unit
        self.file, self.now = file, now
        self.n = self.initial = initial
        self.postfix = ""
        self.last: tuple[float, str] | None = None  # what the last line said
        self.started = self.printed = now()
        self.open = True

    def update(self, done: float = 1) -> None:
        """Count what was done since."""
        self.n += done
        if self.now() - self.printed >= EVERY:
            self._print()

    def set_postfix(self, seen: Mapping[str, Any]) -> None:
        """Names and figures that the next line ends with."""
        self.postfix = ", ".join(f"{name} {value}" for name, value in seen.items())

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        """What the next line ends with."""
        self.postfix = text

    def close(self) -> None:
        """Print the last line."""
        if self.open and self.last != (self.n, self.postfix):
            self._print()
        self.open = False

    def _print(self) -> None:
        self.printed, self.last = self.now(), (self.n, self.postfix)
        seconds, share = self.printed - self.started, self.n / self.total if self.total else 1.0
        since = self.n - self.initial
        parts = [f"{share:.0%}" + (f" ({counted(self.n, self.unit)})" if self.unit else "")]
        parts.append(f"{tqdm.format_interval(seconds)} elapsed")
        if since > 0 and share < 1:
            left = seconds * (self.total - self.n) / since
            parts.append(f"{tqdm.format_interval(left)} left")
        parts += [self.postfix] if self.postfix else []
        print(f"{self.desc}: {', '.join(parts)}", file=self.file or sys.stderr, flush=True)


def progress_bar(
    total: float, desc: str, unit: str = "", disable: bool = False, initial: float = 0
) -> Any:
    """A bar of tqdm on stderr, or `Lines` where that is no terminal; silent where disabled.

    Without a `unit` it is over a share, and `total` is 1. What was done before, `initial`, took
    none of the time from which the time left is estimated.
    """
    if disable or sys.stderr.isatty():
        form: dict[str, Any] = {"unit": unit} if unit else {"bar_format": SHARE}
        return tqdm(total=total, desc=desc, disable=disable, initial=initial, **form)
    return Lines(total, desc, unit, initial=initial)


def with_progress(
    items: Collection[_Item], desc: str, unit: str, disable: bool = False
) -> Iterator[_Item]:
    """The items, one by one, under a `progress_bar`."""
    bar = progress_bar(len(items), desc, unit, disable)
    try:
        for item in items:
            yield item
            bar.update()
    finally:
        bar.close()
