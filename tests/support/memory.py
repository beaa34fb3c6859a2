"""How much memory a process has for itself."""

from collections.abc import Iterable
from pathlib import Path


def own_megabytes(processes: Iterable[int | str] = ("self",)) -> float:
    """What processes hold in memory that no file backs, in MB; pages they share count for each."""
    found = 0
    for process in processes:
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Anonymous:"):
                found += int(line.split()[1])
    return found * 1024 / 1e6
