"""Measure speedups over plain decoding and generate.

headstart bench --drafter runs/my-model/heads --prompts prompts.jsonl --limit 20
headstart bench --target ORG/MODEL --drafter lookup --prompts prompts.jsonl --tree chain:7
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from headstart.terminal import UsageError, quiet_stdout, tell

from . import options as shared
from .options import positive

_MATRIX = "a YAML file that says what to measure; options override its keys"
_SEPARATELY = "measure each --drafter alone, rather than all of them decoding together"
_SIZE = "prompts or chats decoded at once (default: 1); several times to compare"
_AGAINST = (
    "methods of transformers to compare with, joined by commas: generate (default), assistant "
    "(generate with assistant_model), lookup (with prompt_lookup_num_tokens), or none"
)
_ASSISTANT = "the model for --against assistant (default: a draft model among the --drafter)"
_REPEATS = "decode each prompt N times with each method (default: 3)"
_ROOFLINE = "compare the time of a round with one read of the weights, and say what the rest is"
_REPORT = "where report.html, its pictures and results are written (default: runs/bench; or none)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="MATRIX", type=Path, nargs="?", help=_MATRIX)
    add("--matrix", metavar="MATRIX", type=Path, help="the same, as an option")
    shared.add_model_arguments(parser)
    add("--separately", action="store_true", help=_SEPARATELY)
    shared.add_prompt_arguments(parser, compare=True)
    shared.add_temperatures(parser)
    add("--batch-size", metavar="N", type=positive, action="append", help=_SIZE)
    add("--against", metavar="METHODS", help=_AGAINST)
    add("--assistant", metavar="MODEL", help=_ASSISTANT)
    add("--repeats", metavar="N", type=positive, help=_REPEATS)
    add("--roofline", action="store_true", default=None, help=_ROOFLINE)
    add("--report", metavar="DIR", default="runs/bench", help=_REPORT)
    shared.add_json_argument(parser)
    shared.add_drafting_arguments(parser, compare=True)
    shared.add_loading_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Measure every way in every cell, write the report, and print one table."""
    from headstart.matrix import read_matrix
    from headstart.measuring import check_matrix, measure, prepare
    from headstart.reports.comparison import print_comparison
    from headstart.reports.folders import check_folder
    from headstart.reports.measured import print_report
    from headstart.reports.tables import plain_console, print_apart

    if options.file and options.matrix and options.file != options.matrix:
        raise UsageError(f"found two files, {options.file} and {options.matrix}; give one")
    matrix = read_matrix(options.file or options.matrix, _given(options))
    folder = None if options.report == "none" else check_folder(Path(options.report))
    questions = check_matrix(matrix, options)  # before torch and any model are loaded
    from headstart.reports.bench_report import write_bench_report
    from headstart.train.processes.stopping import after_ctrl_c_it_goes_on

    with quiet_stdout():
        prepared = prepare(matrix, options, questions)
        tell(prepared.early)
        with after_ctrl_c_it_goes_on():
            measured = measure(prepared, matrix)
            page = folder and write_bench_report(measured, folder)
    title, notes = "headstart bench", measured.notes
    if len(measured.reports) == 1:
        report = measured.reports[0] | {"notes": notes}
        print_report(report, sys.stdout, title, options.json)
    else:
        print_comparison(measured.reports, sys.stdout, title, options.json, notes)
    if not options.json:
        print_apart(plain_console(sys.stdout), *notes)
        if page is not None:
            print(f"\nThe report is {page}")
    if not measured.whole:
        raise KeyboardInterrupt("interrupted; the figures are of what was measured before")
    return 0


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The matrix's keys that the command line gives."""
    names = {
        "target": "target", "tree": "trees", "rule": "rules", "expansion": "expansion",
        "temperature": "temperatures", "batch_size": "batch_sizes", "assistant": "assistant",
        "limit": "limit", "prefix_tokens": "prefix_tokens", "new_tokens": "new_tokens",
        "repeats": "repeats", "seed": "seed", "roofline": "roofline",
    }  # fmt: skip
    found = {key: getattr(options, name) for name, key in names.items()}
    if options.prompts is not None:
        found["prompts"] = str(options.prompts)
    if options.drafter:
        found["drafters"] = options.drafter if options.separately else [options.drafter]
    elif options.separately:
        raise UsageError("--separately without --drafter; name the drafters")
    if options.against is not None:
        each = [name.strip() for name in options.against.split(",")]
        found["against"] = [] if each == ["none"] else each
    return {key: value for key, value in found.items() if value is not None}
