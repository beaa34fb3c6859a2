"""What several processes of a run say and agree on, through one store."""

import logging
from typing import Any

import pytest
import torch

from headstart import cli
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


def test_a_mistake_of_all_processes_is_printed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command line too, which a launcher may start as `-m headstart train`."""
    distributed: Any = torch.distributed
    shared = distributed.HashStore()
    monkeypatch.setattr(agreement, "_launchers_store", lambda: shared)
    wrong = ["train", "quickstart", "train.max_step=3"]
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        assert cli.main(wrong) == 2
        assert capsys.readouterr().err.count("did you mean 'max_steps'") == lines
    monkeypatch.delenv("RANK")
    assert cli.main(wrong) == 2 and "did you mean 'max_steps'" in capsys.readouterr().err
