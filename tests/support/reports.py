"""A report of a measured run, and reading printed tables."""

from typing import Any

REPORT: dict[str, Any] = {
    "tau": 2.5,
    "tau_by_prompt": [2.0, 3.0],
    "acceptance_by_depth": [0.75, 0.5, float("nan")],
    "identical_to_plain": True,
    "identical_to_generate": True,
    "speedup_vs_plain": {"median": 1.5, "min": 1.25, "max": 2.0},
    "speedup_vs_generate": {"median": 1.75, "min": 1.5, "max": 2.25},
    "plain_ms_per_token": 2.0,
    "generate_ms_per_token": 2.5,
    "ms_per_round": 3.25,
    "loop_overhead_ms": 0.5,
    "nodes": 8,
    "tree": "cartesian:2,1,1",
    "tree_label": "cartesian:2,1,1",
    "rule": "greedy",
    "dtype": "float32",
    "prompts": 24,
    "tokens": 3072,
    "distinct_4grams": 0.75,
    "stage_seconds": {"corpus": 1.0, "target": 80.4, "distill": 40.0, "heads": 40.0, "bench": 20.0},
    "threads": 2,
    "artifact": "runs/quick start/heads",
}
"""Every key that a run of a recipe reports."""


def line(text: str, label: str) -> str:
    """The value beside a label of a printed table."""
    (found,) = [line for line in text.splitlines() if line.strip().startswith(label + "  ")]
    return " ".join(found.split()).removeprefix(label).strip()
