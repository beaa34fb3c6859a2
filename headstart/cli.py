"""The command line: `headstart quickstart | train | generate | bench | plan |
verify-lossless | convert | inspect | push`.

Results go to stdout; progress, statistics and errors go to stderr. Nothing heavy is imported until
a command runs, so `--help` answers at once. A mistake of the user's ends with one line and exit
status 2; set HEADSTART_DEBUG=1 to see its traceback.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from headstart import __version__, commands
from headstart.inputs import UsageError, one_line

_OVERRIDES = "settings of the recipe, e.g. train.max_seconds=30 (values are read as YAML)"
_TREE = (
    "chain:K, cartesian:A,B,…, best-first:NODES,WIDTH,DEPTH, beam:WIDTH,LENGTH or a JSON file of "
    "rank paths; with several drafters one for each, joined by + (default: the artifact's plan or "
    "tree)"
)
_RULE = (
    "greedy, match, coupled, rejection, block, traversal or typical, which is approximate "
    "(default: greedy, or coupled when sampling)"
)
_EXPANSION = (
    "topk, coupled, with_replacement or without_replacement (default: what the rule is best with)"
)
_SEVERAL = "; several times to compare"
_SEVERAL_PARTS = ", several times for more (default: all)"
_OF_ALL = " of drafters" + _SEVERAL_PARTS
_TARGET = "the model to make faster: a folder or a Hub name (default: the artifact's own)"
_FAMILY = "medusa, redrafter, draft_model, lookup, …, or all: each of them on one target, compared"
_DTYPE = "float32, bfloat16, … (default: as saved)"
_DEVICE = "cpu, cuda, cuda:1, … (default: a GPU if there is one)"
_MEMORY = (
    "for a target that does not fit: so much of its weights is kept on each device, and the rest "
    "is streamed in from CPU memory, then disk; e.g. 0=20GB,cpu=100GB, or cpu=8GB without a GPU"
)
_FOLDER = (
    "where weights are written that --max-memory leaves to the disk and that are not read from the "
    "target's own safetensors"
)
_ARTIFACT = "a folder, or ORG/NAME or ORG/NAME@REVISION on the Hub"
_DRAFTER = _ARTIFACT + "; or another's checkpoint; or a smaller model; or lookup"
_PICKLE = "read the tensors alone of a drafter's file that is a pickle"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 2 on a mistake, 130 on Ctrl-C.

    argv: the arguments after the program's name; None takes them from the process.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without τ gets a ?, no traceback
            stream.reconfigure(errors="replace")
    try:
        options = _parse(argv)
        status = options.run(options)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return _fail("interrupted; finished stages are kept", 130)
    except BrokenPipeError:
        # The reader has gone; without this the interpreter's last flush would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        if os.environ.get("HEADSTART_DEBUG") == "1":
            raise
        return _fail(f"error: {one_line(error)}", 2)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; each command's function is its `run`."""
    parser = _Parser(
        prog="headstart",
        description="Train draft heads for a causal language model and decode with them faster, "
        "with the same output.",
    )
    parser.add_argument("--version", action="version", version=f"headstart {__version__}")
    table = parser.add_subparsers(metavar="COMMAND", required=True)

    quickstart = _command(
        table, "quickstart", commands.quickstart, "train a small drafter and measure"
    )
    which = quickstart.add_mutually_exclusive_group()
    which.add_argument("--recipe", help="a path or a shipped name (default: quickstart)")
    which.add_argument("--drafter", metavar="NAME", help=_FAMILY)
    _recipe_options(quickstart)
    _json_option(quickstart)

    train = _command(table, "train", commands.train, "train the drafter that a recipe describes")
    train.add_argument("recipe", metavar="RECIPE", help="a path or a shipped name")
    _recipe_options(train)

    generate = _command(
        table, "generate", commands.generate, "continue a prompt, streamed to stdout"
    )
    _model_options(generate)
    text = generate.add_mutually_exclusive_group()
    text.add_argument("--prompt", metavar="TEXT", help="the text to continue (default: stdin)")
    text.add_argument("--file", metavar="FILE", type=Path, help="read the prompt from a file")
    generate.add_argument("--max-new-tokens", metavar="N", type=_positive, default=128)
    generate.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a user's message, and goes through the tokenizer's chat template; a "
        ".jsonl FILE holds one conversation (messages or turns)",
    )
    _sampling_options(generate)
    generate.add_argument("--top-p", metavar="P", type=_share, help="nucleus sampling")
    generate.add_argument("--top-k", metavar="K", type=_positive, help="sample from the K best")

    bench = _command(table, "bench", commands.bench, "measure against plain decoding and generate")
    _model_options(bench, several=True)
    _prompt_options(bench, required=False)
    _sampling_options(bench)
    _json_option(bench)
    _suite_options(bench)

    plan = _command(
        table, "plan", commands.plan, "choose the tree that decodes fastest on this machine"
    )
    plan.add_argument("--target", metavar="MODEL", help=_TARGET)
    plan.add_argument("--drafter", metavar="ARTIFACT", required=True, help=_ARTIFACT)
    _placing_options(plan)
    _prompt_options(plan)
    plan.add_argument(
        "--batch-size", metavar="N", type=_positive, default=1, help="prompts decoded at once"
    )
    plan.add_argument(
        "--max-nodes",
        metavar="N",
        type=_positive,
        help="the largest tree considered (default: 64, or 768 with --max-memory)",
    )
    plan.add_argument(
        "--measure",
        metavar="K",
        type=_whole,
        default=4,
        help="decode with the K best, and let that decide (default: 4)",
    )
    plan.add_argument(
        "--plot", metavar="FILE", type=Path, help="draw speedup against tree size (.png, .svg, …)"
    )
    _json_option(plan)

    verify = _command(
        table, "verify-lossless", commands.verify, "test on your own models that the text is theirs"
    )
    _model_options(verify)
    _prompt_options(verify)
    verify.add_argument(
        "--draws", metavar="N", type=_positive, default=4096, help="texts sampled (default: 4096)"
    )
    verify.add_argument(
        "--temperature", metavar="T", type=_temperature, default=1.0, help="of the sampled texts"
    )
    verify.add_argument("--seed", metavar="N", type=int, default=0)
    _json_option(verify)

    convert = _command(
        table, "convert", commands.convert, "make an artifact of another's checkpoint of a drafter"
    )
    convert.add_argument("checkpoint", metavar="CHECKPOINT", help=_ARTIFACT)
    convert.add_argument("folder", metavar="FOLDER", help="where to write the artifact")
    convert.add_argument(
        "--target", metavar="MODEL", required=True, help="the model that it was trained for"
    )
    convert.add_argument("--allow-pickle", action="store_true", help=_PICKLE)

    inspect = _command(table, "inspect", commands.inspect, "show what an artifact is, and check it")
    inspect.add_argument("artifact", metavar="ARTIFACT", help=_ARTIFACT)
    inspect.add_argument("--target", metavar="MODEL", help="load this model: does it fit?")
    _json_option(inspect)

    push = _command(table, "push", commands.push, "publish an artifact on the Hub")
    push.add_argument("artifact", metavar="ARTIFACT", help=_ARTIFACT)
    push.add_argument("repository", metavar="ORG/NAME", help="made where it is missing")
    push.add_argument(
        "--target-name",
        metavar="NAME",
        help="what to call the target: its Hub name, or a label where it has none (needed when it "
        "was trained from a folder)",
    )
    push.add_argument("--license", metavar="ID", help="for the model card, e.g. apache-2.0")
    push.add_argument("--private", action="store_true", help="if the repository is new")
    push.add_argument("--revision", metavar="BRANCH", help="push to a branch (default: main)")
    push.add_argument(
        "--dry-run", action="store_true", help="list files, sizes and card; no network"
    )
    return parser


class _Parser(argparse.ArgumentParser):
    """Reports a mistake as every other error is reported: on one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    # Overrides may stand anywhere, which argparse cannot express: it fills an optional list of
    # positionals once, at the first gap between options.
    options, rest = build_parser().parse_known_args(argv)
    if not hasattr(options, "overrides"):
        if rest:  # not repeated: it may be the prompt
            raise UsageError(f"arguments too many: {len(rest)}; a prompt is given with --prompt")
        return options
    for word in rest:
        if word.startswith("-") or "=" not in word:
            raise UsageError(f"unknown argument {word!r}; an override has the form a.b=value")
    options.overrides += rest
    return options


def _command(
    table: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str
) -> argparse.ArgumentParser:
    parser = table.add_parser(name, help=summary, description=f"{summary.capitalize()}.")
    parser.set_defaults(run=run)
    return parser


def _recipe_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", metavar="a.b=value", nargs="*", default=[], help=_OVERRIDES)
    parser.add_argument("--fresh", action="store_true", help="redo stages that are finished")


def _model_options(parser: argparse.ArgumentParser, several: bool = False) -> None:
    parser.add_argument("--target", metavar="MODEL", help=_TARGET)
    parser.add_argument(
        "--drafter",
        metavar="ARTIFACT",
        action="append",
        help=f"{_DRAFTER}; several times to decode with all of them together (default: none, plain "
        "decoding)",
    )
    parser.add_argument("--allow-pickle", action="store_true", help=_PICKLE)
    action, more = ("append", _SEVERAL) if several else ("store", "")
    parser.add_argument("--tree", metavar="TREE", action=action, help=_TREE + more)
    parser.add_argument("--rule", metavar="RULE", action=action, help=_RULE + more)
    parser.add_argument("--expansion", metavar="EXPANSION", help=_EXPANSION)
    _placing_options(parser)


def _placing_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", metavar="DTYPE", help=_DTYPE)
    parser.add_argument("--device", metavar="DEVICE", help=_DEVICE)
    parser.add_argument("--max-memory", metavar="DEVICE=SIZE,…", type=_memory, help=_MEMORY)
    parser.add_argument("--offload-folder", metavar="DIR", type=Path, help=_FOLDER)


def _prompt_options(parser: argparse.ArgumentParser, required: bool = True) -> None:
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        required=required,
        help="text, one prompt a line, or JSONL with prompt, messages, turns or text",
    )
    parser.add_argument("--limit", metavar="N", type=_positive, help="use only N prompts")
    parser.add_argument(
        "--prefix-tokens", metavar="N", type=_positive, help="cut each prompt to its first N tokens"
    )
    parser.add_argument("--new-tokens", metavar="N", type=_positive, default=128)


def _sampling_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--temperature", metavar="T", type=_temperature, default=0.0, help="0 is greedy (default)"
    )
    parser.add_argument("--seed", metavar="S", type=int, help="makes sampling repeatable")


def _suite_options(parser: argparse.ArgumentParser) -> None:
    suite = parser.add_argument_group(
        "suite", "a whole benchmark in place of a file of prompts; takes these, --device and --json"
    )
    suite.add_argument("--suite", metavar="NAME", help="gpu: what the runtime costs and is worth")
    suite.add_argument("--part", metavar="PART", action="append", help="one part" + _SEVERAL_PARTS)
    suite.add_argument("--family", metavar="NAME", action="append", help="one family" + _OF_ALL)
    suite.add_argument("--size", choices=("toy", "full"), help="(default: full on a GPU alone)")
    suite.add_argument("--output", metavar="DIR", type=Path, help="(default: runs/suite-NAME)")
    suite.add_argument(
        "--trained", metavar="DIR", type=Path, help="trained before (default: trained, in --output)"
    )
    suite.add_argument("--corpus", metavar="FOLDER", help="the text that the target learns")
    suite.add_argument("--fresh", action="store_true", help="measure again what is there already")


def _json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _fail(message: str, status: int) -> int:
    print(f"headstart: {message}", file=sys.stderr)
    return status


def _number(text: str, kind: type, holds: Callable[[Any], bool], wanted: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not holds(value):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected {wanted}")
    return value


def _positive(text: str) -> int:
    return _number(text, int, lambda n: n >= 1, "a whole number from 1")


def _whole(text: str) -> int:
    return _number(text, int, lambda n: n >= 0, "a whole number from 0")


def _temperature(text: str) -> float:
    return _number(text, float, lambda t: 0 <= t < math.inf, "a finite number from 0")


def _memory(text: str) -> dict[int | str, str]:
    """Sizes by device, in transformers' words.

    >>> _memory("0=20GB,cpu=1.5GiB")
    {0: '20GB', 'cpu': '1.5GiB'}
    """
    found: dict[int | str, str] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(\d+|cpu)=(\d+(?:\.\d+)?[KMG]i?B)", part.strip())
        if match is None:
            raise argparse.ArgumentTypeError(
                f"found {text!r}, expected a size for each device, such as 0=20GB,cpu=1.5GB"
            )
        device, size = match.groups()
        found[device if device == "cpu" else int(device)] = size
    return found


def _share(text: str) -> float:
    return _number(text, float, lambda p: 0 < p <= 1, "a number above 0, at most 1")
