"""A server of this process, and a client of the protocol that asks it."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from headstart.heads import family
from headstart.infer import Speculator
from tests.support.chats import CHATML, chat_tokenizer
from tests.support.talker import talker


def speaker(context: int, template: str = CHATML) -> Speculator:
    """A speculator whose drafts are of use: the target's letters repeat."""
    tokenizer = chat_tokenizer(template)
    model = talker(tokenizer, "<|im_end|>", eagerness=1.0, context=context)
    lookup: Any = family("lookup")
    return Speculator(model, lookup.of_target(model).bind(model), tokenizer=tokenizer)


@contextlib.contextmanager
def served(batcher: Any, recorder: Any = None, key: str | None = None) -> Iterator[Any]:
    """A client of a server whose only model is called `talker`; it has the server's key."""
    import uvicorn
    from openai import OpenAI

    from headstart.commands.serve import _bound
    from headstart.serving.app import server_of

    listening = _bound("127.0.0.1", 0)
    app = server_of(batcher, "talker", recorder, key)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    limit = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < limit
        time.sleep(0.02)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    try:
        with OpenAI(base_url=url, api_key=key or "none", max_retries=0) as client:
            yield client
    finally:  # else a test that fails would never end
        server.should_exit = True
        thread.join(timeout=10)
