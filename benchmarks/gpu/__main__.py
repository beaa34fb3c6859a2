"""`python -m benchmarks.gpu`: what the runtime costs and is worth on one machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from headstart.cli import Parser, exit_status
from headstart.commands.options import add_json_argument
from headstart.terminal import quiet_stdout

from .job import PARTS, UNTIMED, make_job


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the status is 1 where an entry could not be measured, 2 on a mistake."""
    return exit_status("benchmarks.gpu", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    given = vars(_parser().parse_args(argv))
    as_json = given.pop("json")
    job = make_job(**given)
    from headstart.reports.tables import to_json

    from .report_table import print_suite
    from .suite import run_suite

    with quiet_stdout():
        report, whole = run_suite(job)
    if as_json:
        print(to_json(report))
    else:
        print_suite(report, sys.stdout)
    return 0 if whole else 1


def _parser() -> Parser:
    parser = Parser(prog="python -m benchmarks.gpu", description=__doc__)
    for name, dest, meaning in (
        ("--part", "parts", f"one of {', '.join(PARTS)}"),
        ("--family", "families", "one family of drafters"),
    ):
        several = f"{meaning}; several times for more (default: all)"
        parser.add_argument(name, metavar="NAME", action="append", dest=dest, help=several)
    parser.add_argument("--device", metavar="DEVICE", help="(default: a GPU if there is one)")
    sizes = ("toy", "short", "full")
    parser.add_argument("--size", choices=sizes, help="(default: full on a GPU, else toy)")
    parser.add_argument("--output", metavar="DIR", type=Path, help="(default: runs/suite-gpu)")
    parser.add_argument(
        "--trained", metavar="DIR", type=Path, help="trained before (default: trained, in --output)"
    )
    parser.add_argument("--corpus", metavar="FOLDER", help="the text that the target learns")
    parser.add_argument("--fresh", action="store_true", help="measure again what is there already")
    several = f"families at once on a GPU, in {', '.join(UNTIMED)} (default: 1)"
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help=several)
    parser.add_argument(
        "--here", action="store_true", help="no process for each family, which takes less time"
    )
    parser.add_argument(
        "--vocabulary", metavar="N", type=int,
        help="in the parts of costs, time the drafters that can be trimmed with N tokens, too",
    )  # fmt: skip
    add_json_argument(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
