"""Triton's kernels in its interpreter, chosen for a whole process when they are imported."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

without_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def run_interpreted(module: str, *arguments: str) -> Any:
    """The JSON that a module prints last when it is run with interpreted kernels."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    out = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )
    if "only 0-dimensional arrays can be converted to Python scalars" in out.stderr:
        pytest.skip("this triton's interpreter cannot read scalars of this numpy")
    assert out.returncode == 0, out.stderr[-2000:]
    return json.loads(out.stdout.splitlines()[-1])
