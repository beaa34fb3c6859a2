"""What several processes of a run say and agree on, through one store."""

import logging
from typing import Any

import pytest
import torch

from headstart.train.processes import agreement
from headstart.train.processes.agreement import SaidByAll


def test_a_warning_of_all_processes_is_printed_once_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    distributed: Any = torch.distributed
    shared = distributed.HashStore()

    def warning(text: str) -> logging.LogRecord:
        return logging.LogRecord("headstart", logging.WARNING, "", 0, text, None, None)

    alone = SaidByAll()
    assert alone.filter(warning("short")) and alone.filter(warning("short"))
    monkeypatch.setattr(agreement, "in_parallel", lambda: True)
    monkeypatch.setattr(agreement, "store", lambda: shared)
    one, two = SaidByAll(), SaidByAll()
    said = [(each.filter(warning("short")), each.filter(warning("short"))) for each in (one, two)]
    assert said == [(True, True), (False, False)]
    assert two.filter(warning("of its own row"))

    def gone() -> Any:
        raise RuntimeError("connection reset")

    monkeypatch.setattr(agreement, "store", gone)
    assert one.filter(warning("last words"))
