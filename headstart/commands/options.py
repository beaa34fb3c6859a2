"""Arguments that several commands share, and the types of argument values."""

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from headstart.terminal import UsageError, is_utf8

ARTIFACT = "a folder, or ORG/NAME or ORG/NAME@REVISION on the Hub"
RECIPE = (
    "a path, a shipped name, or parts joined by +: FAMILY+MODEL+HARDWARE (`headstart recipes` "
    "lists them)"
)
TARGET = "the model to make faster: a folder or a Hub name (default: the drafter's own target)"
TRUST = "run Python code that comes with the target; code of a drafter is never run"
PROMPTS = (
    "text with one prompt per line, or rows with prompt, messages, turns or text, as JSONL, JSON, "
    "CSV or Parquet"
)
PLAIN_PLAN = "the drafter's plan is plain decoding (--tree drafts all the same)"
PICKLE = "also read drafters saved as a pickle; only tensors are read from it"

KEPT = "; finished stages are kept, and the same command continues"
"""What is true of a run when Ctrl-C has ended it."""

_DRAFTER = (
    f"{ARTIFACT}; a drafter of another project, a smaller model, `lookup`, `recycling`, "
    "`suffix`, `mtp` for the module in the target's own files, or `early_exit:N` for its first N "
    "layers; given several times, all of them decode together (default: no drafter, plain decoding)"
)
_WHOLE = "run each prompt whole, also where it begins as an earlier text"
_TREE = (
    "chain:K, cartesian:A,B,…, best-first:NODES,WIDTH,DEPTH, beam:WIDTH,LENGTH or a JSON file of "
    "rank paths; for several drafters one tree each, joined by +; adaptive, or adaptive: before a "
    "tree, for a depth that follows what is accepted (default: the drafter's plan for this "
    "machine, or the tree of its training)"
)
RULE = (
    "how drafted tokens are accepted: greedy, coupled, match, rejection, block, traversal or "
    "typical (default: greedy, or coupled when sampling)"
)
EXPANSION = (
    "how the children of a node are chosen: topk, coupled, with_replacement or "
    "without_replacement, as far as rule and tree allow it (default: the best one for both)"
)
_MEMORY = (
    "for a target that does not fit: how much of its weights each device keeps; the rest is "
    "streamed from CPU memory, then from disk; e.g. 0=20GB,cpu=100GB, or cpu=8GB without a GPU"
)
_PARALLEL = (
    "divide the target's layers among N processes, each with a GPU of its own, which this one "
    "starts (default: 1)"
)
OVERRIDES = "settings of the recipe, e.g. train.max_seconds=30 (values are read as YAML)"
_FOLDER = (
    "where to write weights that --max-memory leaves to the disk, if they cannot be read from the "
    "target's own safetensors"
)


RECORD = (
    "append prompt and answer, as text and token ids, to FILE, for headstart adapt; the file holds "
    "what was asked and answered, unencrypted, and only you can read it"
)
LENGTH = "generate at most N tokens (default: 128, or what the target's context has room for)"
SHOW = (
    "colour accepted draft tokens by the depth at which they were drafted, and print figures below "
    "(only on a terminal)"
)


def _number(kind: type, holds: Callable[[Any], bool], wanted: str) -> Callable[[str], Any]:
    """The type of an argument: what reads it, or says what was expected."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not holds(value):
            raise argparse.ArgumentTypeError(f"found {text!r}, expected {wanted}")
        return value

    return read


positive = _number(int, lambda n: n >= 1, "a whole number from 1")
at_least_two = _number(int, lambda n: n >= 2, "a whole number from 2")
draws = _number(int, lambda n: n >= 100, "a whole number from 100, which the test needs")
whole = _number(int, lambda n: n >= 0, "a whole number from 0")


def text(given: str) -> str:
    """A text that a model can read."""
    if not is_utf8(given):
        raise argparse.ArgumentTypeError("not valid UTF-8 text; convert it first")
    return given


temperature = _number(float, lambda t: 0 <= t < math.inf, "a finite number from 0")
probability = _number(float, lambda p: 0 < p <= 1, "a number above 0, at most 1")


def dtype(text: str) -> str:
    """The name of a type that models compute in.

    >>> dtype("bf16")
    'bfloat16'
    """
    known = ("auto", "float64", "float32", "bfloat16", "float16")
    text = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(text, text)
    if text not in known:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected one of: {', '.join(known)}")
    return text


def memory(text: str) -> dict[int | str, str]:
    """Sizes by device, as the `max_memory` of transformers.

    >>> memory("0=20GB,cpu=1.5GiB")
    {0: '20GB', 'cpu': '1.5GiB'}
    """
    sizes = [part.strip().split("=") for part in text.split(",")]
    if not all(re.fullmatch(r"(\d+|cpu)=\d+(\.\d+)?[KMG]i?B", "=".join(size)) for size in sizes):
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected a size for each device, such as 0=20GB,cpu=1.5GB"
        )
    return {device if device == "cpu" else int(device): size for device, size in sizes}


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Overrides of a recipe's settings, and --fresh."""
    add = parser.add_argument
    add("overrides", metavar="a.b=value", nargs="*", default=[], help=OVERRIDES)
    add("--fresh", action="store_true", help="redo stages that are finished")


_COMPILE = (
    "auto (default): on a CPU, run layers by faster kernels or on packed weights if a short trial "
    "finds that faster; on (or no value): always, and on a GPU compile the target's forwards; off: "
    "run layers as transformers does"
)
FASTER = {"auto": "auto", "on": True, "off": False}


def _faster(text: str) -> str | bool:
    if text not in FASTER:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected auto, on or off")
    return FASTER[text]


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Drafters and target; a command's first options."""
    add = parser.add_argument
    add("--drafter", metavar="ARTIFACT", action="append", help=_DRAFTER)
    add("--target", metavar="MODEL", help=TARGET)


def add_drafting_arguments(parser: argparse.ArgumentParser, compare: bool = False) -> None:
    """How drafters decode; to `compare`, --tree and --rule are lists."""
    add = parser.add_argument_group("drafting").add_argument
    action, more = ("append", "; several times to compare") if compare else ("store", "")
    add("--tree", metavar="TREE", action=action, help=_TREE + more)
    add("--rule", metavar="RULE", action=action, help=RULE + more)
    add("--expansion", metavar="EXPANSION", help=EXPANSION)


def add_loading_arguments(
    parser: argparse.ArgumentParser, decodes: bool = True, pickles: bool = True
) -> None:
    """The models' dtype and devices, how a command that `decodes` runs them, what is trusted."""
    add = parser.add_argument_group("loading").add_argument
    add("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, … (default: a GPU if there is one)")
    add("--dtype", metavar="DTYPE", type=dtype, help="float32, bfloat16, … (default: as saved)")
    if decodes:  # `auto` where a trial on a CPU finds them so
        how: dict[str, Any] = {"nargs": "?", "const": True, "default": "auto", "type": _faster}
        add("--compile", metavar="auto|on|off", **how, help=_COMPILE)
        add("--tensor-parallel", metavar="N", type=positive, default=1, help=_PARALLEL)
    add("--max-memory", metavar="DEVICE=SIZE,…", type=memory, help=_MEMORY)
    add("--offload-folder", metavar="DIR", type=Path, help=_FOLDER)
    add("--trust-remote-code", action="store_true", help=TRUST)
    if pickles:
        add("--allow-pickle", action="store_true", help=PICKLE)


def add_prefix_caching(parser: argparse.ArgumentParser) -> None:
    """For commands whose prompts often begin as the one before."""
    parser.add_argument(
        "--no-prefix-caching", dest="prefix_caching", action="store_false", help=_WHOLE
    )


def add_prompt_arguments(parser: argparse.ArgumentParser, compare: bool = False) -> None:
    """A file of prompts, how many of them, and how much is written after each.

    To `compare`, a file may give them too: none is required, or has a default.
    """
    add = parser.add_argument
    add("--prompts", metavar="FILE", type=Path, required=not compare, help=PROMPTS)
    add("--limit", metavar="N", type=positive, help="use only the first N prompts")
    add("--prefix-tokens", metavar="N", type=positive, help="cut each prompt to its first N tokens")
    new_tokens = "generate N tokens after each prompt (default: 128)"
    default = None if compare else 128
    add("--new-tokens", metavar="N", type=positive, default=default, help=new_tokens)


_GREEDY = "sampling temperature; 0 is greedy (default)"
_SEED = "makes sampling repeatable"
_TOP_P = "sample from the most likely tokens, up to a probability of P together"
_TOP_K = "sample from the K most likely tokens"


def add_sampling_arguments(parser: argparse._ActionsContainer) -> None:
    """Whether tokens are sampled, and how."""
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", metavar="T", type=temperature, default=0.0, help=_GREEDY)
    add("--seed", metavar="S", type=int, help=_SEED)
    add("--top-p", metavar="P", type=probability, help=_TOP_P)
    add("--top-k", metavar="K", type=positive, help=_TOP_K)


def add_temperatures(parser: argparse.ArgumentParser) -> None:
    """Temperatures to compare, and a seed."""
    add, several = parser.add_argument, f"{_GREEDY}; several times to compare"
    add("--temperature", metavar="T", type=temperature, action="append", help=several)
    add("--seed", metavar="S", type=int, help=_SEED)


def sampling(options: argparse.Namespace) -> dict[str, Any]:
    """What `generate` is told of --temperature, --top-p, --top-k and --seed."""
    if options.temperature == 0:
        if options.top_p or options.top_k:
            raise UsageError("--top-p and --top-k choose among samples; give --temperature as well")
        _refuse_of_samples(options)
        return {"do_sample": False}
    names = ("temperature", "top_p", "top_k", "seed")
    given = {name: getattr(options, name) for name in names}
    return {"do_sample": True} | {name: v for name, v in given.items() if v is not None}


def _refuse_of_samples(options: argparse.Namespace) -> None:
    """Refuse a rule or an expansion that greedy text would leave unread."""
    from headstart.infer.rules.registry import RULES
    from headstart.infer.trees.expansions import Expansion

    sampled = [name for name, rule in RULES.items() if rule.samples]
    for name, known in (("rule", sampled), ("expansion", get_args(Expansion))):
        if (value := getattr(options, name)) in known:  # others are told as such
            raise UsageError(f"--{name} {value} is for sampled text; give --temperature as well")


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """One JSON document in place of a table."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")
