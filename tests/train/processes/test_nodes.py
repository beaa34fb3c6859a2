"""Two nodes, each a launcher of one process on this machine, from the shipped file for nodes."""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from headstart.heads import OptionError
from headstart.train import pipeline
from headstart.train.fit.arguments import training_arguments
from headstart.train.processes import launched
from headstart.train.processes.agreement import ProcessLost, check_launcher
from headstart.train.processes.launched import check_same, check_same_target, several_nodes
from headstart.train.recipe import Train, parse_recipe
from tests.support.launches import Job, recipe, weights
from tests.support.recipes import TINY


def nodes(folder: Path, make: Callable[[int, list[str]], Job]) -> list[Job]:
    """Both launchers, started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    where = ["--main_process_ip", "127.0.0.1", "--main_process_port", port]
    counts = ["--num_machines", "2", "--num_processes", "2"]
    return [make(rank, [*where, *counts, "--machine_rank", str(rank)]).start() for rank in (0, 1)]


@pytest.mark.distributed
def test_two_nodes_train_what_one_process_does(tmp_path: Path) -> None:
    """And when the first is lost, the second ends, though it sees none of its processes."""
    tiny = TINY | {"output": str(tmp_path / "runs"), "seed": 3}
    pipeline.train(parse_recipe(tiny))
    end = {"eval_every": 8}  # one validation: which checkpoint is best is no matter
    run, lost = (recipe(tmp_path, name, "redrafter", 2, **end) for name in ("two", "lost"))
    pipeline.train(parse_recipe(recipe(tmp_path, "one", "redrafter", 4, **end)))
    how: dict[str, Any] = {"at": 5, "run": "lost", "wait": 120.0, "apart": True}
    first, second = nodes(
        tmp_path,
        lambda rank, arguments: Job(
            tmp_path / f"node-{rank}", [run, lost], "nodes", how, arguments
        ),
    )
    second.wait_until_ready(1)
    (process,) = first.pids()
    for pid in (first.process.pid, process):
        os.kill(pid, signal.SIGKILL)
    second.wait_until_gone(20)
    assert second.end() != 0
    assert "the run's first node cannot be reached, and so process 1 ends" in second.whole_errors()
    one, two = weights(tmp_path, "one"), weights(tmp_path, "two")
    off = sum(float((two[key] - one[key]).norm() ** 2) for key in one) ** 0.5
    assert off / sum(float(one[key].norm() ** 2) for key in one) ** 0.5 < 1e-5


@pytest.mark.distributed
def test_nodes_that_do_not_share_the_run_folder_are_told_so(tmp_path: Path) -> None:
    run = TINY | {"output": "runs", "name": "apart"}
    (tmp_path / "apart.yaml").write_text(yaml.safe_dump(run))
    places = [tmp_path / "here", tmp_path / "there"]
    for place in places:
        place.mkdir()

    def job(rank: int, arguments: list[str]) -> Job:
        command = ["-m", "headstart.train", str(tmp_path / "apart.yaml")]
        return Job(
            tmp_path / f"node-{rank}", [], "nodes", {}, arguments, places[rank], command=command
        )

    for node, place in zip(nodes(tmp_path, job), places, strict=True):
        assert node.end() != 0
        lines = node.whole_errors().splitlines()
        (line,) = [line for line in lines if "all nodes must share" in line]
        assert f"process 1 does not see {place}/runs/apart, where process 0 writes" in line
    assert not (places[1] / "runs" / "apart" / "corpus").exists()


def from_two(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    """As if another process had passed a changed value."""
    monkeypatch.setattr(launched, "from_all", lambda value: [value, change(value)])


def test_nodes_with_other_settings_or_versions_are_told_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = parse_recipe(TINY).to_dict()
    from_two(monkeypatch, lambda own: own)
    check_same(settings)
    from_two(monkeypatch, lambda own: own | {"train.batch_size": 8})
    with pytest.raises(OptionError, match=r"train\.batch_size is 8, and 4 on process 0"):
        check_same(settings)
    from_two(monkeypatch, lambda own: own | {"version of torch": "2.0"})
    with pytest.raises(OptionError, match=r"process 1 .* version of torch is '2\.0', and '"):
        check_same(settings)


def test_nodes_with_other_targets_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from_two(monkeypatch, lambda own: own)
    check_same_target("abc")
    from_two(monkeypatch, lambda own: "abd")
    with pytest.raises(OptionError, match="process 1 has loaded another target"):
        check_same_target("abc")


def test_a_launcher_says_whether_there_are_other_nodes() -> None:
    assert not several_nodes({}) and not several_nodes({"WORLD_SIZE": "4"})
    assert not several_nodes({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"})
    assert several_nodes({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})


def test_a_process_whose_launcher_ended_before_it_joined_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_launcher()  # there is none
    distributed: Any = torch.distributed
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True)
    port = str(store.port)
    for name, value in [("RANK", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)]:
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    check_launcher()
    del store
    with pytest.raises(ProcessLost, match="process 1 was started by a launcher that has ended"):
        training_arguments(Train(), Path("never"), 0)
