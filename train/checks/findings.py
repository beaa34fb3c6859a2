"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    fine: bool | None  # None where it cannot be judged on these texts
    said: str  # figures, and what to do about it where it is not fine
