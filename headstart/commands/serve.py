"""Answer requests of the OpenAI protocol, decoded with a drafter.

headstart serve --drafter runs/my-model/heads
headstart serve --target ORG/MODEL --drafter ORG/NAME --port 8000 --name my-model
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path
from typing import Any

from headstart.inputs import check_record, load_speculator, plan_is_plain
from headstart.terminal import UsageError

from . import options as shared

_HOST = "the address to listen at (default: localhost, which other machines cannot reach)"
_BATCH = "requests that are decoded together, at most (default: 1, each as fast as possible)"
_KEY = "the environment variable that holds the key of requests (default: none is needed)"
_NAME = "the name that requests ask for (default: the target's)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    shared.add_model_arguments(parser)
    add("--host", metavar="HOST", default="localhost", help=_HOST)
    add("--port", metavar="PORT", type=shared.whole, default=8000, help="its port (default: 8000)")
    add("--name", metavar="NAME", help=_NAME)
    add("--api-key-env", metavar="VARIABLE", help=_KEY)
    add("--batch-size", metavar="N", type=shared.positive, default=1, help=_BATCH)
    add("--record", metavar="FILE", type=Path, help=shared.RECORD)
    shared.add_prefix_caching(parser)
    shared.add_drafting_arguments(parser)
    shared.add_loading_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Load the models, then answer requests until Ctrl-C."""
    key = _key(options.api_key_env)
    listening = _bound(options.host, options.port)
    try:
        import uvicorn
        from prometheus_client import CollectorRegistry  # noqa: F401
        from transformers.cli.serving import chat_completion  # noqa: F401
        from transformers.utils import logging
    except ImportError as error:
        raise UsageError(
            f"serving needs packages that are missing ({error.name}); install them: "
            "pip install fastapi uvicorn openai prometheus_client"
        ) from error
    check_record(options.record)
    speculator = load_speculator(options)
    from headstart import Batcher, Recorder
    from headstart.reports.tables import said_of_forwards
    from headstart.serving.app import server_of

    logging.set_verbosity_error()  # its lines about requests say less than those printed here
    name = options.name or str(options.target)
    tree = f"tree {speculator.tree_of(1, 0.0).label}" if options.drafter else "plain decoding"
    tree = shared.PLAIN_PLAN if plan_is_plain(speculator, options) else tree
    by = said_of_forwards(speculator.target.forwards)
    most = options.batch_size
    together = f" · up to {most} requests together" if most > 1 else ""
    print(f"{name} · {tree}{by}{together} · {_url(listening)} (Ctrl-C stops)", file=sys.stderr)
    if not getattr(speculator.tokenizer, "chat_template", None):
        print("(no chat template: only /v1/completions has an answer)", file=sys.stderr)
    batcher = Batcher(speculator, most)
    recorder = None if options.record is None else Recorder(options.record, batcher)
    settings = uvicorn.Config(server_of(batcher, name, recorder, key), log_level="warning")
    uvicorn.Server(settings).run(sockets=[listening])
    return 0


def _key(variable: str | None) -> str | None:
    """The key that an environment variable holds; None where none is named."""
    if variable is None:
        return None
    if key := os.environ.get(variable, "").strip():
        return key
    raise UsageError(
        f"--api-key-env names the variable {variable}, which is not set; set it to the key that "
        "requests must have, or leave it out"
    )


def _bound(host: str, port: int) -> socket.socket:
    """A socket that listens there; whether it can is known before a model is loaded.

    A name is looked up as one of IPv4, such as localhost, if it can be.
    """
    try:
        how: dict[str, Any] = {"type": socket.SOCK_STREAM, "flags": socket.AI_PASSIVE}
        found = socket.getaddrinfo(host or None, port, **how)
        family = min((each[0] for each in found), key=lambda each: each != socket.AF_INET)
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError, UnicodeError) as error:
        raise UsageError(
            f"cannot listen at {host}:{port} ({getattr(error, 'strerror', None) or error}); give "
            "another --host or --port"
        ) from error


def _url(listening: socket.socket) -> str:
    """Where clients find what listens there."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
