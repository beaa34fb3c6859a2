"""What a command line names: the models that it loads, and the prompts that it reads.

Heavy imports stand inside the functions, so that parsing and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from headstart.infer import Speculator


class UsageError(ValueError):
    """The command line cannot be used as it was given."""


def one_line(error: BaseException) -> str:
    """An error's message on one line, with access tokens and passwords in addresses blanked.

    >>> one_line(OSError("no such model\\n  at https://me:pw@host/x with hf_abcdefghijkl"))
    'no such model at https://…@host/x with hf_…'
    """
    return blank(" ".join(str(error).split()) or type(error).__name__)


def blank(text: str) -> str:
    text = re.sub(r"hf_[A-Za-z0-9]{8,}", "hf_…", text)
    return re.sub(r"://[^/@\s]+@", "://…@", text)


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """Send what libraries print to stderr: stdout holds the result alone."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def load_speculator(options: argparse.Namespace) -> Speculator:
    """The Speculator for --target, --drafter, --tree, --rule, --dtype and where it is placed.

    Without --tree it takes the one that the artifact was measured with. Where trees or rules are
    lists, they are left to the caller.
    """
    given = {
        name: getattr(options, name)
        for name in ("tree", "rule", "expansion", "dtype")
        if isinstance(getattr(options, name, None), str)
    }
    if getattr(options, "allow_pickle", False):
        given["allow_pickle"] = True
    if isinstance(getattr(options, "tree", None), list):
        given["tree"] = "plain"  # the drafter is wanted, whatever its plan says
    with quiet_stdout():
        drafters = _drafters(options)
        if not drafters and options.target is None:
            raise UsageError("neither --target nor --drafter given; name at least one")
        import headstart

        given |= _placing(options)
        try:
            return headstart.load(options.target, drafters, **given)
        except OSError as error:  # transformers' message may not even name the model
            raise UsageError(
                f"--target {options.target} cannot be loaded; expected a folder or the name of a "
                f"model that can be downloaded ({one_line(error)[:200]})"
            ) from error


def _drafters(options: argparse.Namespace) -> list[str]:
    """What --drafter names, artifacts by their folders; fills in --target where one knows it."""
    from headstart.heads.artifacts.files import artifact_folder, is_artifact

    named = options.drafter or []
    named = [named] if isinstance(named, str) else named
    found = [str(artifact_folder(name)) if is_artifact(name) else name for name in named]
    for name, folder in zip(named, found, strict=True):
        if options.target is None and is_artifact(name):
            options.target = own_target(folder, name)
    if named and options.target is None:
        raise UsageError(
            f"--drafter {' --drafter '.join(named)} belongs to no target; name one with --target"
        )
    return found


def _placing(options: argparse.Namespace) -> dict[str, Any]:
    """What --device, --max-memory and --offload-folder are to `from_pretrained`."""
    name, memory = getattr(options, "device", None), getattr(options, "max_memory", None)
    folder = getattr(options, "offload_folder", None)
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
    """The device of --device; a GPU where there is one, when it was not given.

    Raises:
        UsageError: no such device, or none here.
    """
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


def own_target(folder: str, drafter: str) -> str:
    """The target that an artifact was trained for: its folder on this machine, or its Hub name."""
    from headstart.heads.artifacts.files import read_manifest
    from headstart.heads.artifacts.hub import is_hub_name

    name = read_manifest(folder).target
    target = Path(name)
    # A relative path holds where the training ran; a run's folder that was moved keeps its parts,
    # and runs that share a target may have moved together.
    run = Path(folder).parent
    for found in (target, run / target.name, run.parent / target.parent.name / target.name):
        if found.is_dir():
            return str(found)
    if is_hub_name(name):
        return name
    raise UsageError(f"the target of {drafter} is not on this machine; pass --target {target}")


def read_prompt(options: argparse.Namespace) -> str:
    if options.prompt is not None:
        source, text = "--prompt", options.prompt
    elif options.file is not None:
        source, text = str(options.file), _read_text(options.file)
    elif sys.stdin.isatty():
        raise UsageError("no prompt; give --prompt or --file, or pipe the text in")
    else:
        source = "stdin"
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError:
            text = "\udcff"  # reported below
    if not text.strip():
        raise UsageError(f"{source}: the prompt is empty; give at least one word")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UsageError(f"{source}: not valid UTF-8 text; convert it first")
    return text


def read_chat(options: argparse.Namespace) -> list[dict[str, str]]:
    """The conversation in a .jsonl file, or any other prompt as a user's message."""
    if options.file is None or options.file.suffix != ".jsonl":
        return [{"role": "user", "content": read_prompt(options).strip()}]
    from headstart.train.data import reading

    documents = reading.read_documents(options.file)
    if len(documents) != 1:
        raise UsageError(f"{options.file}: found {len(documents)} conversations, expected one")
    return documents[0].messages or [{"role": "user", "content": documents[0].text}]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not valid UTF-8 text; convert it first") from None


def read_documents(options: argparse.Namespace) -> list[Any]:
    """The prompts that --prompts and --limit name."""
    from headstart.train.data import reading

    documents = reading.read_documents(options.prompts)[: options.limit]
    if not documents:
        raise UsageError(f"{options.prompts}: no prompts found")
    return documents


def encode(document: Any, speculator: Speculator, limit: int | None) -> Any:
    """Token ids [1, T] of a prompt; a chat goes through the tokenizer's template, if it has one."""
    tokenizer = speculator.tokenizer
    assert tokenizer is not None  # loaded together with the target
    text, chat = document.text, bool(document.messages and tokenizer.chat_template)
    if chat:
        text = templated(tokenizer, document.messages)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=not chat).input_ids
    if ids.shape[1] == 0:
        raise UsageError(f"{document.id}: the prompt has no token in this model's vocabulary")
    return ids[:, :limit]


def templated(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """A conversation as the text that the model was trained on, ready for the answer."""
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise UsageError("the target's tokenizer has no chat template; leave out --chat")
    try:
        return str(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        )
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise UsageError(
            f"the target's chat template refuses the roles {roles[:80]} ({one_line(error)[:120]})"
        ) from error
