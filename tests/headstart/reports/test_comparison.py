"""The table of several runs, at 80 columns and without a terminal."""

import io

import pytest

from headstart.reports.comparison import noise_notes, print_comparison
from headstart.reports.measured import print_report, rule_name
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
    assert line(out.getvalue(), "rule") == "greedy, coupled"  # the temperature says which
    assert line(out.getvalue(), "dtype") == "float32"


def test_a_long_rule_is_told_below_the_table() -> None:
    """And in it, where runs differ in the expansion alone."""
    reports = [
        REPORT | {"drafter": "medusa", "batch_size": size, "temperature": 0.8, "rule": rule}
        for size, rule in ((1, "coupled"), (1, "rejection"), (4, "coupled"), (4, "rejection"))
    ]
    reports = [
        report
        | {"expansion": "without_replacement", "speedup_vs_lookup": REPORT["speedup_vs_plain"]}
        for report in reports
    ]
    out = io.StringIO()
    print_comparison([*reports, REPORT | {"drafter": "lookup", "temperature": 0}], out, "bench")
    rows = [line.split() for line in out.getvalue().splitlines()]
    assert sum("rejection" in row and "cartesian:2,1,1" in row for row in rows) == 2
    assert "rejection (without_replacement)" in line(out.getvalue(), "rule")
    out = io.StringIO()
    print_comparison([*reports, reports[1] | {"expansion": "topk"}], out, "bench")
    assert "(topk)" in out.getvalue() and "\n  rule " not in out.getvalue()


def test_nothing_is_left_out_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    reports = [
        REPORT | {"drafter": "medusa", "batch_size": size, "temperature": heat}
        for size, heat in ((1, 0.0), (4, 0.8))
    ]
    out = io.StringIO()
    print_comparison(reports, out, "headstart bench")
    rows = [line.split() for line in out.getvalue().splitlines()]
    assert [
        "0",
        "1",
        "cartesian:2,1,1",
        "greedy",
        "8",
        "2.50",
        "3.25",
        "1.50",
        "1.75",
        "yes",
    ] in rows


def test_a_way_that_only_some_runs_were_compared_with_has_its_column() -> None:
    """Prompt lookup of transformers takes one prompt at a time."""
    batch = REPORT | {"batch_size": 4}
    alone = REPORT | {"batch_size": 1, "speedup_vs_lookup": {"median": 1.25}}
    out = io.StringIO()
    print_comparison([batch, alone], out, "headstart bench")
    rows = [line.split() for line in out.getvalue().splitlines()]
    assert ["batch", "tree", "τ", "×", "plain", "×", "gen.", "×", "lookup", "same"] in rows
    assert ["1", "cartesian:2,1,1", "2.50", "1.50", "1.75", "1.25", "yes"] in rows
    assert line(out.getvalue(), "dtype") == "float32"


def test_what_is_within_noise_is_named_with_its_request() -> None:
    unsure = {"median": 1.0, "low": 0.9, "high": 1.1, "within_noise": True}
    few = {"median": 1.5, "low": None, "high": None, "within_noise": None}
    alone = REPORT | {"way": "medusa", "batch_size": 1, "temperature": 0}
    warm = alone | {"temperature": 0.8, "speedup_vs_plain": unsure}
    sure = {"within_noise": False}
    alone |= {"speedup_vs_plain": few, "speedup_vs_generate": sure}
    warm |= {"speedup_vs_generate": sure}
    assert noise_notes([alone | {"batch_size": 4}, warm]) == [
        "Fewer than 6 batches of 4: too few to tell a speedup from noise.",
        "Within noise (the 95% interval of the median speedup contains 1): no difference is shown "
        "between medusa, T 0.8, batch 1 and plain decoding.",
    ]


@pytest.mark.parametrize(
    ("rule", "expansion", "said"),
    [
        ("rejection", "without_replacement", "rejection (without_replacement)"),
        ("match", "topk", "match (topk)"),
        ("coupled", "coupled", "coupled"),  # which takes no other
        ("greedy", "topk", "greedy"),
        ("rejection", None, "rejection"),  # a report from before it was noted
    ],
)
def test_the_expansion_is_told_where_the_rule_leaves_a_choice(
    rule: str, expansion: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = REPORT | {"rule": rule, "expansion": expansion}
    out = io.StringIO()
    print_report(report, out, "headstart bench")
    assert line(out.getvalue(), "rule, dtype") == f"{said}, float32"
    assert rule_name(report) == said
    out = io.StringIO()
    print_comparison([report, report], out, "headstart bench")
    assert max(map(len, out.getvalue().splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "120")
    out = io.StringIO()
    print_comparison([report, report], out, "headstart bench")
    assert f"  {said}  " in out.getvalue()
