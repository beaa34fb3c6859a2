"""Train a drafter further on recorded requests, and keep it if that is measured to help.

headstart adapt --drafter runs/my-model/heads --traffic traffic.jsonl
headstart adapt --drafter ORG/NAME --traffic 'logs/*.jsonl' --out runs/mine --rewrite
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from headstart.inputs import check_name, check_prompts
from headstart.terminal import quiet_stdout

from . import options as shared

_TRAFFIC = (
    "requests and answers, such as generate --record, chat --record or headstart.Recorder write, "
    "or any rows that a corpus reads; a file, a folder or a glob"
)
_TARGET = "another target than the drafter's own, such as a later version of it"
_OUT = "the folder of the run (default: the drafter's, with -adapted after its name)"
_REWRITE = "let the target answer the prompts anew: for answers of another model"

KEPT = shared.KEPT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--drafter", metavar="ARTIFACT", required=True, help=shared.ARTIFACT)
    add("--traffic", metavar="FILE", required=True, help=_TRAFFIC)
    add("--target", metavar="MODEL", help=_TARGET)
    add("--out", metavar="DIR", type=Path, help=_OUT)
    add("--rewrite", action="store_true", help=_REWRITE)
    shared.add_recipe_arguments(parser)
    shared.add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Print what was measured; the status is 1 where the drafter stays as it is."""
    check_name(options.drafter)
    check_prompts(options.traffic, "traffic", _TRAFFIC)
    if options.target is not None:
        check_name(options.target, "model")
    with quiet_stdout():
        from headstart.heads.artifacts.source import DrafterSource
        from headstart.train.adapt.composition import check_adaptable, compose
        from headstart.train.adapt.earlier import find_earlier
        from headstart.train.adapt.run import adapt
        from headstart.train.adapt.traffic import read_traffic

        source = DrafterSource.of(options.drafter)
        check_adaptable(source)
        traffic = read_traffic(options.traffic)
        if options.target is None and not options.rewrite:
            traffic.check_writer(source.manifest.target_fingerprint, source.manifest.target)
        earlier = find_earlier(source)
        how = options.target, options.out, options.rewrite, options.overrides
        recipe = compose(source, traffic, earlier, *how)
        found = adapt(recipe, source, traffic, earlier, options.fresh)
    from headstart.reports.adaptation import print_adaptation
    from headstart.reports.tables import to_json

    if options.json:
        print(to_json(found))
    else:
        print_adaptation(found, sys.stdout, f"headstart adapt: {source}")
    return 0 if found["kept"] else 1
