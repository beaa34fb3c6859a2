"""A server of the small target that answers in letters, which decodes one request or several."""

from collections.abc import Iterator
from typing import Any

import pytest

from headstart.infer import Batcher
from tests.support.served import served, speaker


@pytest.fixture(scope="module")
def spoken() -> Any:
    return speaker(256)


@pytest.fixture(scope="module", params=[1, 4], ids=["alone", "together"])
def client(spoken: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    with served(Batcher(spoken, request.param)) as client:
        yield client
