"""Two processes train on targets with recurrent layers what one does, and decode as it does."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import headstart
from headstart.train import pipeline
from headstart.train.recipe import parse_recipe
from tests.support.launches import ENGINES, TOLD, TYPES, Job, check_close, metrics
from tests.support.recurrent_runs import recipe_of, save_target

pytestmark = pytest.mark.distributed

DRAFTERS: dict[str, dict[str, Any]] = {
    "medusa": {"heads": 2},
    "eagle": {"depths": 2},
    "mtp": {"depths": 2},
    "draft_model": {"layers": [1, 2]},  # a layer that attends, and one that does not
    "medusa2": {"heads": 2, "rank": 4, "heads_first": 0.4, "dropout": 0.0},
}
TOGETHER = "divided"
"""Of runs whose processes divide the target's layers."""
OTHERS = (
    *("qwen3-next", "lfm2 experts", "kimi-linear", "nemotron-h", "zamba2", "olmo-hybrid"),
    *("granite hybrid", "qwen3.5 experts"),
)
GROUPS: dict[str, list[tuple[str, str]]] = {
    "few": [("bamba", "medusa2"), ("qwen3.5", "draft_model")],
    **{name: [(name, kind) for kind in DRAFTERS] for name in ("qwen3.5", "bamba", "lfm2")},
    "others": [*((name, "medusa2") for name in OTHERS), ("qwen3.5 experts", "eagle")],
    TOGETHER: [("qwen3.5", kind) for kind in DRAFTERS if kind != "medusa2"],
}
"""Targets and families of the runs that a launch trains one after another."""
STEPS = 4


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recurrent")


def run_name(engine: str | None, group: str, name: str, kind: str) -> str:
    return f"{engine or 'one'}-{group}-{name}-{kind}".replace(".", "-").replace(" ", "-")


@pytest.fixture(scope="module")
def trained(root: Path) -> Callable[..., list[list[dict[str, Any]]]]:
    """What each process saw of each run; the text of a target is written by one process, once."""
    written: set[str] = set()

    def run_of(engine: str | None, group: str, name: str, kind: str) -> dict[str, Any]:
        target, base = root / name, run_name(None, "shared", name, "text")
        if name not in written:
            text = recipe_of(root, save_target(target, name), "medusa", name=base, seed=3)
            pipeline.write_text(parse_recipe(text), fresh=False)
            written.add(name)
        batch = 4 if engine in (None, TOGETHER) else 2
        rows = {"batch_size": batch, "max_steps": STEPS, "eval_every": 2}
        return recipe_of(
            root, target, kind, DRAFTERS[kind], name=run_name(engine, group, name, kind),
            shares=base, seed=3, train=rows, decode={"validation_prompts": 5},
            target={"tp_plan": "auto"} if engine == TOGETHER else {},
        )  # fmt: skip

    @cache
    def train(engine: str | None, group: str) -> list[list[dict[str, Any]]]:
        runs = [run_of(engine, group, *each) for each in GROUPS[group]]
        launch = "ddp_cpu" if engine == TOGETHER else engine
        return Job(root / f"{engine or 'one'}-{group}", runs, launch).run()

    return train


def launches() -> list[Any]:
    """A few runs of one engine by default, and the others as proofs."""
    found = [(engine, group) for engine in ENGINES for group in GROUPS if group != TOGETHER]
    found.append((TOGETHER, TOGETHER))
    quick = ("fsdp2", "few")
    return [pytest.param(*each, marks=() if each == quick else pytest.mark.proof) for each in found]


@pytest.mark.parametrize(("engine", "group"), launches())
def test_two_processes_train_and_decode_as_one(
    engine: str, group: str, root: Path, trained: Any
) -> None:
    """Weights up to rounding, τ of the same texts; what is saved decodes the target's own text."""
    trained(None, group)
    seen = trained(engine, group)
    assert len(seen) == 2
    decoded = [3, 2] if engine in ("ddp_cpu", "zero2") else [5, 5]
    for number, (name, kind) in enumerate(GROUPS[group]):
        one, two = run_name(None, group, name, kind), run_name(engine, group, name, kind)
        # Norms that are stored as their distance from 1 are near 0, and so is what they learn.
        check_close(root, one, two, kind, times=100 if kind == "draft_model" else 10)
        ran_as = {(process[number]["type"], process[number]["processes"]) for process in seen}
        assert ran_as == {("MULTI_CPU" if engine == TOGETHER else TYPES[engine], 2)}
        told = "tensor parallelism" if engine == TOGETHER else TOLD[engine]
        found = metrics(root, two)
        assert found["ran_on"] == f"{told}, 2 processes, cpu, float32"
        assert [process[number]["decoded"] for process in seen] == decoded
        assert found["real_tau"] == metrics(root, one)["real_tau"]
        check_text(root / name, root / "runs" / two / "heads")


def check_text(target: Path, artifact: Path) -> None:
    """A drafter's text is that of the target, with the drafter's adapter where it has one."""
    model: Any = AutoModelForCausalLM.from_pretrained(target).eval()
    speculator = headstart.load(model, artifact, tree="[[0],[1],[0,0]]")
    ids = torch.tensor([[5, 9, 33, 70, 41, 2, 8], [0, 0, 0, 61, 19, 77, 30]])
    how: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    how["attention_mask"] = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
    assert torch.equal(speculator.generate(ids, **how), model.generate(ids, **how))
