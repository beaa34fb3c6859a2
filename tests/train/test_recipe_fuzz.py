"""Damaged recipes: they are refused on a line, or a run of them could begin."""

import copy
import json
import random
import time
from pathlib import Path

import pytest
import yaml

from headstart.terminal import one_line
from headstart.train.checks.early import check_run
from headstart.train.recipe import load_recipe
from tests.support.mutations import REFUSED, mutate, mutate_bytes, tried
from tests.support.recipes import TINY

DRAFTERS = [
    {"family": "medusa", "heads": 2, "layers": 1, "output": "own"},
    {"family": "hydra", "heads": 2, "layers": 1, "prefix": True, "dropout": 0.1},
    {"family": "eagle3", "depths": 2, "output": "trimmed", "draft_vocab_size": 50},
    {"family": "draft_model", "layers": [0], "lora": {"rank": 4, "modules": ["q_proj"]}},
    {"family": "medusa2", "heads": 2, "rank": 4, "modules": [], "ramp": "sine"},
    {"family": "redrafter", "depths": 2, "exit_dim": 0},
    {"family": "mlp_speculator", "heads": 2, "cell": "lstm", "inner_dim": 16, "tied": True},
    {"family": "lookup", "max_match": 4, "matches": 2},
]


def recipes(folder: Path) -> list[dict]:
    """Recipes that work, with most sections written out."""
    (folder / "chats.jsonl").write_text('{"prompt": "a b"}\n' * 30)
    more = {
        "seed": 1, "output": str(folder / "runs"),
        "corpus": TINY["corpus"] | {"dedup": True, "on_error": "skip"},
        "distill": TINY["distill"] | {"writer": "own", "temperature": 0.0, "max_length": 40},
        "train": TINY["train"] | {
            "learning_rate": 1e-3, "gradient_accumulation": 2, "packing": False,
            "warmup_ratio": 0.1, "dataloader_workers": 0, "report_to": [],
        },
        "hardware": {"gpus": 1, "memory_gb": 80.0},
    }  # fmt: skip
    return [TINY | more | {"drafter": drafter} for drafter in DRAFTERS]


@pytest.mark.parametrize("cases", [30, pytest.param(600, marks=pytest.mark.proof)])
def test_a_damaged_recipe_is_refused_or_can_run(cases: int, tmp_path: Path) -> None:
    whole, path, fine = recipes(tmp_path), tmp_path / "recipe.yaml", 0

    def begin() -> object:
        return check_run(load_recipe(path))

    for case in range(-len(whole), cases):
        draw = random.Random(case)
        document = copy.deepcopy(whole[case % len(whole)])
        as_yaml = draw.random() < 0.7
        if case >= 0 and as_yaml:
            for _ in range(draw.randrange(1, 3)):
                mutate(document, draw)
        text = yaml.safe_dump(document, sort_keys=False).encode()
        path.write_bytes(text if case < 0 or as_yaml else mutate_bytes(text, draw))
        started = time.process_time()
        try:
            found = begin() if case < 0 else tried(begin)
            assert time.process_time() - started < 20, "it takes too long"
        except BaseException:
            print(f"case {case}: {json.dumps(document)[:2000]}")
            raise
        fine += found is not None
    assert len(whole) < fine < cases
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "override",
    [
        "drafter.heads=1000000", "drafter.layers=1000000000", "train.batch_size=1000000000",
        "target.scratch.layers=1000000000", "train.dataloader_workers=1000000",
        "distill.shards=1000000000000", "target.scratch.hidden_size=1000000000000",
    ],
)  # fmt: skip
def test_sizes_that_no_run_has_are_refused_before_it(override: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipes(tmp_path)[0]))
    with pytest.raises(REFUSED) as caught:
        check_run(load_recipe(path, [override]))
    assert 20 < len(one_line(caught.value)) < 700
