"""Test on your own models that the text is theirs."""

import argparse
import dataclasses
import sys

from headstart.models import load_speculator
from headstart.prompts import encode, read_documents
from headstart.terminal import quiet_stdout

from . import options as shared
from .options import positive, temperature


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    shared.add_model_arguments(parser)
    shared.add_prompt_arguments(parser)
    add("--draws", metavar="N", type=positive, default=4096, help="texts sampled (default: 4096)")
    add("--temperature", metavar="T", type=temperature, default=1.0, help="of the sampled texts")
    add("--seed", metavar="N", type=int, default=0)
    shared.add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Compare greedy text and sampled text; the status is 1 where one of them does not hold."""
    documents = read_documents(options)
    speculator = load_speculator(options)
    from headstart.infer.measure.lossless import compare_greedy, compare_sampled
    from headstart.reports.document import to_json
    from headstart.reports.verdict import print_verdict

    device = speculator.device
    prompts = [
        encode(document, speculator, options.prefix_tokens).to(device) for document in documents
    ]
    with quiet_stdout():
        greedy = compare_greedy(speculator, prompts, options.new_tokens, progress=True)
        sampled = compare_sampled(
            speculator,
            prompts,
            options.new_tokens,
            options.draws,
            temperature=options.temperature,
            seed=options.seed,
            progress=True,
        )
    if options.json:
        found = {"greedy": greedy, "sampled": sampled}
        print(to_json({k: {**dataclasses.asdict(v), "holds": v.holds} for k, v in found.items()}))
    else:
        print_verdict(greedy, sampled, sys.stdout)
    return 0 if greedy.holds and sampled.holds else 1
