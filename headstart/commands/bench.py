"""Measure against plain decoding and generate.

headstart bench --drafter runs/my-model/heads --prompts prompts.jsonl --limit 20
headstart bench --target ORG/MODEL --drafter lookup --prompts prompts.jsonl --tree chain:7
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headstart.inputs import check_new_tokens, encode, load_speculator, read_documents
from headstart.terminal import UsageError, quiet_stdout

from . import options as shared

if TYPE_CHECKING:
    from headstart.infer import Speculator


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_model_arguments(parser, compare=True)
    shared.add_prompt_arguments(parser)
    shared.add_sampling_arguments(parser)
    shared.add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Measure every pair of a tree and a rule, and print one table."""
    documents = read_documents(options)
    loaded = load_speculator(options)
    check_new_tokens(loaded, options.new_tokens)
    from headstart.infer.measure.bench import bench as measure
    from headstart.infer.rules.registry import find_rule
    from headstart.reports.comparison import print_comparison
    from headstart.reports.measured import print_report

    for speculator in _speculators(loaded, options):  # mistakes show before any measurement
        if options.temperature > 0 and not find_rule(speculator.rule).samples:
            raise UsageError(
                f"--rule {speculator.rule} with --temperature above 0; use one that samples, such "
                "as coupled"
            )
    prompts = [encode(document, loaded, options.prefix_tokens) for document in documents]
    sampling = {"temperature": options.temperature, "seed": options.seed or 0}
    with quiet_stdout():
        reports = [
            measure(speculator, prompts, new_tokens=options.new_tokens, **sampling)
            for speculator in _speculators(loaded, options)
        ]
    if len(reports) == 1:
        print_report(reports[0], sys.stdout, "headstart bench", options.json)
    else:
        print_comparison(reports, sys.stdout, "headstart bench", options.json)
    return 0


def _speculators(loaded: Speculator, options: argparse.Namespace) -> Iterator[Speculator]:
    """The loaded models with each pair of --tree and --rule, tree by tree."""
    from headstart.infer import Speculator

    for tree, rule in itertools.product(options.tree or [loaded.tree], options.rule or [None]):
        ways: dict[str, Any] = {"tree": tree, "rule": rule, "expansion": options.expansion}
        yield Speculator(loaded.model, loaded.drafter, tokenizer=loaded.tokenizer, **ways)
