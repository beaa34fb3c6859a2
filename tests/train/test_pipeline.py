"""From text to a measured drafter: stages are reused, run again, killed, and shared."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import headstart
from headstart.heads import load_drafter
from headstart.heads.artifacts.conditions import probe_losses
from headstart.heads.artifacts.manifest import read_manifest
from headstart.heads.lookup import Lookup
from headstart.heads.retrieval import Retrieval
from headstart.infer import StaticTree, parse_static
from headstart.train import main, pipeline
from headstart.train.data.corpus import load_documents
from headstart.train.data.held_out import held_out_prompts
from headstart.train.fit.clock import Clock
from headstart.train.fit.trainer import DrafterTrainer
from headstart.train.fit.validate import measure_tau
from headstart.train.recipe import load_recipe
from headstart.train.stages.folders import StageError
from tests.support.paths import ROOT
from tests.support.recipes import SAME, TINY, launch

STAGES = ("corpus", "target", "distill", "train", "heads")
OWN = {"train", "heads"}
"""Those that a run shares with no other."""


@pytest.fixture
def tiny(pictured: Path, no_pictures: None) -> Path:
    return pictured


@pytest.fixture
def pictured(tmp_path: Path) -> Path:
    return write(tmp_path)


def write(folder: Path) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY | {"output": str(folder / "runs")}))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run's folder."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)  # as `no_pictures`
        pipeline.train(load_recipe(write(folder)))
    return folder / "runs"


@pytest.fixture
def trained(tiny: Path, finished: Path) -> Path:
    """The recipe of a run that is finished."""
    shutil.copytree(finished, tiny.parent / "runs", symlinks=True)
    return tiny


def ids(folder: Path) -> dict[str, str]:
    return {
        name: json.loads((folder / name / "stage.json").read_text())["id"]
        for name in STAGES
        if (folder / name / "stage.json").exists()
    }


def test_every_stage_is_reused_until_something_changes(tiny: Path, tmp_path: Path) -> None:
    root = tmp_path / "runs" / "tiny"

    def changed(*overrides: str, fresh: bool = False) -> set[str]:
        before = ids(root)
        assert pipeline.train(load_recipe(tiny, overrides), fresh) == root / "heads"
        return {name for name, id in ids(root).items() if id != before.get(name)}

    assert changed() == set(STAGES)
    first = ids(root)
    # The benchmark's alone, and what decides no result.
    assert not changed("decode.prompts=1", "distill.batch_size=3", "train.feature_cache_mb=0")
    # Another evaluation chooses among the checkpoints that were kept.
    assert changed("decode.new_tokens=12", "decode.tree=chain:2") == {"heads"}
    manifest = read_manifest(root / "heads")
    assert manifest.metrics["tree"] == [[0], [0, 0]] and "train_loss" in manifest.metrics
    assert changed("train.learning_rate=2e-3") == {"train", "heads"}
    assert changed("distill.new_tokens=12") == {"distill", "train", "heads"}
    assert changed(fresh=True) == set(STAGES)
    for name, id in first.items():  # nothing was removed
        records = [json.loads(path.read_text()) for path in root.glob(f"{name}-*/stage.json")]
        assert id in {record["id"] for record in records}


def test_training_goes_on_only_when_asked(trained: Path, tmp_path: Path) -> None:
    root = tmp_path / "runs" / "tiny"
    with pytest.raises(StageError, match="no finished training of fewer than 12 steps"):
        pipeline.train(load_recipe(trained, ["name=new", "train.extend=true"]))
    assert not list(root.with_name("new").glob("corpus*"))  # before the first stage
    first = ids(root)
    more = ["train.max_steps=20", "train.extend=true"]
    pipeline.train(load_recipe(trained, more))
    metrics = read_manifest(root / "heads").metrics
    bounds = [(of["max_steps"], of["steps"]) for of in metrics["schedules"]]
    assert bounds == [(12, 12), (20, 20)] and metrics["steps"] == 20
    # From its first step on at the rate of the longer schedule; that of the shorter one was 0 here.
    lines = (root / "heads" / "metrics.jsonl").read_text().splitlines()
    rates = [line["learning_rate"] for line in map(json.loads, lines) if "learning_rate" in line]
    clock = Clock(20, None, 0.1)
    factors = [clock.factor(step) for step in range(12, 20)]
    assert rates[12:] == pytest.approx([rates[12] / factors[0] * factor for factor in factors])
    assert rates[12] > rates[11] > 0
    second = ids(root)
    assert {name for name in STAGES if second[name] != first[name]} == {"train", "heads"}
    pipeline.train(load_recipe(trained, more))
    assert ids(root) == second
    # Without it the same steps are trained from the start.
    pipeline.train(load_recipe(trained, more[:1]))
    assert len(read_manifest(root / "heads").metrics["schedules"]) == 1
    assert ids(root)["train"] not in (first["train"], second["train"])


def test_a_training_that_its_epochs_ended_goes_on_by_more_of_them(
    trained: Path, tmp_path: Path
) -> None:
    root = tmp_path / "runs" / "tiny"
    pipeline.train(load_recipe(trained, ["train.epochs=1"]))
    assert read_manifest(root / "heads").metrics["steps"] == 6
    more = ["train.max_steps=20", "train.extend=true"]
    with pytest.raises(StageError, match=r"train\.epochs 1 ended the earlier training after 6 st"):
        pipeline.train(load_recipe(trained, ["train.epochs=1", *more]))
    pipeline.train(load_recipe(trained, ["train.epochs=2", *more]))
    metrics = read_manifest(root / "heads").metrics
    bounds = [(of["epochs"], of["steps"]) for of in metrics["schedules"]]
    assert bounds == [(1.0, 6), (2.0, 12)] and metrics["steps"] == 12


def test_a_training_that_time_ended_goes_on_by_more_of_it(trained: Path, tmp_path: Path) -> None:
    root = tmp_path / "runs" / "tiny"
    timed = ["train.max_steps=100000", "train.eval_every=null", "train.max_seconds=1"]
    pipeline.train(load_recipe(trained, timed))
    (first,) = read_manifest(root / "heads").metrics["schedules"]
    longer = [*timed[:2], "train.max_seconds=3", "train.extend=true"]
    pipeline.train(load_recipe(trained, longer))
    metrics, found = read_manifest(root / "heads").metrics, ids(root)
    assert [of["max_seconds"] for of in metrics["schedules"]] == [1.0, 3.0]
    assert first["steps"] < metrics["steps"] < 100_000 and metrics["seconds"] >= 3
    pipeline.train(load_recipe(trained, longer))
    assert ids(root) == found
    with pytest.raises(StageError, match=r"fewer than 100000 steps and at most 0\.5 s whose other"):
        pipeline.train(load_recipe(trained, [*longer, "train.max_seconds=0.5"]))
    # More steps after a training that no time bounded, within one: it has taken less.
    pipeline.train(
        load_recipe(trained, ["train.max_steps=20", "train.max_seconds=600", "train.extend=true"])
    )
    schedules = read_manifest(root / "heads").metrics["schedules"]
    assert [of["max_seconds"] for of in schedules] == [None, 600.0]


@pytest.mark.parametrize("cut", [True, False])
def test_checkpoints_are_chosen_by_the_present_settings_of_decoding(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: bool
) -> None:
    """Of a training that was interrupted, or goes on, after others had measured some of them."""

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    more = ["train.max_steps=16"]
    with monkeypatch.context() as patch:
        if cut:  # with the checkpoints of all steps but the last
            true = DrafterTrainer._save_checkpoint
            patch.setattr(
                DrafterTrainer, "_save_checkpoint",
                lambda self, *given: (die if self.state.global_step == 16 else true)(self, *given),
            )  # fmt: skip
            with pytest.raises(KeyboardInterrupt):
                pipeline.train(load_recipe(trained, more))
        else:
            more.append("train.extend=true")
    pipeline.train(load_recipe(trained, [*more, "decode.tree=chain:1"]))
    root = tmp_path / "runs" / "tiny"
    info = json.loads((root / "train" / "stage.json").read_text())["info"]
    assert info["evaluation"]["tree"] == "chain:1" and {"12", "16"} <= info["evaluated"].keys()
    assert all(measured["tree"] == [[0]] for measured in info["evaluated"].values())
    metrics = read_manifest(root / "heads").metrics
    assert metrics["steps"] == 16 and metrics["tree"] == [[0]]
    best = max(info["evaluated"].values(), key=lambda measured: measured["tau"])
    assert metrics["tau"] == best["tau"] == info["evaluated"][str(metrics["best_step"])]["tau"]


def test_files_that_changed_are_read_again(trained: Path, tmp_path: Path) -> None:
    root, text = tmp_path / "runs" / "tiny", tmp_path / "corpus.jsonl"

    def write(word: str) -> None:
        rows = [{"text": f"{word} {n} " * 30} for n in range(40)]
        text.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("first")
    target = tmp_path / "target"
    shutil.copytree(root / "target", target)
    recipe = load_recipe(trained, [
        "name=other", f"corpus.source={text}", "target.scratch=null", f"target.model={target}",
    ])  # fmt: skip
    pipeline.train(recipe)
    first = ids(recipe.folder)
    write("other")
    pipeline.train(recipe)
    second = ids(recipe.folder)
    assert {name for name in STAGES if second[name] == first[name]} == {"target"}
    weights = load_file(target / "model.safetensors")
    weights["lm_head.weight" if "lm_head.weight" in weights else next(iter(weights))][0] += 1
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    pipeline.train(recipe)
    third = ids(recipe.folder)
    assert {name for name in STAGES if third[name] == second[name]} == {"corpus"}


def test_the_artifact_is_whole_and_measured(pictured: Path, tmp_path: Path) -> None:
    recipe = load_recipe(pictured)
    artifact = pipeline.train(recipe)
    assert {path.name for path in artifact.iterdir()} == {
        "README.md", "acceptance.png", "begun", "config.json", "headstart.json", "metrics.jsonl",
        "metrics.png", "model.safetensors", "report.html", "stage.json", "tree.json",
    }  # fmt: skip
    manifest = read_manifest(artifact)
    target_folder = (artifact.parent / "target").resolve()
    assert manifest.family == "medusa" and Path(manifest.target).resolve() == target_folder
    assert manifest.recipe == json.loads(json.dumps(recipe.to_dict()))

    target: Any = AutoModelForCausalLM.from_pretrained(manifest.target)
    tokenizer = AutoTokenizer.from_pretrained(manifest.target)
    drafter = load_drafter(artifact, target, tokenizer)
    tree = parse_static(str(artifact / "tree.json"))
    assert 2 <= tree.nodes <= 4 and [list(p) for p in tree.paths] == sorted(
        manifest.metrics["tree"], key=lambda path: (len(path), path)
    )
    # The written figure is that of the written drafter and tree.
    documents = load_documents(artifact.parent / "corpus", "held_out")
    prompts = held_out_prompts(tokenizer, documents, 2, 16, 0, part="validation")
    measured = measure_tau(target, drafter, tree, "greedy", prompts, 16)
    assert measured["tau"] == manifest.metrics["tau"]
    card = (artifact / "README.md").read_text()
    assert f"{measured['tau']:.2f}" in card and "headstart.load(" in card

    # τ of several trees, at two temperatures; that of the tree is what decoding gave.
    taus = {(each["tree"], each["temperature"]): each for each in manifest.metrics["taus"]}
    assert {(f"chain:{k}", t) for k in (1, 2) for t in (0, 1)} <= set(taus)
    assert {name for each in taus.values() for name in each} == {
        "tree",
        "nodes",
        "temperature",
        "tau",
        "tau_se",
        "rounds",
        "acceptance_by_depth",
    }  # and no text
    assert all(len(each["acceptance_by_depth"]) < each["nodes"] for each in taus.values())
    assert taus[tree.label, 0]["tau"] == measured["tau"] and taus[tree.label, 1]["tau"] >= 1
    assert f"| {tree.label} | {measured['tau']:.2f}" in card and manifest.metrics["dtype"] in card

    trained = manifest.trained
    rows = trained["rows"]
    assert rows["rows"] == rows["answers"] == rows["openings"] == 24
    assert "24, all from their first token on" in card and "](acceptance.png)" in card
    assert "| reads | the target's state after its last norm |" in card
    assert trained["data"]["writer"] == "own"
    assert trained["data"]["written_by"] == manifest.target_fingerprint
    assert trained["drafter"]["layers"] == {"by_input": [-1], "by_output": [-1]}
    assert trained["target"]["probe_losses"] == probe_losses(target)
    assert trained["chat"] == {"how": "text"} and "the longest of 32 tokens" in card

    speculator = headstart.load(manifest.target, artifact, tree=str(artifact / "tree.json"))
    prompt = prompts[0].tokens[None]
    found = speculator.generate(prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(found, target.generate(prompt, max_new_tokens=12, do_sample=False))


def test_run_adds_the_benchmark(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = pytest.importorskip("headstart.infer.measure.bench")
    calls = []

    def counted(*args: Any, **how: Any) -> dict[str, Any]:
        calls.append(args)
        return measure(*args, **how)

    measure = bench.bench
    monkeypatch.setattr(bench, "bench", counted)
    monkeypatch.setattr("headstart.infer.target.packing_pays", lambda model: True)
    recipe = load_recipe(trained)
    report = pipeline.run(recipe)
    assert report["artifact"] == str(recipe.folder / "heads")
    assert set(report["stage_seconds"]) == {*STAGES, "bench"}
    assert report["identical_to_plain"] and report["tau"] >= 1.0
    json.dumps(report, allow_nan=False)
    assert pipeline.run(recipe) == report and len(calls) == 1
    more = ["decode.prompts=2", "decode.sampled=0.7", "target.scratch.expected_loss=1"]
    recipe = load_recipe(trained, more[:2])
    first, sampled = ids(recipe.folder), pipeline.run(recipe)["sampled"]
    assert len(calls) == 3 and ids(recipe.folder) == first
    assert all(speculator.target.compile == "packed" for speculator, *_ in calls)
    assert sampled["temperature"] == 0.7 and sampled["rule"] == "coupled"
    assert sampled["identical_to_plain"] and "generate_ms_per_token" not in sampled
    report = pipeline.run(load_recipe(trained, more))
    assert report["target_loss"] > report["expected_loss"] == 1.0


def test_a_drafter_without_training_is_measured_all_the_same(tiny: Path, tmp_path: Path) -> None:
    untaught = yaml.safe_load(tiny.read_text()) | {"drafter": {"family": "lookup", "min_match": 2}}
    tiny.write_text(yaml.safe_dump(untaught))
    recipe = load_recipe(tiny)
    report = pipeline.run(recipe)
    assert set(report["stage_seconds"]) == {"corpus", "target", "heads", "bench"}
    assert report["identical_to_plain"] and report["identical_to_generate"] and report["tau"] > 1
    before = ids(recipe.folder)
    assert "distill" not in before and not (recipe.folder / "heads" / "checkpoints").exists()
    assert "train" not in before
    pipeline.train(load_recipe(tiny, ["train.max_steps=5"]))  # nothing is trained
    assert ids(recipe.folder) == before

    artifact = recipe.folder / "heads"
    manifest = read_manifest(artifact)
    assert manifest.metrics["seconds"] == manifest.metrics["steps"] == 0
    speculator = headstart.load(manifest.target, artifact)
    assert isinstance(speculator.drafter, Lookup) and speculator.drafter.config.min_match == 2
    assert str(speculator.tree) == str(StaticTree(manifest.metrics["tree"]))
    assert "| training |" not in (artifact / "README.md").read_text()


def test_a_drafter_of_texts_is_made_of_what_the_target_wrote(tiny: Path, tmp_path: Path) -> None:
    keeps = yaml.safe_load(tiny.read_text()) | {"drafter": {"family": "retrieval"}}
    tiny.write_text(yaml.safe_dump(keeps))
    recipe = load_recipe(tiny)
    report = pipeline.run(recipe)
    assert set(report["stage_seconds"]) == {"corpus", "target", "distill", "heads", "bench"}
    assert report["identical_to_plain"] and report["identical_to_generate"] and report["tau"] > 1
    before = ids(recipe.folder)
    pipeline.train(load_recipe(tiny, ["train.max_steps=5"]))  # no steps are made
    assert ids(recipe.folder) == before
    pipeline.train(load_recipe(tiny, ["drafter.max_tokens=50"]))
    assert ids(recipe.folder)["distill"] == before["distill"]

    artifact = recipe.folder / "heads"
    manifest = read_manifest(artifact)
    drafter: Any = headstart.load(manifest.target, artifact).drafter
    assert isinstance(drafter, Retrieval) and 0 < drafter.config.tokens <= 50
    assert manifest.trained["rows"]["supervised"] > drafter.config.places > 0
    assert "| training |" not in (artifact / "README.md").read_text()


def test_a_mistyped_family_answers_before_any_work(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="medusae"):
        pipeline.train(load_recipe(tiny, ["drafter.family=medusae"]))
    assert not (tmp_path / "runs" / "tiny" / "corpus").exists()


def test_stages_are_shared_with_another_run(tiny: Path, tmp_path: Path) -> None:
    """The second run writes nothing of the first's that is finished, whatever its settings."""
    root, own = tmp_path / "runs" / "tiny", tmp_path / "runs" / "own"
    second = ["name=own", "shares=tiny", "drafter.heads=1"]
    artifact = pipeline.train(load_recipe(tiny, second))  # what is missing is made there
    assert artifact == own / "heads" and set(ids(own)) == OWN
    made = ids(root)
    assert set(made) == {"corpus", "target", "distill"}
    assert Path(read_manifest(artifact).target).resolve() == (root / "target").resolve()
    pipeline.train(load_recipe(tiny))
    first, mine = ids(root), ids(own)
    assert first == made | {name: first[name] for name in OWN}
    pipeline.train(load_recipe(tiny, second))
    assert (ids(root), ids(own)) == (first, mine)

    report = pipeline.run(load_recipe(tiny, [*second, "distill.new_tokens=12"]))
    assert set(ids(own)) == {"distill", *OWN} and ids(root) == first
    assert set(report["stage_seconds"]) == {*STAGES, "bench"}
    assert report["held_out"] == str(root / "corpus" / "held_out.jsonl")
    # The same text as the first run's, but of another target.
    pipeline.train(load_recipe(tiny, [*second, "target.scratch.adamw_lr=1e-3"]))
    assert set(ids(own)) == {"target", "distill", *OWN} and ids(root) == first
    before = ids(own)
    pipeline.train(load_recipe(tiny, second), fresh=True)
    after = ids(own)
    assert {name for name in after if after[name] != before[name]} == OWN and ids(root) == first


def test_the_module_is_the_same_job(tiny: Path, tmp_path: Path) -> None:
    done = launch([sys.executable, "-m", "headstart.train", str(tiny), "drafter.heads=1"])
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""  # progress is for stderr
    assert all(f"{name}" in done.stderr for name in ("target", "distill", "heads"))
    folder = tmp_path / "runs" / "tiny" / "heads"
    assert read_manifest(folder).recipe["drafter"]["options"] == {"heads": 1}
    plan = f"--drafter {folder} --prompts {folder.parent / 'corpus' / 'held_out.jsonl'}"
    assert done.stderr.endswith(f"To try next:\n  headstart plan {plan}\n"), done.stderr
    before = ids(folder.parent)
    assert main([str(tiny), "drafter.heads=1"]) == 0 and ids(folder.parent) == before


KILLED = """
import sys, time
from headstart.train import main
{patch}
main(sys.argv[1:])
"""
IN_TARGET = """
import headstart.train.scratch_target as module
def stop(*args, **how):
    print("now", file=sys.__stdout__, flush=True)  # the run sends what is printed to stderr
    time.sleep(60)
module.evaluate = stop
"""
IN_HEADS = """
import headstart.train.fit.trainer as module
save = module.DrafterTrainer._save_checkpoint
def stop(self, *args):
    save(self, *args)
    print("now", file=sys.__stdout__, flush=True)  # the run sends what is printed to stderr
    time.sleep(60)
module.DrafterTrainer._save_checkpoint = stop
"""
IN_ARTIFACT = """
import headstart.train.drafter_stage as stage
def stop(*args):
    print("now", file=sys.__stdout__, flush=True)  # the run sends what is printed to stderr
    time.sleep(60)
stage.write_atomically = stop
"""


@pytest.mark.parametrize(
    ("patch", "kept"),
    [
        pytest.param(IN_TARGET, STAGES[:1], id="target", marks=pytest.mark.proof),
        pytest.param(IN_HEADS, STAGES[:3], id="heads", marks=pytest.mark.proof),
        pytest.param(IN_ARTIFACT, STAGES[:4], id="artifact", marks=pytest.mark.proof),
    ],
)
def test_sigkill_loses_no_finished_stage(
    tiny: Path, tmp_path: Path, patch: str, kept: tuple[str, ...]
) -> None:
    root = tmp_path / "runs" / "tiny"
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED.format(patch=patch), str(tiny)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT, text=True,
    )  # fmt: skip
    assert child.stdout is not None and child.stdout.readline() == "now\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    before = ids(root)
    assert set(before) == set(kept)
    pipeline.train(load_recipe(tiny))
    after = ids(root)
    assert set(after) == set(STAGES)
    assert {name: after[name] for name in kept} == before


WITNESS = """
import os, sys
from accelerate.state import PartialState
from headstart.train import main, pipeline
build = pipeline.Run.__init__
def noted(self, *args):
    build(self, *args)
    state = PartialState()
    line = f"{state.num_processes} {state.distributed_type.value} {self.args.world_size}"
    open(f"{os.environ['WITNESS']}-{state.process_index}", "w").write(line)
pipeline.Run.__init__ = noted
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.distributed
def test_two_processes_train_one_drafter(tiny: Path, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(WITNESS)
    config = str(ROOT / "recipes" / "launch" / "ddp_cpu.yaml")

    def job(*overrides: str) -> None:
        done = launch(
            [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config,
             str(script), str(tiny), *overrides],
            ACCELERATE_USE_CPU="true", WITNESS=str(tmp_path / "witness"), PYTHONPATH=str(ROOT),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        for rank in (0, 1):
            assert (tmp_path / f"witness-{rank}").read_text() == "2 MULTI_CPU 2"

    def weights(name: str) -> dict[str, torch.Tensor]:
        return load_file(tmp_path / "runs" / name / "heads" / "model.safetensors")

    # Two processes with half the batch each take the steps that one takes with all of it.
    job("name=two", "shares=tiny", "distill.temperature=0.7", "train.batch_size=2", *SAME)
    root = tmp_path / "runs" / "tiny"
    before = ids(root)
    assert set(before) == set(STAGES[:3]) and set(ids(tmp_path / "runs" / "two")) == OWN
    assert len(list((root / "distill").glob("*.tokens.npy"))) == 4
    recipe = load_recipe(tiny, ["distill.temperature=0.7", "train.batch_size=4", *SAME])
    pipeline.train(recipe)
    assert {name: id for name, id in ids(root).items() if name not in OWN} == before
    two = weights("two")
    for name, tensor in weights("tiny").items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-5)
