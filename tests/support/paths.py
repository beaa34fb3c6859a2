"""Where the repository lies, and the data beside it that some machines have."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
"""Public models and data sets; tests that need them are skipped where it is missing."""
