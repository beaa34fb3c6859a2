"""Requests that threads ask of a batcher at once."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from headstart.infer import Batcher


def decode_together(batcher: Batcher, requests: Sequence[dict[str, Any]]) -> list[Tensor]:
    """The texts of requests, the options of `generate` each, a thread for each."""

    def text(options: dict[str, Any]) -> Any:
        return batcher.generate(**options)

    with ThreadPoolExecutor(len(requests)) as pool:
        return [*pool.map(text, requests)]
