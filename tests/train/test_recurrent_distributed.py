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
RUNS = [
    *(("qwen3.5", kind) for kind in DRAFTERS),
    *(("bamba", kind) for kind in DRAFTERS),
    *(("lfm2", kind) for kind in DRAFTERS),
    *((name, "medusa2") for name in ("qwen3-next", "qwen3.5 experts", "lfm2 experts")),
    *((name, "medusa2") for name in ("kimi-linear", "falcon-h1", "nemotron-h", "zamba2")),
]
QUICK = {("qwen3.5 experts", "medusa2"), ("bamba", "eagle"), ("bamba", "medusa2"),
         ("lfm2", "draft_model")}  # fmt: skip
STEPS = 6
TOGETHER = "parts"
"""Of a run whose processes divide the target's layers."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recurrent")


def chosen(all_of_them: bool) -> list[tuple[str, str]]:
    return [each for each in RUNS if (each in QUICK) != all_of_them]


def run_name(engine: str | None, name: str, kind: str) -> str:
    return f"{engine or 'one'}-{name}-{kind}".replace(".", "-").replace(" ", "-")


@pytest.fixture(scope="module")
def trained(root: Path) -> Callable[..., list[list[dict[str, Any]]]]:
    """What each process saw of each run; the text of a target is written by one process, once."""
    written: set[str] = set()

    def run_of(engine: str | None, name: str, kind: str) -> dict[str, Any]:
        target, base = root / name, run_name(None, name, "text")
        if name not in written:
            text = recipe_of(root, save_target(target, name), "medusa", name=base, seed=3)
            pipeline.write_text(parse_recipe(text), fresh=False)
            written.add(name)
        batch = 4 if engine in (None, TOGETHER) else 2
        rows = {"batch_size": batch, "max_steps": STEPS, "eval_every": 3}
        return recipe_of(
            root, target, kind, DRAFTERS[kind], name=run_name(engine, name, kind), shares=base,
            seed=3, train=rows, decode={"validation_prompts": 5},
            target={"tp_plan": "auto"} if engine == TOGETHER else {},
        )  # fmt: skip

    @cache
    def train(engine: str | None, *pairs: tuple[str, str]) -> list[list[dict[str, Any]]]:
        runs = [run_of(engine, *each) for each in pairs]
        launch = "ddp_cpu" if engine == TOGETHER else engine
        return Job(root / f"{engine or 'one'}-{len(pairs)}", runs, launch).run()

    return train


def engines() -> list[Any]:
    """Two of them on few targets by default, and the others as proofs."""
    quick = [pytest.param(engine, False) for engine in ("ddp_cpu", "zero3")]
    others = [(engine, False) for engine in ("zero2", "fsdp2")] + [(each, True) for each in ENGINES]
    return quick + [pytest.param(*each, marks=pytest.mark.proof) for each in others]


@pytest.mark.parametrize(("engine", "all_of_them"), engines())
def test_two_processes_train_and_decode_as_one(
    engine: str, all_of_them: bool, root: Path, trained: Any
) -> None:
    """Weights up to rounding, τ of the same texts; what is saved decodes the target's own text."""
    pairs = chosen(all_of_them)
    trained(None, *pairs)
    told = f"{TOLD[engine]}, 2 processes, cpu, float32"
    shared = engine in ("ddp_cpu", "zero2")
    decoded = [3, 2] if shared else [5, 5]
    check(root, engine, pairs, trained(engine, *pairs), TYPES[engine], told, decoded)


@pytest.mark.proof
def test_processes_that_divide_a_target_train_what_one_does(root: Path, trained: Any) -> None:
    """By transformers' plan for it, whose recurrent layers are divided, too."""
    pairs = [each for each in chosen(True) if each[0] == "qwen3.5" and each[1] != "medusa2"]
    trained(None, *chosen(True))
    told = "tensor parallelism, 2 processes, cpu, float32"
    check(root, TOGETHER, pairs, trained(TOGETHER, *pairs), "MULTI_CPU", told, [5, 5])


def check(
    root: Path,
    engine: str,
    pairs: list[tuple[str, str]],
    seen: list[list[dict[str, Any]]],
    kind_of_state: str,
    told: str,
    decoded: list[int],
) -> None:
    assert len(seen) == 2
    for number, (name, kind) in enumerate(pairs):
        one, two = run_name(None, name, kind), run_name(engine, name, kind)
        # Norms that are stored as their distance from 1 are near 0, and so is what they learn.
        check_close(root, one, two, kind, times=30 if kind == "draft_model" else 10)
        assert {process[number]["type"] for process in seen} == {kind_of_state}
        found = metrics(root, two)
        assert found["ran_on"] == told
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
