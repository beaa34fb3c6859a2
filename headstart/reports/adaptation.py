"""What `headstart adapt` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

from headstart.heads.core import counted

from .tables import column_table, print_apart, titled


def print_adaptation(found: Mapping[str, Any], out: TextIO, title: str) -> None:
    """Print τ before and after, and whether the new drafter was kept."""
    table = column_table(("held-out prompts of",), ("prompts", "τ before", "τ after", "gain"))
    measured = {"the traffic": found, "the text it learnt from": found["earlier"]}
    for name, of in measured.items():
        if of is not None:
            before, after = of["tau"]
            table.add_row(name, str(of["prompts"]), f"{before:.2f}", f"{after:.2f}", _gain(of))
    print_apart(titled(out, title), table)
    warm = found["sampling"]["temperature"]
    print(
        f"{counted(found['requests'], 'request')}, {counted(found['supervised'], 'token')} of "
        f"answers trained on, {counted(found['earlier_rows'], 'earlier row')}; temperature "
        f"{warm:g}.",
        file=out,
    )
    print(file=out)
    if found["kept"]:
        print(f"It paid: the adapted drafter is in {found['artifact']}", file=out)
    else:
        print(
            "It did not pay: τ of the traffic does not rise by more than two standard errors. "
            "The drafter stays as it is.",
            file=out,
        )


def _gain(of: Mapping[str, Any]) -> str:
    """The gain with its standard error."""
    gain, error = of["gain"]["tau"], of["gain"]["se"]
    return f"{gain:+.2f}" + (f" ± {error:.2f}" if error is not None else "")
