"""How much memory a process has for itself, and the most that it had."""

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


def reset_peak() -> int:
    """Forget the most memory that this process had; returns the bytes that it has."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """The most resident memory of this process since it began, or since `reset_peak`."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])
