"""The shipped recipes, and what those composed of parts take; every such figure is an estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TextIO

from headstart.terminal import UsageError
from headstart.train.recipe import (
    load_recipe,
    shipped_combinations,
    shipped_parts,
    shipped_recipes,
)
from headstart.train.recipe.fields import nearest
from headstart.train.recipe.files import KINDS, first_line

from .tables import column_table, grid, plain_console, print_apart, titled

_ASSUMED = {
    "training": ("training", "{:.0%} of the GPU's peak"),
    "writing": ("writing", "{:.0%} of its bandwidth and peak"),
    "quantized": ("a 4-bit forward", "{:g} times as long"),
    "answers": ("answers", "{:.0%} of distill.new_tokens"),
    "prompts": ("prompts", "{:.0%} of distill.prefix_tokens"),
    "context_gb": ("libraries", "{:g} GB of memory"),
    "slack": ("allocator", "{:.0%} more memory than in use"),
}
"""What each of the `Assumptions` of an estimate means, and its figure with the unit."""

_NOTE = (
    "Estimates by arithmetic, nothing was measured: GB of each GPU's memory at most, GB of disk, "
    "hours until the target has written the text and the drafter is trained."
)


_COMPOSED = (
    "A recipe for a real model is FAMILY+MODEL+HARDWARE. `headstart recipes PART…` estimates the "
    "memory, disk and hours of those with these parts."
)


def describe_recipes(chosen: Sequence[str], estimated: bool = True) -> dict[str, Any]:
    """With nothing chosen, the recipes and parts by name; of a whole recipe its file.

    Where `estimated`, which imports torch, the estimates of the combinations that have all of
    `chosen`; of a whole recipe those with the part of its name, if there is one.

    Raises:
        UsageError: a name that is not shipped.
    """
    parts, whole = shipped_parts(), shipped_recipes()
    found: dict[str, Any] = {}
    if len(chosen) == 1 and chosen[0] in whole:
        path = whole[chosen[0]]
        found = {"recipe": str(path), "text": path.read_text(encoding="utf-8")}
        if chosen[0] not in parts:
            return found
    for name in chosen:
        if name in parts:
            continue
        if name in whole:
            raise UsageError(
                f"{name!r} is a whole recipe and no part of others; give it alone, or some of "
                f"{', '.join(parts)}"
            )
        near = nearest(name, [*parts, *whole])
        raise UsageError(f"no part {name!r}{near}; expected some of {', '.join(parts)}")
    if estimated:
        names = [name for name in shipped_combinations() if {*chosen} <= {*name.split("+")}]
        if chosen and not names:
            raise UsageError(
                f"no recipe has all of {', '.join(chosen)}; a recipe has one family, one model and "
                "one hardware: give at most one of each"
            )
        found["estimates"] = _estimates(names)
    if not chosen:
        found["recipes"] = {name: first_line(path) for name, path in whole.items()}
        found["parts"] = {
            kind: {p.name: first_line(p.path) for p in parts.values() if p.kind == kind}
            for kind in KINDS
        }
    return found


def _estimates(names: Sequence[str]) -> dict[str, Any]:
    from headstart.train.estimate import estimate, meta_target

    targets: dict[str, Any] = {}
    found = {}
    for name in names:
        recipe = load_recipe(name)
        model = str(recipe.target.model)
        if model not in targets:
            targets[model] = meta_target(recipe)
        assert recipe.hardware is not None
        known = {"launch": recipe.hardware.launch, "gpus": recipe.hardware.gpus}
        found[name] = known | asdict(estimate(recipe, targets[model]))
    return found


def print_recipes(found: dict[str, Any], out: TextIO) -> None:
    """Print the tables; of a single combination all of its figures, of a recipe first its file."""
    if "recipe" in found:
        print(f"# {found['recipe']}\n{found['text']}", end="", file=out)
    estimates = found.get("estimates")
    if estimates and len(estimates) == 1:
        ((name, of),) = estimates.items()
        _print_one(name, of, out)
        return
    lists = {"whole recipes": found.get("recipes"), **found.get("parts", {})}
    for title, entries in lists.items():
        if entries:
            table = column_table(("name", "what"), ())
            for name, what in entries.items():
                table.add_row(name, what)
            print_apart(titled(out, title), table)
    if estimates is not None:
        _print_several(estimates, out)
    elif "parts" in found:
        print_apart(plain_console(out), _COMPOSED, style="dim")


def _print_several(estimates: dict[str, Any], out: TextIO) -> None:
    figures = ("drafter", "memory", "disk", "text", "training")
    table = column_table(("estimate for",), figures, gap=1)
    for name, of in estimates.items():
        hours = of["hours"]
        table.add_row(
            name, f"{of['parameters']['drafter'] / 1e6:,.0f} M", _gb(of["memory"]["peak"]),
            _gb(sum(of["disk"].values())), _hours(hours["writing"]), _hours(hours["training"]),
        )  # fmt: skip
    console = titled(out, "recipes of a family, a model and hardware")
    print_apart(console, table)
    print_apart(console, _NOTE, style="dim")


def _print_one(name: str, of: dict[str, Any], out: TextIO) -> None:
    console = titled(out, f"{name}: estimates by arithmetic, nothing was measured")
    millions = ", ".join(f"{what} {count / 1e6:,.0f} M" for what, count in of["parameters"].items())
    memory = {what: _gb(value) for what, value in of["memory"].items()}
    rows = [
        ("parameters", millions),
        *((f"memory: {what}", value) for what, value in memory.items()),
        *((f"disk: {what}", _gb(value)) for what, value in of["disk"].items()),
        *((f"time: {what}", _hours(value)) for what, value in of["hours"].items()),
        *(
            (f"assumed: {_ASSUMED[key][0]}", _ASSUMED[key][1].format(value))
            for key, value in of["assumed"].items()
        ),
    ]
    print_apart(console, grid(rows))
    run = f"{name} corpus.source=PROMPTS.jsonl"
    line = f"headstart train {run}"
    if of["launch"]:
        line = (
            f"accelerate launch --config_file $(headstart launch-file {of['launch']}) "
            f"--num_processes {of['gpus']} -m headstart.train {run}"
        )
    print(f"\nTo run:\n  {line}", file=out)


def _gb(value: float) -> str:
    return f"{value:.1f} GB"


def _hours(value: float) -> str:
    """A time in few characters.

    >>> [_hours(h) for h in (0, 0.004, 0.5, 30.2)]
    ['–', '1 min', '30 min', '30.2 h']
    """
    if not value:
        return "–"
    return f"{value:.1f} h" if value >= 1 else f"{max(round(value * 60), 1)} min"
