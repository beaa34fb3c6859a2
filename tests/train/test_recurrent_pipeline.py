"""Whole runs on targets with recurrent layers, from text to an artifact that decodes exactly."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import headstart
from headstart.heads import FAMILIES
from headstart.heads.artifacts.manifest import read_manifest
from headstart.train import pipeline
from headstart.train.checks.early import check_run
from headstart.train.checks.inspect import inspect_run
from headstart.train.data.training_rows import Rows
from headstart.train.recipe import Recipe, parse_recipe
from tests.support.recurrent_runs import recipe_of, save_target
from tests.support.tiny import one_line

CHOSEN: dict[str, dict[str, Any]] = {"draft_model": {"layers": [0, 1, 2]}}  # of both kinds
TRAINED = [
    *(("qwen3.5", name) for name in ("medusa2", "eagle3", "hydra", "draft_model", "mtp")),
    *(("falcon-h1", name) for name in ("medusa2", "eagle", "medusa", "dflash")),
    *(("lfm2", name) for name in ("redrafter", "draft_model")),
    *(("bamba", name) for name in ("medusa2", "mtp")),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a random target in float32, with a tokenizer."""

    @cache
    def folder_of(name: str) -> Path:
        return save_target(tmp_path_factory.mktemp("targets") / name, name)

    return folder_of


def recipe(root: Path, target: Path, family: str, drafter: Any = None, **sections: Any) -> Recipe:
    options = {**FAMILIES[family].small, **CHOSEN.get(family, {}), **(drafter or {})}
    return parse_recipe(recipe_of(root, target, family, options, **sections))


def runs() -> list[Any]:
    """A delta rule and a state space by default, and all of them as proofs."""
    quick = {("qwen3.5", "mtp"), ("falcon-h1", "medusa2")}
    return [
        pytest.param(*each, marks=() if each in quick else pytest.mark.proof) for each in TRAINED
    ]


@pytest.mark.parametrize(("name", "family"), runs())
def test_a_run_ends_in_an_artifact_that_decodes_exactly(
    name: str, family: str, saved: Callable[[str], Path], tmp_path: Path, no_pictures: None
) -> None:
    target = saved(name)
    given = recipe(tmp_path, target, family)
    artifact = pipeline.train(given)
    metrics = read_manifest(artifact).metrics
    assert metrics["steps"] == 4 and metrics["tau"] >= 1
    rows = Rows.load(given.folder / "distill")
    model: Any = AutoModelForCausalLM.from_pretrained(target).eval()
    for number in (0, len(rows) - 1):  # what the target wrote through our runtime is its own text
        row = rows.row(number)
        prompt = torch.tensor(row.prompt()[None].astype("int64"))
        new = len(row.tokens) - prompt.shape[1]
        plain = model.generate(prompt, max_new_tokens=new, do_sample=False)
        assert plain[0].tolist() == row.tokens.tolist()
    speculator = headstart.load(model, artifact, tree="[[0],[1],[0,0]]")
    ids = torch.tensor([[5, 9, 33, 70, 41, 2, 8], [0, 0, 0, 61, 19, 77, 30]])
    mask = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
    found = speculator.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    plain = model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    assert torch.equal(found, plain)


def test_the_benchmark_of_a_run_measures_it(
    saved: Callable[[str], Path], tmp_path: Path, no_pictures: None
) -> None:
    report = pipeline.run(recipe(tmp_path, saved("falcon-h1"), "medusa"))
    assert report["tau"] >= 1 and report["round_parts_ms"].keys() >= {"verify", "draft", "loop"}


def test_packed_rows_are_refused_before_the_first_stage(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    target = saved("lfm2")
    given = recipe(tmp_path, target, "medusa", train={"packing": True})
    with pytest.raises(ValueError, match=r"train\.packing is true, but .* recurrent lay") as error:
        check_run(given)
    one_line(error.value)
    check_run(recipe(tmp_path, target, "medusa", train={"packing": None}))


SOUND = {"loss mask", "labels", "features", "held-out prompts"}
"""Others ask whether the target was trained."""


@pytest.mark.parametrize("name", ["qwen3.5", pytest.param("falcon-h1", marks=pytest.mark.proof)])
def test_a_check_of_a_few_steps_finds_nothing_wrong(
    name: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    found = inspect_run(recipe(tmp_path, saved(name), "eagle3"))
    said = {finding.name: finding.fine for finding in found.findings if finding.name in SOUND}
    assert len(said) == len(SOUND) and False not in said.values(), found.findings
    assert found.pace is not None and found.pace.step_s > 0


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("mtp", {}, r"falcon_h1 has no layer that attends without a recurrent part.*use eagle3"),
        ("medusa2", {"modules": ["none_such"]}, r"cannot be adapted .*some of .*in_proj, k_proj"),
    ],
)
def test_a_drafter_that_cannot_be_made_is_refused_before_the_first_stage(
    family: str,
    options: dict[str, Any],
    said: str,
    saved: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    target = saved("falcon-h1")
    with pytest.raises(ValueError, match=said) as error:
        check_run(recipe(tmp_path, target, family, drafter=options))
    one_line(error.value)


def test_shards_of_a_target_that_changes_its_logits_are_refused_before_the_first_stage(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """Under ZeRO-3, where no forward can tell how; but not for a factor of 1, or where no loss
    asks for the target's distribution."""
    target, given = saved("falcon-h1"), {"loss": "cross_entropy"}
    for family, train in (("eagle", {}), ("medusa2", given)):
        run = recipe(tmp_path, target, family, train=train)
        with pytest.raises(
            ValueError, match=r"has lm_head_multiplier 0.4 .* ZeRO-2 or DD"
        ) as error:
            check_run(run, 2, sharded=True)
        one_line(error.value)
        check_run(run, 2)
    check_run(recipe(tmp_path, target, "eagle", train=given), 2, sharded=True)
    check_run(recipe(tmp_path, saved("granite hybrid"), "medusa2"), 2, sharded=True)
