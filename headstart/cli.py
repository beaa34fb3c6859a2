"""The command line: `headstart quickstart | train | generate | bench`.

Results go to stdout; progress, statistics and errors go to stderr. Nothing heavy is imported until
a command runs, so `--help` answers at once. A mistake of the user's ends with one line and exit
status 2; set HEADSTART_DEBUG=1 to see its traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from headstart import __version__

if TYPE_CHECKING:
    from headstart.infer import Speculator, Stats

_OVERRIDES = "settings of the recipe, e.g. train.max_seconds=30 (values are read as YAML)"
_TREE = "chain:K, cartesian:A,B,… or a JSON file of rank paths (default: the deepest chain)"
_RULE = "greedy, match or coupled (default: greedy, or coupled when sampling)"
_TARGET = "the model to make faster: a folder or a Hub name (default: the artifact's own, if local)"
_DRAFTER = "the artifact: a folder or a Hub name (default: none, plain decoding)"


class UsageError(ValueError):
    """The command line cannot be used as it was given."""


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


def one_line(error: BaseException) -> str:
    """An error's message on one line, with access tokens and passwords in addresses blanked.

    >>> one_line(OSError("no such model\\n  at https://me:pw@host/x with hf_abcdefghijkl"))
    'no such model at https://…@host/x with hf_…'
    """
    text = " ".join(str(error).split()) or type(error).__name__
    text = re.sub(r"hf_[A-Za-z0-9]{8,}", "hf_…", text)
    return re.sub(r"://[^/@\s]+@", "://…@", text)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; each command's function is its `run`."""
    parser = _Parser(
        prog="headstart",
        description="Train draft heads for a causal language model and decode with them faster, "
        "with the same output.",
    )
    parser.add_argument("--version", action="version", version=f"headstart {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    quickstart = _command(commands, "quickstart", _quickstart, "train a small drafter and measure")
    quickstart.add_argument("--recipe", default="quickstart", help="a path or a shipped name")
    _recipe_options(quickstart)
    _json_option(quickstart)

    train = _command(commands, "train", _train, "train the drafter that a recipe describes")
    train.add_argument("recipe", metavar="RECIPE", help="a path or a shipped name")
    _recipe_options(train)

    generate = _command(commands, "generate", _generate, "continue a prompt, streamed to stdout")
    _model_options(generate)
    text = generate.add_mutually_exclusive_group()
    text.add_argument("--prompt", metavar="TEXT", help="the text to continue (default: stdin)")
    text.add_argument("--file", metavar="FILE", type=Path, help="read the prompt from a file")
    generate.add_argument("--max-new-tokens", metavar="N", type=_positive, default=128)
    generate.add_argument(
        "--temperature", metavar="T", type=_temperature, default=0.0, help="0 is greedy (default)"
    )
    generate.add_argument("--top-p", metavar="P", type=_share, help="nucleus sampling")
    generate.add_argument("--top-k", metavar="K", type=_positive, help="sample from the K best")
    generate.add_argument("--seed", metavar="S", type=int, help="makes sampling repeatable")

    bench = _command(commands, "bench", _bench, "measure against plain decoding and generate")
    _model_options(bench)
    bench.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        required=True,
        help="text, one prompt a line, or JSONL with prompt, messages, turns or text",
    )
    bench.add_argument("--limit", metavar="N", type=_positive, help="use only N prompts")
    bench.add_argument(
        "--prefix-tokens", metavar="N", type=_positive, help="cut each prompt to its first N tokens"
    )
    bench.add_argument("--new-tokens", metavar="N", type=_positive, default=128)
    _json_option(bench)
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
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=f"{summary.capitalize()}.")
    parser.set_defaults(run=run)
    return parser


def _recipe_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", metavar="a.b=value", nargs="*", default=[], help=_OVERRIDES)
    parser.add_argument("--fresh", action="store_true", help="redo stages that are finished")


def _model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", metavar="MODEL", help=_TARGET)
    parser.add_argument("--drafter", metavar="ARTIFACT", help=_DRAFTER)
    parser.add_argument("--tree", metavar="TREE", help=_TREE)
    parser.add_argument("--rule", metavar="RULE", help=_RULE)
    parser.add_argument("--dtype", metavar="DTYPE", help="float32, bfloat16, … (default: as saved)")


def _json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _quickstart(options: argparse.Namespace) -> int:
    from headstart.train.recipe import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    from headstart.train import pipeline  # after the recipe was read: a typo answers at once

    with _quiet_stdout():
        report = pipeline.run(recipe, fresh=options.fresh)
    _print_report(report, options.json, f"headstart quickstart: {recipe.name}")
    return 0


def _train(options: argparse.Namespace) -> int:
    from headstart.train.recipe import load_recipe

    load_recipe(options.recipe, options.overrides)
    from headstart import train

    fresh = ["--fresh"] if options.fresh else []
    with _quiet_stdout():
        return train.main([options.recipe, *options.overrides, *fresh]) or 0


def _generate(options: argparse.Namespace) -> int:
    if options.temperature == 0 and (options.top_p or options.top_k):
        raise UsageError("--top-p and --top-k choose among samples; give --temperature as well")
    prompt = _read_prompt(options)
    speculator = _load(options)
    from transformers import TextStreamer

    tokenizer = speculator.tokenizer
    assert tokenizer is not None  # loaded together with the target
    inputs = tokenizer(prompt, return_tensors="pt").to(speculator.model.device)
    sampling = {
        name: getattr(options, name)
        for name in ("temperature", "top_p", "top_k", "seed")
        if options.temperature > 0 and getattr(options, name) is not None
    }
    started = time.perf_counter()
    speculator.generate(
        inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=options.max_new_tokens,
        do_sample=options.temperature > 0,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        **sampling,
    )
    print(_stats_line(speculator.stats, time.perf_counter() - started), file=sys.stderr)
    return 0


def _stats_line(stats: Stats, seconds: float) -> str:
    if not stats.rounds:
        return f"no round was needed, {seconds:.2f} s"
    return (
        f"τ {stats.tau:.2f} tokens per round: {stats.tokens} tokens after the first, "
        f"{stats.rounds} rounds, {seconds:.2f} s with the prompt"
    )


def _bench(options: argparse.Namespace) -> int:
    from headstart.train.corpus import read_documents

    documents = read_documents(options.prompts)[: options.limit]
    if not documents:
        raise UsageError(f"{options.prompts}: no prompts found")
    speculator = _load(options)
    from headstart.infer.bench import bench

    prompts = [_encode(document, speculator, options.prefix_tokens) for document in documents]
    with _quiet_stdout():
        report = bench(speculator, prompts, new_tokens=options.new_tokens)
    _print_report(report, options.json, "headstart bench")
    return 0


def _load(options: argparse.Namespace) -> Speculator:
    """The Speculator for --target, --drafter, --tree, --rule and --dtype."""
    if options.target is None:
        options.target = _own_target(options.drafter)
    import headstart

    given = {
        name: getattr(options, name)
        for name in ("tree", "rule", "dtype")
        if getattr(options, name) is not None
    }
    try:
        with _quiet_stdout():
            return headstart.load(options.target, options.drafter, **given)
    except OSError as error:  # transformers' message may not even name the model
        raise UsageError(
            f"--target {options.target} cannot be loaded; expected a folder or the name of a model "
            f"that can be downloaded ({one_line(error)[:200]})"
        ) from error


def _own_target(drafter: str | None) -> str:
    """The folder of the target that an artifact was trained for, where it is on this machine."""
    if drafter is None:
        raise UsageError("neither --target nor --drafter given; name at least one")
    from headstart.heads.artifact import read_manifest

    target = Path(read_manifest(drafter).target)
    # A relative path holds where the training ran; a run's folder that was moved keeps its parts.
    for folder in (target, Path(drafter).parent / target.name):
        if folder.is_dir():
            return str(folder)
    raise UsageError(f"the target of {drafter} is not on this machine; pass --target {target}")


def _read_prompt(options: argparse.Namespace) -> str:
    if options.prompt is not None:
        source, text = "--prompt", options.prompt
    elif options.file is not None:
        source, text = str(options.file), _read_text(options.file)
    elif sys.stdin.isatty():
        raise UsageError("no prompt; give --prompt or --file, or pipe the text in")
    else:
        source, text = "stdin", sys.stdin.read()
    if not text.strip():
        raise UsageError(f"{source}: the prompt is empty; give at least one word")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UsageError(f"{source}: not valid UTF-8 text; convert it first")
    return text


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not valid UTF-8 text; convert it first") from None


def _encode(document: Any, speculator: Speculator, limit: int | None) -> Any:
    """Token ids [1, T] of a prompt; a chat goes through the tokenizer's template, if it has one."""
    tokenizer = speculator.tokenizer
    assert tokenizer is not None  # loaded together with the target
    text, templated = document.text, bool(document.messages and tokenizer.chat_template)
    if templated:
        text = str(
            tokenizer.apply_chat_template(
                document.messages, add_generation_prompt=True, tokenize=False
            )
        )
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=not templated).input_ids
    return ids[:, :limit]


def _print_report(report: Any, as_json: bool, title: str) -> None:
    from headstart.report import print_next_steps, print_table, to_json

    if as_json:
        print(to_json(report))
        return
    print_table(report, sys.stdout, title)
    print_next_steps(report, sys.stdout)


@contextlib.contextmanager
def _quiet_stdout() -> Iterator[None]:
    """Send what libraries print to stderr: stdout holds the result alone."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


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


def _temperature(text: str) -> float:
    return _number(text, float, lambda t: 0 <= t < math.inf, "a finite number from 0")


def _share(text: str) -> float:
    return _number(text, float, lambda p: 0 < p <= 1, "a number above 0, at most 1")
