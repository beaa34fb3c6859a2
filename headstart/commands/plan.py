"""Find the tree that decodes fastest on this machine.

headstart plan --drafter runs/my-model/heads --prompts prompts.jsonl --limit 32
headstart plan --drafter runs/my-model/heads --prompts prompts.jsonl --batch-size 4 --temperature 1
"""

import argparse
import dataclasses
import os
import sys
from pathlib import Path

from headstart.inputs import load_with_room, read_documents
from headstart.long_prompts import prompts_of
from headstart.terminal import UsageError, quiet_stdout, tell

from . import options as shared
from .options import positive, temperature, whole

_NODES = "the largest tree considered (default: 64, or 768 with --max-memory)"
_REPORT = "where report.html and its pictures are written (default: runs/plan; or none)"
_TEMPERATURE = "plan for text that is sampled at T (default: 0, greedy)"
_MEASURE = "decode with the K best trees, and choose the fastest of them (default: 4)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--drafter", metavar="ARTIFACT", required=True, help=shared.ARTIFACT)
    add("--target", metavar="MODEL", help=shared.TARGET)
    shared.add_prompt_arguments(parser)
    add(
        "--batch-size",
        metavar="N",
        type=positive,
        default=1,
        help="prompts decoded at once (default: 1)",
    )
    add("--temperature", metavar="T", type=temperature, default=0.0, help=_TEMPERATURE)
    add("--max-nodes", metavar="N", type=shared.at_least_two, help=_NODES)
    add("--measure", metavar="K", type=whole, default=4, help=_MEASURE)
    add("--plot", metavar="FILE", type=Path, help="draw speedup against tree size (.png, .svg, …)")
    add("--report", metavar="DIR", default="runs/plan", help=_REPORT)
    shared.add_json_argument(parser)
    shared.add_loading_arguments(parser, pickles=False)


def run(options: argparse.Namespace) -> int:
    """Measure, choose, write the plan, and print what it is expected to be worth."""
    from headstart.reports.folders import check_folder
    from headstart.reports.plans import check_plot, draw_plan

    if options.plot is not None:
        check_plot(options.plot)
    page = None if options.report == "none" else check_folder(Path(options.report))
    documents = read_documents(options)
    from headstart.heads.artifacts.source import DrafterSource, SourceKind

    with quiet_stdout():
        source = options.drafter = DrafterSource(options.drafter)
        if source.kind is not SourceKind.ARTIFACT:
            other = "compare trees with headstart bench"
            if source.kind is SourceKind.CHECKPOINT:
                other = "make one of a checkpoint with headstart convert"
            raise UsageError(
                f"--drafter {source} is no artifact, and the plan is written into one; {other}"
            )
    if not os.access(folder := source.folder, os.W_OK):
        raise UsageError(f"{folder} cannot be written, and the plan belongs there; copy it first")
    options.tree = "plain"  # the drafter is needed, whatever an earlier plan says
    speculator = load_with_room(options, options.new_tokens)
    assert speculator.drafter is not None
    from headstart.heads.artifacts.plan import write_plan
    from headstart.infer.measure.planner import make_plan
    from headstart.reports.pages import write_plan_page
    from headstart.reports.plans import print_plan
    from headstart.reports.tables import to_json

    limit, new_tokens = options.prefix_tokens, options.new_tokens
    prompts, notes = prompts_of(documents, speculator, limit, new_tokens)
    tell(notes)
    with quiet_stdout():
        found = make_plan(
            speculator.model,
            speculator.drafter,
            prompts,
            batch_size=options.batch_size,
            temperature=options.temperature,
            max_nodes=options.max_nodes,
            new_tokens=options.new_tokens,
            measure=options.measure,
            compile=speculator.target.compile,
            progress=True,
        )
        written = write_plan(folder, found)
        if options.plot is not None:
            draw_plan(found, options.plot)
        page = page and write_plan_page(found, page)
    if options.json:
        print(to_json(dataclasses.asdict(found)))
    else:
        print_plan(found, sys.stdout)
        print(f"\nThe plan is in {written}")
        if page is not None:
            print(f"The report is {page}")
    return 0
