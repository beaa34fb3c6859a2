"""Where the repository lies, and the data beside it that some machines have."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
"""Public models and data sets; tests that need them are skipped where it is missing."""

SPECULATORS = Path(
    os.environ.get("HEADSTART_SPECULATORS_PYTHON", ROOT / ".venv-speculators/bin/python")
)
"""An interpreter that has the speculators library; `.ci/speculators` makes it."""
