"""`headstart runs`: what is there, who uses it, and what is removed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headstart.cli import main
from headstart.train.stages.lock import RunLock
from headstart.train.stages.store import StageStore


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run `first` with two targets and a finished and an unfinished `heads`."""
    root = tmp_path / "runs" / "first"

    def fill(folder: Path) -> dict[str, int]:
        (folder / "weights").write_bytes(b"0" * 200_000)
        return {}

    def fail(folder: Path) -> None:
        raise RuntimeError("stop")

    for size in (1, 2):
        with StageStore(root) as store:
            target = store.run("target", {"size": size}, fill)
            if size == 1:
                store.run("heads", {"heads": 5}, fill, reads=[target])
                continue
            with pytest.raises(RuntimeError):
                store.run("heads", {"heads": 5}, fail, reads=[target])
    (tmp_path / "runs" / "notes").mkdir()
    return tmp_path / "runs"


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = main(["runs", *words])
    done = capsys.readouterr()
    return status, done.out + done.err


def test_runs_and_stages_are_listed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = call(capsys, "--output", str(runs), "--json")
    (run,) = json.loads(said)
    assert status == 0 and (run["run"], run["stages"], run["current"]) == ("first", 4, 2)
    assert run["MB"] == 0.6 and run["in use by"] == "" and run["last finished"].startswith("20")
    with RunLock(runs / "first"):
        assert "this process" in call(capsys, "--output", str(runs))[1]
    _, said = call(capsys, "first", "--output", str(runs), "--json")
    stages = json.loads(said)
    states = sorted((stage["stage"].partition("-")[0], stage["state"]) for stage in stages)
    assert states == [
        ("heads", "current"), ("heads", "unfinished"), ("target", "current"), ("target", "kept"),
    ]  # fmt: skip
    old = next(stage["stage"] for stage in stages if stage["state"] == "kept")
    heads = next(s for s in stages if s["state"] == "current" and s["stage"].startswith("heads"))
    assert heads["made from"] == [old]
    _, table = call(capsys, str(runs / "first"))
    assert "unfinished" in table and old in table


def test_a_name_is_whole_on_a_narrow_terminal(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    (runs / "first").rename(runs / "my-first-model")
    with RunLock(runs / "my-first-model"):
        assert "my-first-model " in call(capsys, "--output", str(runs))[1]


@pytest.mark.parametrize("name", [(), ("first",)])
def test_no_time_and_no_figure_is_cut_on_a_narrow_terminal(
    runs: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: tuple[str, ...],
) -> None:
    (row, *_) = json.loads(call(capsys, *name, "--output", str(runs), "--json")[1])
    monkeypatch.setenv("COLUMNS", "60")
    _, table = call(capsys, *name, "--output", str(runs))
    when = row["finished"] if name else row["last finished"]
    titles = ("state", "finished", "seconds") if name else ("stages", "current")
    for cell in (*when.split(), str(row["MB"]), *titles):
        assert f"{cell} " in table, cell


def test_what_is_asked_for_is_removed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, where = runs / "first", ("--output", str(runs))
    current = (root / "heads").resolve()
    for wrong, said in (
        (("first", "--remove", current.name, *where), "is the newest heads"),
        (("first", "--remove", "target-*", *where), "drafts for the target in target-"),
        (("first", "--remove", "bench-*", *where), "has no stage 'bench-*' to remove"),
        (("second", *where), "no run 'second' in"),
        (("--remove", "heads-*", *where), "needs the run's name"),
    ):
        status, answer = call(capsys, *wrong)
        assert status == 2 and said in answer and len(answer.splitlines()) == 1
    status, said = call(capsys, "first", *where, "--remove", "heads-*")
    assert status == 0 and said.startswith("removed ") and current.exists()
    assert len(list(root.glob("heads-*"))) == 1 and len(list(root.glob("target-*"))) == 2


def test_listing_imports_no_torch(runs: Path) -> None:
    script = (
        "import sys; from headstart.cli import main; "
        f"main(['runs', 'first', '--output', {str(runs)!r}]); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
