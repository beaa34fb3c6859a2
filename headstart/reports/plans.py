"""A plan for people: the table of candidates, and what is expected in plain words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TextIO

from .console import column_table, grid, titled

if TYPE_CHECKING:
    from headstart.heads.artifacts.plan import Plan

_SHOWN = 12  # candidates in the table


def print_plan(plan: Plan, out: TextIO, title: str = "headstart plan") -> None:
    """Print candidates, costs and the choice: colours on a terminal, plain text anywhere else."""
    console = titled(out, title)
    console.print()
    figures = ("nodes", "depth", "τ", "ms/round", "× plain", "measured")
    table = column_table(("tree",), figures)
    for candidate in plan.candidates[:_SHOWN]:
        chosen = candidate["name"] == plan.policy
        table.add_row(*_row(candidate), style="bold green" if chosen else None)
    console.print(table)
    if more := len(plan.candidates) - _SHOWN:
        console.print(f"  … and {more} slower ones" if more > 0 else "", style="dim")
    console.print()
    console.print(grid(_cost_rows(plan)))
    for sentence in sentences(plan):
        console.print()
        console.print(sentence)


def sentences(plan: Plan) -> list[str]:
    """What the plan expects, and what that holds for."""
    where = f"On this machine ({plan.device}, {plan.dtype}, {at_once(plan.batch_size)})"
    best = plan.candidates[0]
    fast = _times(best)
    if plan.tree:
        said = (
            f"{where}, {plan.policy} decodes fastest: it is expected to write {plan.tau:.2f} "
            f"tokens a round and to decode {fast} as fast as plain decoding."
        )
    else:
        said = (
            f"{where}, nothing pays: the best tree, {best['name']}, decodes {fast} as fast as "
            "plain decoding. The plan is to decode plainly."
        )
    return [
        said,
        f"It holds for text like these {plan.prompts} prompts, written greedily: the ranks were "
        "recorded on greedy text, and at a temperature above 0 fewer drafted tokens are right.",
    ]


def _row(candidate: dict[str, Any]) -> list[str]:
    measured = candidate["measured_speedup"]
    return [
        candidate["name"],
        str(candidate["nodes"]),
        str(candidate["depth"]),
        f"{candidate['tau']:.2f}",
        f"{candidate['round_ms']:.2f}",
        f"{candidate['speedup']:.2f}",
        "–" if measured is None else f"{measured:.2f}",
    ]


def _cost_rows(plan: Plan) -> list[tuple[str, str]]:
    costs = plan.costs
    rows = [
        ("a plain round", f"{costs['plain']:.2f} ms"),
        ("verifying n nodes", _by_size(costs["verify"])),
        ("drafting: begin", f"{costs['begin']:.2f} ms"),
    ]
    if costs["extend"]:
        rows.append(("drafting: a level of n nodes", _by_size(costs["extend"])))
    rows.append(("prompts, new tokens", f"{plan.prompts}, {plan.new_tokens} each"))
    return rows


def _by_size(costs: dict[Any, float]) -> str:
    shown = [size for size in costs if int(size).bit_count() == 1]  # powers of two
    return "  ".join(f"{size}: {costs[size]:.2f}" for size in shown) + " ms"


def _times(candidate: dict[str, Any]) -> str:
    """How many times as fast, in words; the measured figure where there is one.

    >>> _times({"speedup": 2.5, "measured_speedup": None})
    '2.50 times'
    >>> _times({"speedup": 2.5, "measured_speedup": 2.4})
    '2.50 times (measured: 2.40 times)'
    """
    measured = candidate["measured_speedup"]
    real = "" if measured is None else f" (measured: {measured:.2f} times)"
    return f"{candidate['speedup']:.2f} times{real}"


def at_once(batch_size: int) -> str:
    """How many prompts are decoded together, in words."""
    return "one prompt at a time" if batch_size == 1 else f"{batch_size} prompts at a time"
