"""What a command line names: target and drafters, the devices they are put on, and prompts.

Heavy imports stand inside the functions, so that parsing and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import glob
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.commands.options import PROMPTS
from headstart.terminal import UsageError, blank, one_line, quiet_stdout, tell

NEW_TOKENS = 128
"""How many tokens a command writes where it is not told."""

_MOST_CHARACTERS = 1000  # of a name or path; systems know none that are much longer

Early = Callable[[Any, "int | None"], None]
"""Is called with a target's tokenizer and its context in tokens, None without an end."""

_PLACING = ("device", "max_memory", "offload_folder")

if TYPE_CHECKING:
    import torch

    from headstart.heads.artifacts.source import DrafterSource
    from headstart.infer import Speculator


def check_name(name: str, what: str = "drafter") -> None:
    """Refuse what is neither a path nor a name that the Hub may have, before torch is imported."""
    if len(name) > _MOST_CHARACTERS:
        raise UsageError(f"no {what} has a name of {len(name)} characters; check the name")
    there = Path(name).exists()
    if there and not Path(name).is_dir():
        raise UsageError(
            f"{name!r} is a file; expected the folder of a {what}, or its name on the Hub"
        )
    if not there and not re.fullmatch(r"\w[\w.-]*((/\w[\w.-]*)?(@.+)?|:\w*)", name, re.ASCII):
        raise UsageError(
            f"no {what} at {name!r}: neither a folder nor the name of a Hub repository; check the "
            "name"
        )


def check_length(speculator: Speculator, prompt: int, new_tokens: int | None) -> int:
    """How many tokens to write after a prompt of so many; by default 128, or what the context has.

    Raises:
        UsageError: they do not fit into the target's context, or their keys and values into all
            the memory there is.
    """
    from headstart.heads.core import trained_context

    context = trained_context(speculator.model)
    check_context(context, prompt, new_tokens)
    new_tokens = new_tokens or min(NEW_TOKENS, NEW_TOKENS if context is None else context - prompt)
    _check_memory(speculator, prompt + new_tokens)
    return new_tokens


def check_context(context: int | None, prompt: int, new_tokens: int | None) -> None:
    """Refuse more new tokens than the target's context has room for behind a prompt.

    Args:
        context: of the target; None without an end.
        prompt: how many tokens it has; 0 where it is not known, and has one at least.
        new_tokens: None for at least one.

    Raises:
        UsageError: they do not fit.
    """
    if context is None or (room := context - (prompt or 1)) >= (new_tokens or 1):
        return
    from headstart.heads.core import counted

    said = [f"the prompt has {counted(prompt, 'token')}"] if prompt else []
    if new_tokens is not None:
        asked = "is" if new_tokens == 1 else "are"
        said.append(f"{counted(new_tokens, 'new token')} {asked} asked for")
    remedy = f"ask for at most {room:,}" if room > 0 else "shorten the prompt"
    raise UsageError(
        f"{' and '.join(said)}, and the target was made for {context:,} in all; {remedy}"
    )


def _check_memory(speculator: Speculator, tokens: int) -> None:
    from headstart.heads.core import total_bytes

    cache = speculator.target.cache
    there = [total_bytes(device) for device in {shape.device for shape in cache.shapes}]
    needed = cache.bytes_of(1, tokens)
    if None not in there and needed > (whole := sum(filter(None, there))):
        raise UsageError(
            f"the keys and values of {tokens:,} tokens take {needed / 1e9:.0f} GB of memory, and "
            f"there are {whole / 1e9:.0f} GB; ask for fewer new tokens"
        )


def load_with_room(options: argparse.Namespace, new_tokens: int) -> Speculator:
    """`load_speculator`, of a target that has room for so many new tokens after some prompt."""
    speculator = load_speculator(options, lambda _, room: check_context(room, 0, new_tokens))
    check_length(speculator, 0, new_tokens)  # memory, and what only loading shows
    return speculator


def plan_is_plain(speculator: Speculator, options: argparse.Namespace) -> bool:
    """Whether a drafter was named, and its plan for one such request is to decode plainly."""
    if not options.drafter or options.tree is not None:
        return False
    return speculator.tree_of(1, getattr(options, "temperature", 0)).label == "plain"


def load_speculator(options: argparse.Namespace, early: Early | None = None) -> Speculator:
    """The Speculator for --target, --drafter, --tree, --rule, --dtype, --compile and --device.

    Without --tree it takes the artifact's own tree. Where trees or rules are lists, they are left
    to the caller. `options.target` is filled in by `drafter_sources`; with `options.in_place` False
    the target stays what transformers loads, for comparisons with it.

    Args:
        early: refuses what the target's tokenizer and context show to be wrong, and is called with
            them before any weights are read.
    """
    names = ("tree", "rule", "expansion", "dtype")
    given: dict[str, Any] = {name: vars(options).get(name) for name in names}
    given = {name: value for name, value in given.items() if isinstance(value, str)}
    if isinstance(vars(options).get("tree"), list):
        given["tree"] = "plain"  # the drafter is needed, whatever its plan says
    trust = getattr(options, "trust_remote_code", False)
    if trust and options.target is None:  # a drafter may name any model as its target
        raise UsageError("--trust-remote-code trusts the model of --target; name one")
    _check_names(options)
    check_decoding(given.get("tree"), given.get("rule"), given.get("expansion"))
    check_rule(given.get("rule"), getattr(options, "temperature", 0))
    drafters = drafter_sources(options)
    if not drafters and options.target is None:
        raise UsageError("neither --target nor --drafter given; name at least one")
    from headstart.heads.artifacts.hub import target_options

    placed = any(getattr(options, name, None) is not None for name in _PLACING)
    placed = placed or getattr(options, "tensor_parallel", 1) > 1
    placing = _placing(options) if placed else {}  # mistakes in the options come first
    target_options(options.target)  # what is not there is said before torch is imported
    for source in drafters:
        _ = source.kind
    if sys.stderr.isatty():  # importing and loading take seconds, of a large model minutes
        tell([f"Loading {blank(str(options.target))}"])
    with quiet_stdout():
        import headstart
        from headstart.heads.core import said_of_busy_cores, use_physical_cores

        use_physical_cores()
        given |= placing if placed else _placing(options)
        given |= {"trust_remote_code": True} if trust else {}
        given["compile"] = getattr(options, "compile", False)
        given["in_place"] = getattr(options, "in_place", True)
        given["prefix_caching"] = getattr(options, "prefix_caching", False)
        try:
            if early is not None:
                given["tokenizer"], context = _tokenizer_and_context(options.target, trust)
                early(given["tokenizer"], context)
            made = headstart.load(options.target, drafters, **given)
            if made.device.type == "cpu" and (busy := said_of_busy_cores()):
                tell([busy])
            return made
        except OSError as error:  # transformers' message may not even name the model
            raise UsageError(
                f"--target {options.target} cannot be loaded; expected a folder or the name of a "
                f"model that can be downloaded ({one_line(error)[:200]})"
            ) from error


def check_decoding(tree: str | None, rule: str | None, expansion: str | None) -> None:
    """Refuse a tree, a rule or an expansion that there is not, before torch is imported.

    Raises:
        OptionError: one of them, or an expansion that the rule refuses.
    """
    from headstart.infer.rules.registry import find_rule
    from headstart.infer.trees.texts import read_tree

    if tree is not None:
        read_tree(tree)
    find_rule(rule).check_expansion(expansion)


def check_rule(rule: str | None, temperature: float | None) -> None:
    """Refuse a rule that does not sample where text is to be sampled.

    Raises:
        UsageError: it is one.
    """
    from headstart.infer.rules.registry import find_rule

    if temperature and not find_rule(rule).samples:
        raise UsageError(
            f"--rule {rule} with --temperature above 0; use one that samples, such as coupled, or "
            "--temperature 0"
        )


def _tokenizer_and_context(target: str, trust: bool) -> tuple[Any, int | None]:
    """What a target's tokenizer and config say, before its weights are read.

    The context is None where only loading the target shows it: a folder of an adapter has no config
    of the model that it adapts.
    """
    from transformers import AutoConfig, AutoTokenizer

    from headstart.heads import ArtifactError
    from headstart.heads.artifacts.hub import target_options
    from headstart.heads.core import declared_context, load_pretrained

    options = {**target_options(target), "trust_remote_code": trust}
    tokenizer = load_pretrained(AutoTokenizer, target, **options)
    try:
        return tokenizer, declared_context(load_pretrained(AutoConfig, target, **options))
    except (ArtifactError, OSError):
        return tokenizer, None


def _check_names(options: argparse.Namespace) -> None:
    named = options.drafter if isinstance(options.drafter, list) else [options.drafter]
    for name in named:
        if isinstance(name, str):
            check_name(name)
    if options.target is not None:
        check_name(options.target, "model")


def load_target(options: argparse.Namespace) -> Speculator:
    """The Speculator that decodes plainly, for --target and --trust-remote-code alone."""
    trust = options.trust_remote_code
    return load_speculator(
        argparse.Namespace(target=options.target, drafter=None, trust_remote_code=trust)
    )


def drafter_sources(options: argparse.Namespace) -> list[DrafterSource]:
    """The drafters of --drafter; without --target, that of the first artifact is filled in."""
    from headstart.heads.artifacts.source import DrafterSource, SourceKind

    named = options.drafter if isinstance(options.drafter, list) else [options.drafter]
    allow_pickle = getattr(options, "allow_pickle", False)
    sources = [DrafterSource.of(name, allow_pickle) for name in named if name is not None]
    for source in sources:
        if options.target is None and source.kind is SourceKind.ARTIFACT:
            options.target = source.own_target
    if sources and options.target is None:
        raise UsageError(
            f"--drafter {' --drafter '.join(map(str, sources))} does not say which model it drafts "
            "for, as drafters trained by headstart do; name the model to make faster with --target"
        )
    return sources


def _placing(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `load` for --device, --max-memory, --offload-folder, --tensor-parallel."""
    name, memory, folder = (getattr(options, each, None) for each in _PLACING)
    if (processes := getattr(options, "tensor_parallel", 1)) > 1:
        if given := [each for each in _PLACING if getattr(options, each, None) is not None]:
            flag = given[0].replace("_", "-")
            raise UsageError(
                f"--{flag} with --tensor-parallel, which takes the first {processes} GPUs; leave "
                "one of them out"
            )
        return {"tensor_parallel": processes}
    if memory is None:
        if folder is not None:
            raise UsageError("--offload-folder without --max-memory, and nothing is offloaded")
        device = find_device(name)
        return {} if device.type == "cpu" else {"device_map": {"": device}}
    if name is not None:
        raise UsageError("--max-memory names the devices itself; leave --device out")
    import torch

    gpus = torch.cuda.device_count()
    if missing := [device for device in memory if device not in ("cpu", *range(gpus))]:
        raise UsageError(
            f"--max-memory names GPU {missing[0]}, and torch {torch.__version__} finds {gpus} GPUs "
            "here; name those that are, or cpu alone"
        )
    return {"device_map": "auto", "max_memory": memory, "offload_folder": folder}


def find_device(name: str | None) -> torch.device:
    """The device of --device; where it is not given, a GPU if there is one."""
    import torch

    gpus = torch.cuda.device_count()
    try:
        device = torch.device(name or ("cuda" if gpus else "cpu"))
    except RuntimeError as error:
        raise UsageError(f"--device is {name!r}; expected cpu, cuda, cuda:1, …") from error
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise UsageError(
            f"--device {name}, and torch {torch.__version__} finds {gpus} GPUs here; use --device "
            "cpu, or another GPU"
        )
    return device


def check_record(path: Path | None) -> None:
    """Make the file of --record, if it is not there, before anything is loaded."""
    if path is None:
        return
    from headstart.heads.core.files import append_line

    try:
        append_line(path, None)
    except OSError as error:
        raise UsageError(
            f"--record {path}: cannot be written ({error.strerror}); expected a file in a folder "
            "that is there"
        ) from None


def check_prompts(path: str | Path, what: str = "prompts", holds: str = PROMPTS) -> None:
    """Refuse a file of prompts that is not there, and say what such a file holds."""
    from headstart.train.data.hub import hub_source
    from headstart.train.recipe import Source

    source = str(path)
    path = Path(path).expanduser()
    named = source == "stdlib" or hub_source(Source(source=source)) is not None
    if not named and not path.exists() and not glob.has_magic(source):
        raise UsageError(f"no {what} at {path}: no such file or folder; expected {holds}")
    if (held_out := path / "corpus" / "held_out.jsonl").is_file():
        raise UsageError(
            f"{path} is the folder of a run; expected its held-out prompts, {held_out}"
        )


def read_documents(options: argparse.Namespace) -> list[Any]:
    """The prompts that --prompts and --limit name."""
    from headstart.train.data import reading

    check_prompts(options.prompts)
    documents = reading.read_documents(options.prompts)[: options.limit]
    if not documents:
        raise UsageError(f"{options.prompts}: no prompts found")
    return documents


def encode(document: Any, speculator: Speculator, limit: int | None) -> Any:
    """Token ids [1, T] of a prompt; a chat goes through the tokenizer's template, if it has one."""
    from headstart.train.data.documents import render_chat
    from headstart.train.data.tokenising import prompt_tokens

    tokenizer: Any = speculator.tokenizer
    chat = bool(document.messages and tokenizer.chat_template)
    text = document.text
    if chat:
        text = render_chat(tokenizer, document.messages, document.tools)
    # A prompt may be longer than the model's context: `limit` cuts it.
    ids = prompt_tokens(tokenizer, text, not chat).input_ids
    if ids.shape[1] == 0:
        raise UsageError(f"{document.id}: the prompt has no token in this model's vocabulary")
    return ids[:, :limit]
