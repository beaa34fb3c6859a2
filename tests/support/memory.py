"""How much memory a process has for itself, and the most that it had."""

from pathlib import Path


def own_megabytes() -> float:
    """What this process holds in memory that no file backs, in MB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line[:10] == "Anonymous:") * 1024 / 1e6


def reset_peak() -> int:
    """Forget the most memory that this process had; returns the bytes that it has."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """The most resident memory of this process since it began, or since `reset_peak`."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])
