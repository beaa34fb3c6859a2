"""What `headstart check` prints: rows with their loss mask, findings, and what the run needs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, TextIO

from rich.text import Text

from headstart.terminal import visible

from .tables import Report, grid, print_apart, titled

if TYPE_CHECKING:
    from headstart.train.checks.inspect import Inspection
    from headstart.train.checks.masks import ShownRow
    from headstart.train.recipe import Recipe

_SHOWN = 2  # rows
_CHARACTERS = 1200  # of each
_SIGNS = {True: "yes", False: "NO", None: "–"}


def print_inspection(recipe: Recipe, found: Inspection, out: TextIO) -> None:
    """Print all of it; supervised text is green on a terminal, and stands in ⟦ ⟧ anywhere."""
    console = titled(out, f"headstart check: {recipe.name}")
    for row in found.rows[:_SHOWN]:
        print_apart(console, _shown(row, found))
    if found.rows:
        print_apart(console, "in ⟦ ⟧: the labels, on which the drafter is trained", style="dim")
    rows = [(finding.name, f"{_SIGNS[finding.fine]}  {finding.said}") for finding in found.findings]
    print_apart(console, grid(rows), grid(_facts(recipe, found)))
    bad = [finding.name for finding in found.findings if finding.fine is False]
    if bad:
        print_apart(console, f"FAILED: {', '.join(bad)}", style="bold red")
    else:
        print_apart(console, "all checks passed", style="bold green")


def to_report(recipe: Recipe, found: Inspection) -> Report:
    """The same as plain data, without the rows."""
    return {
        "recipe": recipe.name,
        "fine": found.fine,
        "findings": [asdict(finding) for finding in found.findings],
        "counts": found.counts,
        "needs": asdict(found.needs),
        "pace": found.pace and asdict(found.pace) | {"hours": found.pace.hours},
    }


def _shown(row: ShownRow, found: Inspection) -> Text:
    """A row as text, cut where it is long, with its loss mask."""
    text = Text()
    for supervised, ids in row.spans():
        part = visible(found.tokenizer.decode(ids))
        room = _CHARACTERS - len(text)
        part = part if len(part) <= room else f"{part[: max(room, 0)]}…"
        text.append(f"⟦{part}⟧" if supervised else part, "green" if supervised else "dim")
        if len(text) >= _CHARACTERS:
            break
    return text


def _facts(recipe: Recipe, found: Inspection) -> list[tuple[str, str]]:
    """Counts, and what the run needs: each a label and a value."""
    from headstart.train.checks.needs import size

    plan, needs, pace = found.plan, found.needs, found.pace
    layers = list(plan.drafter.config.feature_layers)
    rows = [
        ("documents, held-out prompts", ", ".join(f"{n} {of}" for of, n in found.counts.items())),
        ("feature layers", ", ".join("final" if i < 0 else str(i) for i in layers) or "none"),
        ("drafter", f"{recipe.drafter.family}, {needs.drafter:,} parameters"),
        ("disk", f"{size(needs.disk)} at most"),
        ("memory", f"{size(needs.memory)} at least"),
    ]
    if pace is None:
        return rows
    features = ""
    if pace.features_s:
        features = f", with features that are computed once, in {_time(pace.features_s)}"
    return [
        *rows,
        ("memory of a training step", size(pace.peak)),
        ("the target writes", f"{pace.written_tokens_s:,.0f} tokens per second"),
        ("a training step", f"{1000 * pace.step_s:,.0f} ms{features}"),
        ("distillation, training", f"{_time(pace.distill_s)}, {_time(pace.train_s)}; one process"),
    ]


def _time(seconds: float) -> str:
    """Seconds, in the unit that suits them.

    >>> _time(40), _time(500), _time(9000)
    ('40 s', '8 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
