"""The documents are true: their links resolve, and the worked example of a drafter runs."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from headstart.heads import FAMILIES, FINAL, Family, TrainableDrafter
from headstart.heads.core import capture
from headstart.infer import Speculator
from headstart.train.recipe import load_recipe
from tests.support.paths import ROOT
from tests.support.tiny import prompts, tiny

EXAMPLE = (ROOT / "docs" / "adding-a-drafter.md").read_text(encoding="utf-8")


def test_links_resolve() -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert len(documents) > 10
    for path in documents:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            assert (path.parent / link).exists(), f"{path}: {link}"


def test_lists_are_lists_on_the_site_too() -> None:
    """Python-Markdown reads less as a list than GitHub does, and shows the rest as text."""
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
        loose = re.search(r"^\n {1,3}\S.*", text, re.MULTILINE)
        assert not loose, f"{path}: indent what belongs to an item by four spaces: {loose[0]}"
        joined = re.search(r"^[^-*#>|\s\d].*\n[-*] .*", text, re.MULTILINE)
        assert not joined, f"{path}: an empty line before a list: {joined[0]}"


def code(language: str) -> str:
    """The example's first block in a language."""
    found = re.search(rf"```{language}\n(.*?)```", EXAMPLE, re.DOTALL)
    assert found
    return found[1]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "running_sum.py").write_text(code("python"))
    spec = importlib.util.spec_from_file_location("running_sum", tmp_path / "running_sum.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "running_sum", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def drafter(module: ModuleType) -> TrainableDrafter:
    config = module.RunningSumConfig.for_target(tiny("llama"), depths=3)
    drafter = module.RunningSum(config).double().bind(tiny("llama")).eval()
    torch.nn.init.normal_(drafter.mix.weight, std=0.3)
    return drafter


@pytest.mark.parametrize("tree", ["chain:3", "cartesian:2,2", "best-first:8,3,3"])
def test_the_example_decodes_exactly(drafter: TrainableDrafter, tree: str) -> None:
    ids, mask = prompts([9, 4, 7])
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    speculator = Speculator(tiny("llama"), drafter, tree=tree)
    assert torch.equal(speculator.generate(ids, **options), tiny("llama").generate(ids, **options))
    assert speculator.stats.rounds > 0


@torch.no_grad()
def test_the_example_learns_what_it_decodes_with(drafter: TrainableDrafter) -> None:
    """The logits of training are those of `begin` and `extend`, at every position and depth."""
    tokens, depths = prompts([12, 12])[0], 3
    features = capture(tiny("llama"), [FINAL], tokens)  # [B, T, D]
    where = torch.zeros_like(tokens, dtype=torch.bool)
    where[:, 2:8] = True
    states = drafter.draft_hidden_states(features, tokens, where, depths)  # [K, M, D]
    one = torch.ones(1, dtype=torch.long)
    for position, (row, at) in enumerate(where.nonzero().tolist()):
        state = drafter.start(1, 32)
        text = tokens[row : row + 1]
        step = drafter.begin(
            state, features[row : row + 1, at : at + 1], text[:, at + 1 : at + 2], one
        )
        for depth in range(1, depths + 1):
            assert step.logits is not None
            expected = drafter.draft_logits(depth)(states[depth - 1, position])
            assert torch.allclose(step.logits[0, 0], expected)
            parent = torch.full((1, 1), depth - 2)
            step = drafter.extend(state, text[:, at + depth + 1 : at + depth + 2], parent)


def test_the_examples_recipe_parses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Family("running_sum", "running_sum:RunningSum", small={"depths": 3})
    assert '"running_sum:RunningSum", small={"depths": 3}' in EXAMPLE
    monkeypatch.setitem(FAMILIES, "running_sum", record)
    (tmp_path / "running-sum.yaml").write_text(code("yaml"))
    recipe = load_recipe(tmp_path / "running-sum.yaml")
    assert recipe.name == "running-sum" and recipe.drafter.options == {"depths": 4}
