"""The GPU suite at toy size: every part, its files, going on where it stopped, mistakes."""

import io
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import costs as shape_costs
from benchmarks.gpu import suite
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.entries import Entries, read_part, write_json
from benchmarks.gpu.job import PARTS, Job, make_job
from benchmarks.gpu.machine import machine
from benchmarks.gpu.paths import Fallback, watched_paths
from benchmarks.gpu.report import expected, report
from benchmarks.gpu.report_table import print_suite
from benchmarks.gpu.scale import SCALES, Scale
from benchmarks.gpu.shapes import SHAPES, random_target
from benchmarks.gpu.static_generate import static_generate
from benchmarks.gpu.thresholds import THRESHOLDS, Limit, Reading, readings
from benchmarks.gpu.trained import recipe_of
from headstart.heads import FAMILIES
from headstart.infer import Speculator
from headstart.infer.graphs import RoundGraphs
from headstart.train.recipe import load_recipe
from tests.support.paths import ROOT
from tests.support.tape import Tape
from tests.support.tiny import tiny

RECIPE = ROOT / "benchmarks" / "gpu" / "recipe.yaml"
COMMAND = ["--device", "cpu", "--size", "toy"]
WITHOUT_DATASETS = (
    "import sys\n"
    "sys.modules['datasets'] = None\n"  # any import of it fails
    "from benchmarks.gpu.__main__ import main\n"
    "sys.exit(main(sys.argv[1:]))\n"
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The whole toy suite for one family, run where `datasets` cannot be imported; its stdout."""
    folder = tmp_path_factory.mktemp("suite") / "out"
    command = [*COMMAND, "--family", "draft_model", "--output", str(folder)]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_DATASETS, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        # Compiling takes long, and has tests of its own.
        env={**os.environ, "COLUMNS": "120", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def entries(folder: Path, part: str) -> dict[str, Any]:
    return json.loads((folder / f"{part}.json").read_text(encoding="utf-8"))["entries"]


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.splitlines()[-1]


def test_the_whole_suite_runs_offline_and_says_what_it_measured(measured: Any) -> None:
    folder, printed = measured
    assert {path.stem for path in folder.glob("*.json")} == set(PARTS)
    for part in set(PARTS) - {"report"}:
        file = json.loads((folder / f"{part}.json").read_text(encoding="utf-8"))
        assert file["part"] == part and file["entries"] and file["commands"]
        conditions = file["conditions"]
        assert conditions["size"] == "toy" and conditions["device"] and conditions["processor"]
        assert {"python", "torch", "transformers", "headstart"} <= set(conditions["versions"])
        assert all(entry["seconds"] >= 0 and entry["at"] for entry in file["entries"].values())
    found = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    judged = found["thresholds"]
    known = {each["threshold"] for each in judged if each["value"] is not None}
    assert known == set(THRESHOLDS) - {"8"}  # what a CPU process allocates is not counted
    said = {each["status"] for each in judged if each["threshold"] != "9"}
    assert said == {"no limit", "not judged", "not measured"}  # toy sizes are not judged
    assert [each["status"] for each in judged if each["threshold"] == "9"] == ["met"]
    assert found["mixed"] == [] and len(found["machines"]) == 1
    assert all(not part["errors"] for part in found["parts"].values())
    assert "Toy sizes show that everything runs" in printed and "(expected)" in printed
    assert Path(found["plot"]).read_bytes().startswith(b"\x89PNG")


def test_what_the_parts_hold(measured: Any) -> None:
    folder, _ = measured
    plain = entries(folder, "costs-8b")["plain"]
    assert plain["bytes_per_token"] == plain["weight_bytes_per_token"] + (
        2 * 2 * 2 * 16 * 4 * SCALES["toy"].context  # keys and values, layers, heads, size, float32
    )
    accepted = entries(folder, "acceptance")["draft_model"]
    rounds = [count for prompt in accepted["counts"] for count in prompt]
    assert accepted["tau"] == pytest.approx(sum(rounds) / len(rounds))
    # What the ranks say of that tree is what the loop did with it.
    assert accepted["replayed_tau"] == pytest.approx(accepted["tau"])
    decoded = entries(folder, "baselines")["draft_model"]
    assert set(decoded["same_text"]) == {
        *("plain", "generate", "generate_static", "tree", "chain"),
        *("assistant", "assistant_default"),
    }
    compiled = entries(folder, "costs-8b")["compiled"]
    assert compiled["generate_static_ms_per_token"] > 0 and not compiled["left_out"]
    assert all(decoded["same_text"].values())
    assert entries(folder, "identity")["draft_model"]["divergences"] == 0
    tree = entries(folder, "costs-8b")["draft_model"]["trees"]["tree"]
    assert set(tree["parts"]) == {"round", "draft", "grow", "verify", "commit", "accept"}
    worth = expected({part: entries(folder, part) for part in PARTS if part != "report"})
    found = worth["costs-8b"]["draft_model"]["tree"]
    assert found["speedup"] == pytest.approx(found["efficiency"] * found["tau"])


def test_what_is_there_is_not_measured_again(
    measured: Any,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    folder, _ = measured
    before = {part: (folder / f"{part}.json").read_bytes() for part in PARTS if part != "report"}
    command = [*COMMAND, "--family", "draft_model", "--output", str(folder), "--json"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as what was measured had, by which a CPU is named
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    assert main([*command, "--part", "costs-8b", "--part", "baselines"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["plot"] is None  # not asked for
    assert {p: (folder / f"{p}.json").read_bytes() for p in before} == before
    assert main([*command, "--part", "bandwidth", "--fresh"]) == 0
    assert (folder / "bandwidth.json").read_bytes() != before["bandwidth"]
    # A failed entry is measured again, and so is one from other conditions.
    path = tmp_path / "part.json"
    made = Entries(path, "part", {"size": "toy"}, fresh=False)
    made.measure("bad", lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    made.measure("good", lambda: {"value": 1})
    assert made.errors == {"bad": "ZeroDivisionError: division by zero"}
    again = Entries(path, "part", {"size": "toy"}, fresh=False)
    assert again.missing("bad") and not again.missing("good")
    assert Entries(path, "part", {"size": "full"}, fresh=False).missing("good")


def test_another_driver_keeps_what_was_carried(tmp_path: Path) -> None:
    """Machines that are lent differ in it; each entry says which one it was measured with."""
    path, gpu = tmp_path / "part.json", {"size": "full", "device": "gpu", "driver": "1.0"}
    Entries(path, "part", gpu, fresh=False).measure("one", lambda: {"value": 1})
    later = Entries(path, "part", {**gpu, "driver": "2.0"}, fresh=False)
    assert not later.missing("one")
    later.measure("two", lambda: {"value": 2})
    file = json.loads(path.read_text(encoding="utf-8"))
    drivers = {name: entry["driver"] for name, entry in file["entries"].items()}
    assert drivers == {"one": "1.0", "two": "2.0"} and file["conditions"]["driver"] == "2.0"
    other = {**gpu, "device": "another", "driver": "2.0"}
    assert Entries(path, "part", other, fresh=False).missing("one")


def test_a_gpu_is_judged_by_captured_rounds_alone(tmp_path: Path) -> None:
    """Here they are not, and an entry that says it was on a GPU fails."""
    path = tmp_path / "part.json"
    entries = Entries(path, "part", {}, fresh=False)
    ids = torch.arange(1, 9).view(1, -1)

    def decode(**options: Any) -> dict[str, Any]:
        speculator = Speculator(tiny("llama"), attention="tree", **options)
        if speculator.graphs is not None:
            speculator.graphs = RoundGraphs(Tape())
        for _ in range(2):
            speculator.generate(ids, max_new_tokens=12, do_sample=False)
        return {"value": 1}

    entries.measure("as it is", decode)
    entries.measure("captured", lambda: decode(graphs=True))
    found = [entries.file["entries"][name] for name in ("as it is", "captured")]
    assert [each["captured"] for each in found] == [False, True]
    assert all(each["tree_attention"] and "error" not in each for each in found)
    with watched_paths() as paths:
        decode()
    paths.on_gpu = True
    with pytest.raises(Fallback, match="captured no rounds"):
        paths.check()
    with watched_paths() as paths:
        decode(graphs=True)
    paths.on_gpu = True
    paths.check()
    paths.failed.append("out of memory")
    with pytest.raises(Fallback, match="not captured: out of memory"):
        paths.check()


def test_each_family_has_a_process_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that an error which ends all work of a process costs the others nothing."""
    lines: list[list[str]] = []

    def run(line: list[str], **_: Any) -> Any:
        lines.append(line)
        return SimpleNamespace(returncode=len(lines) % 2)

    monkeypatch.setattr(suite.subprocess, "run", run)
    (tmp_path / "costs-1b.json").write_text("{}")
    given: dict[str, Any] = {"output": tmp_path, "fresh": True, "families": ["medusa", "hydra"]}
    job = replace(make_job(["costs-1b", "report"], "cpu", "toy", **given), device="cuda")
    report, whole = suite.run_suite(job)
    assert not whole and not (tmp_path / "costs-1b.json").exists() and report["parts"] == {}
    assert [line[-2:] for line in lines] == [["--family", "medusa"], ["--family", "hydra"]]
    assert all("--fresh" not in line and line.count("--part") == 1 for line in lines)
    assert not replace(job, families=("medusa",)).apart and not replace(job, device="cpu").apart
    assert not replace(job, here=True).apart


def test_what_takes_no_times_is_measured_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first family trains what all of them share; then all; times are taken alone."""
    lines: list[list[str]] = []
    at_once, running, most = threading.Barrier(2), 0, []

    def run(line: list[str], **_: Any) -> Any:
        nonlocal running
        lines.append(line)
        running += 1
        most.append(running)
        if 2 <= len(lines) <= 3:
            at_once.wait(10)
        running -= 1
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(suite.subprocess, "run", run)
    given: dict[str, Any] = {"output": tmp_path, "families": ["medusa", "hydra"], "jobs": 2}
    job = replace(
        make_job(["heads", "acceptance", "baselines"], "cpu", "toy", **given), device="cuda"
    )
    assert suite.run_suite(job)[1]
    parts = [[line[i + 1] for i, word in enumerate(line) if word == "--part"] for line in lines]
    assert parts == [["heads"], *[["heads", "acceptance"]] * 2, *[["baselines"]] * 2]
    assert {line[-1] for line in lines[1:3]} == {"medusa", "hydra"} == {lines[3][-1], lines[4][-1]}
    assert lines[0][-1] == "medusa" and [most[0], *most[3:]] == [1, 1, 1]


def test_processes_add_to_one_file(tmp_path: Path) -> None:
    path, given = tmp_path / "part.json", {"size": "toy"}
    write_json(path, {"part": "part", "commands": [], "conditions": {}, "entries": {"old": {}}})
    one, other = (Entries(path, "part", given, fresh=False) for _ in range(2))
    one.measure("one", lambda: {"value": 1})
    other.measure("other", lambda: {"value": 2})
    again = Entries(path, "part", given, fresh=False)
    assert set(again.file["entries"]) == {"one", "other"}
    fresh = Entries(path, "part", given, fresh=True)
    assert fresh.missing("one") and set(read_part(path)["entries"]) == {"one", "other"}  # type: ignore[index]
    fresh.measure("one", lambda: {"value": 3})
    assert set(read_part(path)["entries"]) == {"one"}  # type: ignore[index]


def test_a_failure_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no room\nfor it")

    monkeypatch.setattr("benchmarks.gpu.costs.plain_costs", broken)
    command = [*COMMAND, "--output", str(tmp_path), "--family", "lookup"]
    with torch._dynamo.config.patch(disable=True):  # as where `measured` ran
        assert main([*command, "--part", "costs-1b"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED: plain" in printed and "not measured" in printed
    found = entries(tmp_path, "costs-1b")
    assert found["plain"]["error"] == "RuntimeError: no room for it"
    assert found["lookup"]["trees"]["chain"]["round_ms"] > 0


@pytest.mark.proof
def test_every_part_alone_for_every_family(tmp_path: Path) -> None:
    for part in PARTS:
        folder = tmp_path / part
        trained = ["--trained", str(tmp_path / "trained")]
        assert main([*COMMAND, "--part", part, "--output", str(folder), *trained]) == 0
        assert [path.stem for path in folder.glob("*.json")] == [part]
    for part in ("heads", "acceptance", "identity", "baselines"):
        assert set(entries(tmp_path / part, part)) == set(FAMILIES)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--part", "costs-8"], "did you mean 'costs-8b'"),
        (["--family", "redraftr"], "did you mean 'redrafter'"),
        (["--jobs", "0"], "--jobs 0: expected 1 or more"),
        (["--vocabulary", "0"], "--vocabulary 0: expected 1 or more"),
        (["--jobs", "2", "--here"], "--jobs 2 with --here: one process measures one family"),
        (["--device", "cuda"], "finds 0 GPUs here; use --device cpu"),
        (["--tree", "chain:4"], "unrecognized arguments: --tree"),
    ],
)
def test_mistakes_answer_before_any_work(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(suite, "run_suite", lambda *_: pytest.fail("it ran"))
    assert main(arguments) == 2
    assert said in last_line(capsys)


def job_of(tmp_path: Path, **changes: Any) -> Job:
    return make_job(**({"device": "cpu", "output": tmp_path} | changes))


def test_families_come_from_the_table(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    assert job.families == tuple(FAMILIES) and job.parts == tuple(PARTS)
    full = job_of(tmp_path, size="full", corpus="texts")
    for name in FAMILIES:
        recipe = recipe_of(full, name)
        assert recipe.drafter.family == name and recipe.shares == "gpu-suite"
        assert recipe.corpus.source == "texts" and recipe.target.dtype == "bfloat16"
    for name in ("draft_model", "pard"):
        assert recipe_of(full, name).drafter.options["layers"] == FAMILIES[name].large["layers"]
    assert recipe_of(full, "medusa").drafter.options["output"] == "shared"


def test_the_trained_target_has_100_million_parameters() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from headstart.train.scratch_target import END_OF_TEXT, build_model

    spec = load_recipe(RECIPE).target.scratch
    assert spec is not None
    words = {END_OF_TEXT: 0} | {str(n): n for n in range(1, spec.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, END_OF_TEXT)), eos_token=END_OF_TEXT
    )
    with torch.device("meta"):
        assert build_model(spec, tokenizer, 0).num_parameters() >= 100e6


# A target that takes 10 ms a token, and rounds of 20 ms with a chain of two: ranks by hand.
TREE = {
    "tree": "chain:2", "paths": [[0], [0, 0]], "nodes": 3, "round_ms": 20.0, "peak_bytes": 130,
    "parts": {"round": 21.0, "draft": 1.9, "verify": 17.0, "grow": 0.5, "commit": 0.6, "accept": 1},
}  # fmt: skip
BY_HAND: dict[str, Any] = {
    **{part: {} for part in PARTS},
    "costs-8b": {
        "plain": {
            "plain_ms_per_token": 10.0, "generate_ms_per_token": 15.0, "bare_ms_per_token": 10.0,
            "bytes_per_token": 16e9, "copy_gb_per_s": 2000.0, "peak_bytes": 100,
        },
        "compiled": {
            "compiled_ms_per_token": 11.0, "generate_static_ms_per_token": 12.1,
            "bytes_per_token": 16e9, "copy_gb_per_s": 2000.0,
        },
        "trees at 32768": {"context": 32768, "verify_ms": {"1": 4.0, "64": 6.0}},
        "trees at 2048": {"context": 2048, "verify_ms": {"1": 2.0, "64": 2.5, "128": 3.0}},
        "medusa": {"plain_ms": 10.0, "trees": {"tree": TREE, "chain": TREE | {"round_ms": 25.0}},
                   "weight_bytes": 20, "cache_bytes": 5},
        "medusa with 9 tokens": {"family": "medusa", "plain_ms": 10.0, "weight_bytes": 20,
                                 "cache_bytes": 5, "trees": {"tree": TREE | {"round_ms": 12.5}}},
    },
    "acceptance": {"medusa": {"ranks": [[[0, 0], [0, 0], [0, 0], [1, 1], [0, 3]]]}},
    "baselines": {"medusa": {"ms_per_token": {
        "chain": [4.0, 6.0], "tree": [2.0, 2.0], "assistant": [2.0, 3.0],
    }}},
    "identity": {"medusa": {"divergences": 3, "near_ties": 2}},
    "batches": {"medusa batch 4": {"speedup": 1.25, "policy": "chain:2", "batch": 4}},
}  # fmt: skip


def test_thresholds_by_hand() -> None:
    worth = expected(BY_HAND)
    # Rounds emit 3 (two nodes right), 1 and 2 tokens: 6 tokens, were there so many; 5 are.
    assert worth["costs-8b"]["medusa"]["tree"]["tau"] == pytest.approx(5 / 3)
    found = {(r.threshold, r.of): r for r in readings(BY_HAND, worth)}
    values = {key: reading.value for key, reading in found.items()}
    assert values["1a", "8b"] == pytest.approx(0.8)  # 16 GB in 10 ms, of 2 TB/s
    assert (values["1b", "8b"], values["1c", "8b"]) == (1.5, 1.0)
    assert values["1d", "8b"] == pytest.approx(0.8 / 1.1)
    assert values["1e", "8b"] == pytest.approx(1.1)
    assert (values["2a", "8b at 2048"], values["2b", "8b at 2048"]) == (1.25, 1.5)
    assert values["2c", "8b at 32768"] == 1.5
    assert values["3", "medusa, tree of 3"] == pytest.approx(0.1)  # of 21 ms
    assert values["4", "medusa, tree of 3"] == 0.5
    assert values["4", "medusa with 9 tokens, tree of 3"] == 0.8
    assert found["4", "medusa with 9 tokens, tree of 3"].limit == Limit(least=0.72)
    assert values["5", "medusa, chain against assistant"] == 0.5  # the median of 2/4 and 3/6
    assert values["5", "medusa, tree against assistant"] == 1.25
    assert values["6", "medusa"] == 2.5 and not found["6", "medusa"].expected
    assert values["6", "medusa, 8b"] == 1.25 and found["6", "medusa, 8b"].expected
    assert values["7", "medusa batch 4, chain:2"] == 1.25
    assert values["8", "medusa, tree of 3"] == pytest.approx(130 / 125)
    assert values["9", "medusa"] == 1
    status = {key: reading.status() for key, reading in found.items()}
    assert status["1b", "8b"] == status["6", "medusa"] == "met"
    assert status["5", "medusa, chain against assistant"] == status["9", "medusa"] == "missed"
    assert status["1d", "8b"] == "missed"
    assert (status["1a", "8b"], status["2c", "8b at 32768"]) == ("met", "missed")
    assert status["4", "medusa, tree of 3"] == status["7", "medusa batch 4, chain:2"] == "missed"
    assert status["5", "medusa, tree against assistant"] == "no limit"
    assert found["7", "medusa batch 4, chain:2"].limit == Limit(least=2)
    nothing = readings({part: {} for part in PARTS}, {})
    assert [reading.threshold for reading in nothing] == list(THRESHOLDS)
    assert {reading.status() for reading in nothing} == {"not measured"}
    high = Reading("1c", "8b", 1.06)
    assert (high.status(), high.status(judged=False)) == ("missed", "not judged")


def test_drafters_are_timed_with_some_of_the_tokens_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("plain", "compiled"):
        by_hand = BY_HAND["costs-8b"][name]
        monkeypatch.setattr(shape_costs, f"{name}_costs", lambda *_, by_hand=by_hand: by_hand)
    monkeypatch.setattr(shape_costs, "tree_costs", lambda *_: {})
    monkeypatch.setattr(
        shape_costs, "round_costs", lambda _, drafter, *more: {"config": drafter.config.to_dict()}
    )
    job = make_job(
        ["costs-8b"], "cpu", "toy", tmp_path, families=["eagle", "lookup"], vocabulary=128
    )
    found, whole = suite.run_suite(job)
    assert whole and found["parts"]["costs-8b"]["entries"] == 8
    of = entries(tmp_path, "costs-8b")
    assert of["eagle"]["config"]["draft_vocab_size"] == 0
    assert of["eagle with 128 tokens"]["config"]["draft_vocab_size"] == 128
    assert "no output layer that could be trimmed" in of["lookup with 128 tokens"]["left_out"]


def test_a_contender_that_cannot_run_is_left_out() -> None:
    model = random_target(SHAPES["toy"], torch.device("cpu"), torch.float32)
    ids = torch.ones(1, 5, dtype=torch.int64)
    found, why = static_generate(model, ids, {"max_new_tokens": 0})
    assert not found and "max_new_tokens" in why


def test_the_report_says_what_must_not_be_compared(tmp_path: Path) -> None:
    assert "nothing measured" in shown(report(tmp_path))
    for part, device, trained in (("acceptance", "one", "a"), ("identity", "two", "b")):
        entry = {"trained": trained, "seconds": 1.0, "ranks": [], "divergences": 0, "near_ties": 0}
        conditions = {"size": "full", "scale": {}, "device": device, "versions": {}}
        file = {"conditions": conditions, "commands": [], "entries": {"medusa": entry}}
        write_json(tmp_path / f"{part}.json", file)
    text = shown(report(tmp_path, draw=False))
    assert "different machines" in text and "Trained anew between parts: medusa" in text
    assert "Toy" not in text


def shown(found: dict[str, Any]) -> str:
    out = io.StringIO()
    print_suite(found, out)
    return out.getvalue()


def test_a_gpu_is_named_with_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(total_memory=80, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    told = SimpleNamespace(stdout="580.95.05\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: told)
    found = machine(torch.device("cuda"))
    assert (found["device"], found["driver"], found["memory_bytes"]) == ("a GPU", "580.95.05", 80)

    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    assert machine(torch.device("cuda"))["driver"] is None


def test_full_size_is_the_default_of_a_gpu_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert job_of(tmp_path, device=None).scale == Scale()
    assert job_of(tmp_path, device="cpu").scale == SCALES["toy"]
