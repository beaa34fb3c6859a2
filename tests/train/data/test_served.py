"""Rows that a real server of this machine writes, `transformers serve`, equal the runtime's own."""

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.import_utils import is_serve_available

from headstart.train.data.distill import distill
from headstart.train.data.training_rows import Rows
from headstart.train.data.writers.client import Client
from headstart.train.recipe import OpenAI
from tests.support.answered import CHATS, END, SPEC, same
from tests.support.chats import CHATML, chat_tokenizer
from tests.support.talker import talker


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Any, OpenAI]]:
    from transformers.cli.serve import Serve

    tokenizer = chat_tokenizer(CHATML)
    model = talker(tokenizer, END).float()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    server: Any = Serve(
        force_model=str(tmp_path / "model"), host="127.0.0.1", port=port, device="cpu",
        dtype="float32", non_blocking=True,
    )  # fmt: skip
    try:
        spec = OpenAI(
            url=f"http://127.0.0.1:{port}/v1", model=str(tmp_path / "model"), concurrency=3
        )
        limit = time.monotonic() + 60
        while not server.server.started:
            assert time.monotonic() < limit
            time.sleep(0.05)
        Client(spec).greet()
        yield model, spec
    finally:
        server.kill_server()


@pytest.mark.skipif(not is_serve_available(), reason="needs fastapi, uvicorn and openai")
def test_transformers_serve(tmp_path: Path, served: tuple[Any, OpenAI]) -> None:
    model, server = served
    tokenizer, found = chat_tokenizer(CHATML), []
    spec = replace(SPEC, new_tokens=40)  # every answer comes to its end
    for writer in ("own", "openai"):
        each = replace(spec, writer=writer, openai=server if writer == "openai" else None)
        folder = tmp_path / writer
        distill(each, model, tokenizer, CHATS, folder, progress=False)
        rows = Rows.load(folder)
        found.append([replace(rows.row(n), id=rows.id(n)) for n in range(len(rows))])
    assert len(found[0]) >= len(CHATS) and same(*found)
