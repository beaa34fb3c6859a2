"""Whether everything works on a GPU, within minutes: `python -m benchmarks.gpu.smoke`.

    python -m benchmarks.gpu.smoke [--device cuda] [--size full] [--group NAME …] [--jobs N]
                                   [--output FILE]

Each group runs in a process of its own, so that an error which ends one process's work on the GPU
costs the others nothing. Each item is one line of JSON, written as soon as it is known: `group`,
`item`, `ok`, `seconds`, and what was found; or where it is not ok, `error`, the last lines that it
came `at`, and the `log`. The status is 1 where an item is not ok. On the CPU it runs at toy size,
uncaptured, which shows that everything runs. Several groups at once (`--jobs`) are done sooner, and
then the times that they find mean little.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch

from headstart.terminal import one_line

from . import smoke_items
from .smoke_items import Items, Place
from .smoke_kept import kept
from .smoke_recurrent import recurrent
from .smoke_sampling import sampling
from .smoke_streamed import streamed

GROUPS: dict[str, Callable[[Place], Items]] = {
    "machine": smoke_items.about_machine,
    "kernels": smoke_items.kernels,
    "sampling": sampling,
    "identity": smoke_items.identity,
    **{
        f"{kind}-{way}": partial(smoke_items.families, kind, way == "coupled")
        for kind in smoke_items.TREES
        for way in ("greedy", "coupled")
    },
    "recurrent": recurrent,
    "lifetimes": smoke_items.lifetimes,
    "kept": kept,
    "fused": smoke_items.fused,
    "compile": smoke_items.compiled,
    "streamed": streamed,
    "costs": smoke_items.costs,
    "profile": smoke_items.profile,
}
"""In the order in which they run: what takes least and tells most comes first."""
_LIMIT = 240  # seconds that a group may take
_SHOWING = threading.Lock()  # groups that run at once show a line each in turn


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the groups; the status is 0 where every item is ok."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.smoke", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=("toy", "full"), help="(default: full on a GPU alone)")
    parser.add_argument("--group", choices=list(GROUPS), action="append", help="(default: all)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many groups at once")
    parser.add_argument("--output", type=Path, help="where the lines go as well")
    parser.add_argument("--here", action="store_true", help="in this process")
    chosen = parser.parse_args(arguments)
    if chosen.jobs < 1:
        parser.error(f"--jobs {chosen.jobs}: expected 1 or more")
    size = chosen.size or ("full" if chosen.device.startswith("cuda") else "toy")
    groups = chosen.group or list(GROUPS)
    if chosen.here:
        return max(run_group(name, Place(torch.device(chosen.device), size)) for name in groups)
    with open(chosen.output or os.devnull, "w", encoding="utf-8") as file:

        def run_apart(name: str) -> bool:
            line = [sys.executable, "-m", "benchmarks.gpu.smoke", "--here", "--group", name]
            line += ["--device", chosen.device, "--size", size]
            found, error = _apart(line, file)
            if error:
                found.append({"group": name, "item": "process", "ok": False, "error": error})
                _show(json.dumps(found[-1]), file)
            return all(each["ok"] for each in found)

        with ThreadPoolExecutor(chosen.jobs) as pool:
            whole = list(pool.map(run_apart, groups))
    return 0 if all(whole) else 1


def _show(line: str, file: TextIO | None) -> None:
    """Print a line, and write it to a file at once, so that what is known outlives the machine."""
    with _SHOWING:
        print(line, flush=True)
        if file is not None:
            print(line, file=file, flush=True)


def _apart(line: list[str], file: TextIO | None = None) -> tuple[list[dict[str, Any]], str]:
    """Run a group in another process, showing its lines as they come; and how it failed, if so."""
    found: list[dict[str, Any]] = []
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env={**os.environ}) as process:
        assert process.stdout is not None
        limit = threading.Timer(_LIMIT, _end, [process])  # one that hangs writes no line any more
        limit.start()
        for text in process.stdout:
            if text.startswith("{"):
                with suppress(json.JSONDecodeError):  # a process may end in the middle of a line
                    found.append(json.loads(text))
                    _show(text.rstrip("\n"), file)
        status = process.wait()
        late = limit.finished.is_set()
        limit.cancel()
    if late:
        return found, f"it took more than {_LIMIT} seconds"
    # Status 1 says that an item was not ok, which its line has said.
    bad = status not in (0, 1) or (status == 1 and all(each["ok"] for each in found))
    return found, f"its process ended with status {status}" if bad else ""


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and all that it has started: as long as one of these lives, its output has no
    end. Compilers have such processes."""
    with suppress(psutil.NoSuchProcess):
        whole = psutil.Process(process.pid)
        for each in (whole, *whole.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                each.kill()


class _Log(logging.Handler):
    """Keeps what was logged since it was last cleared: why something runs in a slower way."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def run_group(name: str, place: Place) -> int:
    """Run a group's items here, one after another; 1 where one was not ok."""
    status, log, ours = 0, _Log(), logging.getLogger("headstart")
    level = ours.level
    ours.addHandler(log)
    ours.setLevel(logging.INFO)
    for item, work in GROUPS[name](place):
        begun, line = time.perf_counter(), {"group": name, "item": item, "ok": True}
        log.told.clear()
        try:
            line |= work()
        except Exception as error:  # the others go on
            line |= {"ok": False, "error": f"{type(error).__name__}: {one_line(error)}"}
            frames = traceback.extract_tb(error.__traceback__)[-8:]
            line["at"] = [f"{frame.filename}:{frame.lineno}" for frame in frames]
            line["log"] = list(dict.fromkeys(log.told))[-8:]
            status = 1
        line["seconds"] = round(time.perf_counter() - begun, 2)
        print(json.dumps(line), flush=True)
    ours.removeHandler(log)
    ours.setLevel(level)
    return status


if __name__ == "__main__":
    sys.exit(main())
