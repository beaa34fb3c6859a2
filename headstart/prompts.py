"""The prompts that a command line names: one text, one chat, or a file of many.

Heavy imports stand inside the functions, so that parsing and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.terminal import UsageError

if TYPE_CHECKING:
    from headstart.infer import Speculator


def read_prompt(options: argparse.Namespace) -> str:
    """The text of --prompt, --file or stdin."""
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
    """The chat in a .jsonl file, or any other prompt as a user's message."""
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
    from headstart.train.data.documents import render_chat

    tokenizer = speculator.tokenizer
    assert tokenizer is not None  # loaded together with the target
    text, chat = document.text, bool(document.messages and tokenizer.chat_template)
    if chat:
        text = render_chat(tokenizer, document.messages)
    # A prompt may be longer than the model's context: `limit` cuts it.
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=not chat, verbose=False).input_ids
    if ids.shape[1] == 0:
        raise UsageError(f"{document.id}: the prompt has no token in this model's vocabulary")
    return ids[:, :limit]
