"""Generate text from a prompt, streamed to stdout.

headstart generate --drafter runs/quickstart/heads --prompt 'import os' --show
headstart generate --target ORG/MODEL --drafter ORG/NAME --chat --prompt 'Hello'
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from headstart.inputs import (
    check_context,
    check_length,
    check_record,
    load_speculator,
    plan_is_plain,
)
from headstart.terminal import UsageError

from . import options as shared

_CHAT = (
    "the prompt is a user's message, and goes through the tokenizer's chat template; a .jsonl FILE "
    "holds one conversation (messages or turns)"
)

_SCHEMA = "write JSON that the JSON schema in FILE describes"
_REGEX = "write a text that this regular expression matches from beginning to end"

_NO_PROMPT = "no prompt; give --prompt or --file, or pipe the text in"
_TAIL = 200  # characters of the prompt's last line that --show repeats


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    shared.add_model_arguments(parser)
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--prompt", metavar="TEXT", help="the text to continue (default: stdin)")
    text.add_argument("--file", metavar="FILE", type=Path, help="read the prompt from a file")
    add("--chat", action="store_true", help=_CHAT)
    add("--max-new-tokens", metavar="N", type=shared.positive, help=shared.LENGTH)
    add("--show", action="store_true", help=shared.SHOW)
    add("--record", metavar="FILE", type=Path, help=shared.RECORD)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json-schema", metavar="FILE", type=Path, help=_SCHEMA)
    form.add_argument("--regex", metavar="PATTERN", help=_REGEX)
    shared.add_sampling_arguments(parser)
    shared.add_drafting_arguments(parser)
    shared.add_loading_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Read the prompt, load the models and stream what they write."""
    sampling = shared.sampling(options)
    check_record(options.record)
    if (grammar := _read_grammar(options)) is not None:
        sampling["grammar"] = grammar
    messages = _read_chat(options) if options.chat else None
    prompt = "" if messages else _read_prompt(options)
    encoded: list[Any] = []

    def early(tokenizer: Any, context: int | None) -> None:
        encoded.append(_encode(tokenizer, prompt, messages))
        check_context(context, encoded[0].input_ids.shape[1], options.max_new_tokens)

    speculator = load_speculator(options, early)
    from headstart.heads.core import counted
    from headstart.reports.tables import said_of_forwards
    from headstart.show import ShowStreamer

    tokenizer, (inputs,) = speculator.tokenizer, encoded
    new_tokens = check_length(speculator, inputs.input_ids.shape[1], options.max_new_tokens)
    inputs = inputs.to(speculator.device)
    started = time.perf_counter()
    before = "" if options.chat else prompt.rpartition("\n")[2][-_TAIL:]
    decode: Any = speculator.generate
    if options.record is not None:
        from headstart import Recorder

        decode = Recorder(options.record, speculator).generate
        sampling["chats"] = [messages] if messages else None
    shown: dict[str, Any] = {"coloured": options.show, "before": before}
    if not options.chat:
        shown["prompt"] = inputs.input_ids[0].tolist()
    with ShowStreamer(tokenizer, **shown) as streamer:
        decode(
            inputs.input_ids,
            attention_mask=inputs.attention_mask,
            max_new_tokens=new_tokens,
            streamer=streamer,
            **sampling,
        )
    stats, seconds = speculator.stats, time.perf_counter() - started
    said = f"no round was needed, {seconds:.2f} s"
    if stats.rounds:
        said = f"τ {stats.tau:.2f} tokens per round: {counted(stats.tokens, 'token')} after the "
        said += f"first, {counted(stats.rounds, 'round')}, {seconds:.2f} s with the prompt"
    said += said_of_forwards(speculator.target.forwards)
    if not streamer.shows_figures:
        print(said, file=sys.stderr)
    if plan_is_plain(speculator, options):
        print(f"nothing was drafted: {shared.PLAIN_PLAN}", file=sys.stderr)
    return 0


def _encode(tokenizer: Any, prompt: str, messages: list[dict[str, str]] | None) -> Any:
    """The prompt's `input_ids` [1, P] and mask; of a chat as the tokenizer's template writes it."""
    from headstart.train.data.documents import render_chat
    from headstart.train.data.tokenising import prompt_tokens

    if messages and not tokenizer.chat_template:
        raise UsageError("the target's tokenizer has no chat template; leave out --chat")
    text = render_chat(tokenizer, messages) if messages else prompt
    found = prompt_tokens(tokenizer, text, not messages)
    if found.input_ids.shape[1] == 0:
        raise UsageError("the prompt has no token in this model's vocabulary; give another")
    return found


def _read_prompt(options: argparse.Namespace) -> str:
    """The text of --prompt, --file or stdin."""
    source = "--prompt" if options.prompt is not None else str(options.file or "stdin")
    if options.prompt is options.file is None and sys.stdin.isatty():
        raise UsageError(_NO_PROMPT)
    if options.file is not None and not options.file.exists():
        raise UsageError(f"--file {options.file}: no such file; check the path, or give --prompt")
    if options.file is not None and options.file.is_dir():
        raise UsageError(f"--file {options.file}: a folder; expected a text file")
    try:
        if options.file is not None:
            text = options.file.read_text(encoding="utf-8")
        else:
            text = sys.stdin.read() if options.prompt is None else options.prompt
        text.encode()
    except UnicodeError:
        raise UsageError(f"{source}: not valid UTF-8 text; convert it first") from None
    if not text and source == "stdin":
        raise UsageError(_NO_PROMPT)
    if not text.strip():
        raise UsageError(f"{source}: the prompt is empty; give at least one word")
    return text


def _read_grammar(options: argparse.Namespace) -> Any:
    """The form of --json-schema or --regex; None without them."""
    if options.regex is options.json_schema is None:
        return None
    from headstart.infer import Grammar

    if (file := options.json_schema) is None:
        return Grammar.regex(options.regex)
    try:
        return Grammar.json_schema(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        said = getattr(error, "strerror", None) or "not valid UTF-8 text"
        raise UsageError(f"--json-schema {file}: {said}; expected a file of JSON") from None
    except ValueError as error:
        raise UsageError(f"--json-schema {file}: {error}") from None


def _read_chat(options: argparse.Namespace) -> list[dict[str, str]]:
    """The chat in a .jsonl file, or any other prompt as a user's message."""
    if options.file is None or options.file.suffix != ".jsonl":
        return [{"role": "user", "content": _read_prompt(options).strip()}]
    from headstart.train.data import reading

    documents = reading.read_documents(options.file)
    if len(documents) != 1:
        raise UsageError(f"{options.file}: found {len(documents)} conversations, expected one")
    return documents[0].messages or [{"role": "user", "content": documents[0].text}]
