"""List runs and their stages, or remove stages.

headstart runs
headstart runs quickstart --remove 'heads-*'
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from headstart.terminal import UsageError, blank

from . import options as shared

_OUTPUT = "where runs are (default: runs)"
_REMOVE = (
    "remove stages by the names of their folders, or patterns such as 'heads-*'; stages that the "
    "run uses now are kept"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", metavar="NAME", nargs="?", help="a run's name or folder (default: all runs)")
    add("--output", metavar="DIR", type=Path, default=Path("runs"), help=_OUTPUT)
    add("--remove", metavar="STAGE", nargs="+", help=_REMOVE)
    shared.add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Print the runs, or one run's stages; or remove some of them."""
    if not options.output.is_dir() and (options.name is None or not _stages(Path(options.name))):
        raise UsageError(f"--output {options.output}: no such folder; give the one that holds runs")
    if options.name is None:
        if options.remove:
            raise UsageError("--remove needs the run's name: headstart runs NAME --remove STAGE")
        folders = sorted(p for p in options.output.glob("*/") if _stages(p))
        found = [_run(folder) for folder in folders]
        title = f"runs in {options.output}" if found else f"no runs in {options.output}"
        columns = ("run", "last finished", "in use by"), ("stages", "current", "MB")
    else:
        folder = _folder(options)
        if options.remove:
            return _remove(folder, options.remove)
        found = [_stage(stage) for stage in _stages(folder)]
        title = f"stages in {folder}"
        columns = ("stage", "state", "made from", "finished"), ("MB", "seconds")
    if options.json:
        print(json.dumps(blank(found), indent=2, ensure_ascii=False))
    else:
        _print(title, columns, found)
    return 0


def _folder(options: argparse.Namespace) -> Path:
    for folder in (options.output / options.name, Path(options.name)):
        if _stages(folder):
            return folder
    known = ", ".join(sorted(p.name for p in options.output.glob("*/") if _stages(p))) or "none"
    raise UsageError(f"no run {options.name!r} in {options.output}; there are: {known}")


def _stages(folder: Path) -> list[Any]:
    from headstart.train.stages.folders import stage_folders

    return stage_folders(folder)


def _run(folder: Path) -> dict[str, Any]:
    from headstart.train.stages.lock import holder_of

    stages = _stages(folder)
    finished = [stage.record.get("finished", "") for stage in stages if stage.record]
    return {
        "run": folder.name,
        "stages": len(stages),
        "current": sum(stage.current for stage in stages),
        "MB": round(sum(stage.size() for stage in stages) / 1e6, 1),
        "last finished": max(finished, default=""),
        "in use by": holder_of(folder),
    }


def _stage(stage: Any) -> dict[str, Any]:
    record = stage.record or {}
    ids = {of.record["id"]: of.path.name for of in _stages(stage.path.parent) if of.record}
    reads = record.get("reads", {})
    return {
        "stage": stage.path.name,
        "state": "current" if stage.current else "kept" if record else "unfinished",
        "made from": [ids.get(reads[name], f"{name} of another run") for name in reads],
        "MB": round(stage.size() / 1e6, 1),
        "seconds": round(record["seconds"], 1) if record else "",
        "finished": record.get("finished", ""),
    }


def _remove(folder: Path, patterns: list[str]) -> int:
    from headstart.train.stages.folders import removable, remove
    from headstart.train.stages.lock import RunLock

    with RunLock(folder):
        for stage in removable(folder, patterns):
            size = stage.size() / 1e6
            remove(stage.path)
            print(f"removed {stage.path} ({size:.1f} MB)")
    return 0


def _print(
    title: str,
    columns: tuple[tuple[str, ...], tuple[str, ...]],
    rows: list[dict[str, Any]],
) -> None:
    from headstart.reports.tables import column_table, print_apart, titled

    names, figures = columns
    names = tuple(n for n in names if n != "in use by" or any(row[n] for row in rows))
    table = column_table(names, figures, gap=1)
    # What NAME and --remove take: other columns of text give way first, and no figure is cut.
    console = titled(sys.stdout, title)
    room = max(16, console.width - 36)
    table.columns[0].width = min(room, max((len(row[names[0]]) for row in rows), default=5))
    if console.width < 80:
        when = next(at for at, name in enumerate(names) if name.endswith("finished"))
        table.columns[when].width = len("2026-11-29")  # above its time
    for row in rows:
        table.add_row(*(_cell(row[column]) for column in (*names, *figures)))
    print_apart(console, table)


def _cell(value: Any) -> str:
    lines = value if isinstance(value, list) else [value]
    return "\n".join(blank(str(line)) for line in lines)
