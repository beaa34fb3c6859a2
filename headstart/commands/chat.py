"""Chat with a model, with or without its drafter.

headstart chat --drafter runs/my-model/heads
headstart chat --target ORG/MODEL --drafter ORG/NAME --temperature 0.7 --show
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from headstart.inputs import check_record, load_speculator, plan_is_plain
from headstart.terminal import UsageError
from headstart.train.processes.stopping import after_ctrl_c_it_goes_on

from . import options as shared

_SYSTEM = "the system's message, before the first turn"
_LENGTH = (
    "generate at most N tokens per answer (default: 512, or what the target's context has room for)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    shared.add_model_arguments(parser)
    add("--system", metavar="TEXT", type=shared.text, help=_SYSTEM)
    add("--max-new-tokens", metavar="N", type=shared.positive, help=_LENGTH)
    add("--show", action="store_true", help=shared.SHOW)
    add("--record", metavar="FILE", type=Path, help=shared.RECORD)
    shared.add_prefix_caching(parser)
    shared.add_sampling_arguments(parser)
    shared.add_drafting_arguments(parser)
    shared.add_loading_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Load the models, then answer what is typed, or each line of stdin."""
    sampling = shared.sampling(options)
    check_record(options.record)
    speculator = load_speculator(options, lambda tokenizer, _: _check_system(options, tokenizer))
    from headstart.chat.dialogue import Dialogue
    from headstart.chat.lines import messages_of
    from headstart.chat.session import Session
    from headstart.reports.tables import said_of_forwards

    recorder = None
    if options.record is not None:
        from headstart import Recorder

        recorder = Recorder(options.record, speculator)
    session = Session(speculator, options.system, options.max_new_tokens, sampling, recorder)
    tree = speculator.tree_of(1, options.temperature)
    how = f"tree {tree.label}" if session.drafts else "no drafter: plain decoding"
    how = shared.PLAIN_PLAN if plan_is_plain(speculator, options) else how
    size = f", context of {session.context:,} tokens" if session.context else ""
    by = said_of_forwards(speculator.target.forwards)
    print(f"{options.target} · {how}{size}{by}", file=sys.stderr)
    if not session.templated:
        print("(no chat template: turns are written as User: … Assistant: …)", file=sys.stderr)
    print("(/help lists the commands)", file=sys.stderr)
    with after_ctrl_c_it_goes_on():
        Dialogue(session, messages_of(sys.stdin), show=options.show).run()
    if sys.stdin.isatty():
        print(file=sys.stderr)
    return 0


def _check_system(options: argparse.Namespace, tokenizer: Any) -> None:
    """Refuse --system where the chat template has no place for a system's message."""
    if not (options.system and getattr(tokenizer, "chat_template", None)):
        return
    from headstart.train.data.documents import ChatTemplateError, render_chat

    asked = {"role": "user", "content": "Hello"}
    try:
        render_chat(tokenizer, [{"role": "system", "content": options.system}, asked])
    except ChatTemplateError as error:
        render_chat(tokenizer, [asked])  # a template that refuses this too has another fault
        raise UsageError(f"{error}; leave out --system") from None
