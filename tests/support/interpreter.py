"""Triton's kernels in its interpreter, chosen for a whole process when they are imported.

One process imports the libraries, which takes longer than most kernels do, and is forked for each
module that is run.
"""

import atexit
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

without_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def run_interpreted(module: str, *arguments: str) -> Any:
    """The JSON that a module prints last when it is run with interpreted kernels."""
    process = _forked()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps([module, *arguments]) + "\n")
    process.stdin.flush()
    status, out, told = json.loads(process.stdout.readline())
    if "only 0-dimensional arrays can be converted to Python scalars" in told:
        pytest.skip("this triton's interpreter cannot read scalars of this numpy")
    assert status == 0, told[-2000:]
    return json.loads(out.splitlines()[-1])


@cache
def _forked() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    atexit.register(process.wait)
    atexit.register(process.stdin.close)  # which ends it, and is called first
    return process


def _run(module: str, *arguments: str) -> tuple[int, str, str]:
    """The status of a fork that runs the module, and what it has printed and told of errors."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as told:
        if (child := os.fork()) == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(told.fileno(), 2)
            status = 1
            try:
                sys.argv = [module, *arguments]
                runpy.run_module(module, run_name="__main__", alter_sys=True)
                status = 0
            except SystemExit as end:
                status = int(bool(end.code))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for file in (out, told):
            file.seek(0)
        return status, out.read(), told.read()


if __name__ == "__main__":
    for name in ("triton", "headstart.infer.speculator"):  # and with them what the modules import
        import_module(name)
    for line in sys.stdin:
        print(json.dumps(_run(*json.loads(line))), flush=True)
