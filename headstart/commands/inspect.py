"""Show what a drafter is, and check its files.

headstart inspect runs/quickstart/heads --tree
headstart inspect runs/quickstart/heads --prompt 'import os' --round 2
"""

import argparse
import json
import sys

from headstart.inputs import check_decoding, check_name, load_target
from headstart.terminal import UsageError, blank, quiet_stdout

from . import options as shared

_TREE = "draw this tree, by default the artifact's own, with what a plan knows of its nodes"
_PROMPT = "replay one round after this text: what was drafted, what was accepted, and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("artifact", metavar="ARTIFACT", help=shared.ARTIFACT)
    add("--target", metavar="MODEL", help="also check that the drafter fits this model")
    shared.add_json_argument(parser)
    add("--trust-remote-code", action="store_true", help=shared.TRUST)
    add("--allow-pickle", action="store_true", help=shared.PICKLE)
    look = parser.add_argument_group("look at a tree, or at a round of decoding")
    add = look.add_argument
    add("--tree", metavar="TREE", nargs="?", const="", help=_TREE)
    add("--prompt", metavar="TEXT", type=shared.text, help=_PROMPT)
    add("--round", metavar="N", type=shared.positive, help="which round to replay (default: 1)")
    add("--rule", metavar="RULE", help=shared.RULE)
    add("--expansion", metavar="EXPANSION", help=shared.EXPANSION)
    shared.add_sampling_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Print the description; the status is 1 where it is damaged or does not fit --target."""
    check_name(options.artifact)
    _check_of_round(options)
    check_decoding(options.tree or None, options.rule, options.expansion)
    if options.prompt is not None:
        from headstart.show.inspected import print_round

        return print_round(options, shared.sampling(options))
    if options.tree is not None:
        from headstart.show.inspected import print_tree

        return print_tree(options.artifact, options.tree, options.json)
    from headstart.heads.artifacts.source import DrafterSource, SourceKind
    from headstart.reports.description import describe, fits, print_description
    from headstart.reports.tables import to_json

    source = DrafterSource(options.artifact, options.allow_pickle)
    if source.kind is SourceKind.CHECKPOINT:
        from headstart.reports import foreign

        look, check, show = foreign.describe_foreign, foreign.fits_foreign, foreign.print_foreign
    else:
        look, check, show = describe, fits, print_description
    found = look(source)
    if options.target is not None:
        with quiet_stdout():
            target = load_target(options)
            misfit = check(source, target.model, target.tokenizer)
            found |= {"fits": misfit is None, "misfit": misfit}
    found = blank(json.loads(to_json(found)))  # a recipe may hold an access token
    if options.json:
        print(to_json(found))
    else:
        show(found, sys.stdout)
    return 0 if found["problem"] is None and found.get("fits", True) else 1


def _check_of_round(options: argparse.Namespace) -> None:
    """Refuse options of a round where there is no prompt to decode."""
    given = ("round", "rule", "expansion", "temperature", "seed", "top_p", "top_k")
    default = options.parser.get_default
    unused = [name for name in given if getattr(options, name) != default(name)]
    if options.prompt is None and unused:
        flag = f"--{unused[0].replace('_', '-')}"
        raise UsageError(f"{flag} is for a round of decoding; give --prompt too, or leave it out")
