"""Runs commands and records what they import, execute, start and connect to: `recorder.py JOB`.

JOB is a JSON file with `commands`, each the arguments of `headstart` or the source of a program as
one string, and `watched`, the folders whose files must not be executed, nor opened where they are
named `*.secret`. It is overwritten with a list: for each command its `status`, its `said`, and its
`events`, and at last the process's peak memory in KiB.
"""

import io
import json
import os
import resource
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

STARTED = (
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork",
    "os.forkpty", "pty.spawn", "webbrowser.open",
)  # fmt: skip
CONNECTED = (
    "socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto",
    "http.client.connect", "urllib.Request",
)  # fmt: skip

watched: tuple[str, ...] = ()
events: list[str] = []


def inside(path: Any) -> bool:
    try:
        return os.path.abspath(os.fsdecode(path)).startswith(watched)
    except (TypeError, ValueError):
        return False


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    """Keep the events that a hostile file could cause."""
    if not watched:
        return
    if event in STARTED or event in CONNECTED or event == "pickle.find_class":
        events.append(f"{event} {arguments!r:.200}")
    elif event in ("import", "ctypes.dlopen", "compile") and any(map(inside, arguments[:2])):
        events.append(f"{event} {arguments[:2]!r:.200}")
    elif event == "exec" and inside(getattr(arguments[0], "co_filename", None)):
        events.append(f"exec {arguments[0].co_filename}")
    elif event == "open" and inside(arguments[0]) and str(arguments[0]).endswith(".secret"):
        events.append(f"open {arguments[0]}")


def run(command: list[str] | str) -> dict[str, Any]:
    from headstart.cli import main

    said, known = io.StringIO(), set(sys.modules)
    events.clear()
    sys.stdin = io.StringIO("y\n" * 20)  # it agrees to everything
    with redirect_stdout(said), redirect_stderr(said):
        if isinstance(command, str):
            status: Any = exec(command, {}) or 0
        else:
            try:
                status = main(command)
            except Exception as error:
                status = f"{type(error).__name__}: {error}"
    for name in set(sys.modules) - known:
        if inside(getattr(sys.modules[name], "__file__", None)):
            events.append(f"module {name}")
    return {"status": status, "said": said.getvalue()[-1000:], "events": sorted(set(events))}


if __name__ == "__main__":
    import torch  # noqa: F401 - as it is imported, its build for CUDA starts ldconfig to find libdl

    job = json.loads(Path(sys.argv[1]).read_text())
    sys.addaudithook(hook)
    watched = tuple(job["watched"])
    found = [run(command) for command in job["commands"]]
    watched = ()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    Path(sys.argv[1]).write_text(json.dumps([*found, peak]))
