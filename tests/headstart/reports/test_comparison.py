"""The table of several runs, at 80 columns and without a terminal."""

import io

from headstart.reports.comparison import print_comparison
from tests.support.reports import REPORT, line


def test_the_comparison_has_a_line_for_each_run() -> None:
    slow = REPORT | {
        "tree": "sparse:" + "/".join("9" * 12),
        "rule": "coupled",
        "tau": 1.0,
        "identical_to_plain": False,
        "identical_to_generate": None,
    }
    out = io.StringIO()
    print_comparison([REPORT, slow], out, "headstart bench")
    text = out.getvalue()
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 80
    rows = [line.split() for line in text.splitlines()]
    assert ["cartesian:2,1,1", "greedy", "8", "2.50", "3.25", "1.50", "1.75", "yes"] in rows
    assert any(row[1:] == ["coupled", "8", "1.00", "3.25", "1.50", "1.75", "NO"] for row in rows)
    assert "The outputs differ" in text
    assert line(text, "prompts") == "24, 3,072 tokens"


def test_runs_that_differ_in_the_rule_alone_are_told_apart() -> None:
    """However much else is varied."""
    reports = [
        REPORT | {"drafter": "medusa", "batch_size": 1, "temperature": heat, "rule": rule}
        for heat, rule in ((0, "greedy"), (0.8, "coupled"), (0.8, "rejection"))
    ]
    out = io.StringIO()
    print_comparison([*reports, reports[0] | {"batch_size": 4}], out, "headstart bench")
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    rows = [line.split() for line in text.splitlines()]
    assert ["0.8", "1", "cartesian:2,1,1", "rejection", "2.50", "1.50", "1.75", "yes"] in rows
    out = io.StringIO()
    print_comparison([reports[0], reports[1] | {"batch_size": 4}], out, "headstart bench")
    assert "coupled" not in out.getvalue()  # the temperature says as much
