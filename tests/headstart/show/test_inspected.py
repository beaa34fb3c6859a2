"""`headstart inspect --tree` and `--prompt`: trees and rounds as they are drawn."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headstart.cli import main
from headstart.heads import Manifest, OptionError, fingerprint, save_drafter
from headstart.heads.artifacts.plan import Plan, device_name, write_plan
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.infer import parse_tree
from headstart.infer.replay import ReplayedNode, ReplayedRound
from headstart.show.trees import draw_round, draw_shape
from tests.support.bytewise import save_target


def rows_of(drawn: Any, width: int = 80) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO(), markup=False)
    console.print(drawn)
    return [row.rstrip() for row in console.export_text().splitlines()]


def test_a_static_tree_with_what_a_plan_knows() -> None:
    """A share is that of the rank at its depth; how often a round comes there is the product."""
    rows = rows_of(draw_shape(parse_tree("[[0],[1],[0,0]]"), [[0.6, 0.3], [0.5, 0.1]]))
    assert rows[0] == "root · sparse 2/1 · 4 nodes"
    assert rows[1].endswith("depth 1 · rank 0 · 60% after its parent, 60.0% of rounds")
    assert rows[2].startswith("│") and "depth 2 · rank 0 · 50%" in rows[2]
    assert rows[2].endswith("30.0% of rounds") and "rank 1 · 30%" in rows[3] and len(rows) == 4
    deeper = rows_of(draw_shape(parse_tree("chain:3"), [[0.6], [0.5]]))
    assert deeper[-1].endswith("50% after its parent, 15.0% of rounds")  # below the last level


def test_a_union_has_a_branch_for_each_drafter() -> None:
    rows = rows_of(draw_shape(parse_tree("chain:2+cartesian:2")))
    assert [row[4:] for row in rows if "drafter" in row] == [
        "drafter 1 · chain:2", "drafter 2 · cartesian:2",
    ]  # fmt: skip
    assert sum("depth 1" in row for row in rows) == 3 and "%" not in "".join(rows)


def test_a_tree_that_grows_anew_is_not_drawn() -> None:
    with pytest.raises(OptionError, match="grown anew in each round; give --prompt"):
        draw_shape(parse_tree("best-first:8,3,3"))


def test_a_round() -> None:
    root = ReplayedNode(0, -1, 65, 0, 0, -1, None, None, True, "")
    nodes = [
        ReplayedNode(1, 0, 66, 1, 0, 0, 0.25, 0.5, True, "the target chose it"),
        ReplayedNode(2, 0, 67, 1, 1, 1, None, 0.125, False, "the target chose 'B' (p 0.50)"),
        ReplayedNode(3, 1, 68, 2, 0, 0, 1.0, 0.0, False, "the target chose 'X' (p 0.90)"),
    ]
    found = ReplayedRound("greedy", [65], [root, *nodes], [66, 88], 0.9)
    rows = rows_of(draw_round(found, lambda token: repr(chr(token)), 2))
    assert rows == [
        "'A' the last token of the text",
        "├── ✓ 'B' drafter 1  q 0.25  p 0.50  the target chose it",
        "│   └── ✗ 'D' drafter 1  q 1.00  p 0.00  the target chose 'X' (p 0.90)",
        "└── ✗ 'C' drafter 2  q –  p 0.12  the target chose 'B' (p 0.50)",
    ]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspected")
    model, _ = save_target(folder / "target")
    drafter = Medusa(MedusaConfig.for_target(model, heads=2)).bind(model)
    manifest = Manifest("medusa", str(folder / "target"), fingerprint(model))
    save_drafter(drafter, folder / "heads", manifest, "# card\n")
    (folder / "heads" / "tree.json").write_text("[[0],[1],[0,0]]")
    return folder / "heads"


def test_the_artifact_s_tree(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(artifact), "--tree"]) == 0
    printed = capsys.readouterr().out
    assert "sparse 2/1" in printed and "there is no plan yet" in printed and "\x1b" not in printed
    assert main(["inspect", str(artifact), "--tree", "chain:2"]) == 0
    assert "chain:2 · 3 nodes" in capsys.readouterr().out
    assert main(["inspect", str(artifact), "--tree", "chain:1+cartesian:2", "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["parts"]
    assert parts[1]["nodes"] == [{"path": [0]}, {"path": [1]}]
    assert main(["inspect", str(artifact), "--tree", "beam:2,2"]) == 2
    import torch

    plan = Plan(
        device_name(torch.device("cpu")), "float32", 1, "chain:2", [[0], [0, 0]], 2.0, 1.5,
        [[0.5, 0.25], [0.5, 0.1]], {}, [], 7, 32,
    )  # fmt: skip
    path = write_plan(artifact, plan)
    try:
        assert main(["inspect", str(artifact), "--tree"]) == 0
        printed = capsys.readouterr().out
        assert "25.0% of rounds" in printed and "measured on 7 prompts" in printed
        assert main(["inspect", str(artifact), "--tree", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["tree"], found["nodes"]) == ("chain:2", 3)
        nodes = [{"path": [0], "after_parent": 0.5, "of_rounds": 0.5}]
        nodes += [{"path": [0, 0], "after_parent": 0.5, "of_rounds": 0.25}]
        assert found["parts"] == [{"tree": "chain:2", "nodes": nodes}]
        assert found["measured_on"] == {"prompts": 7, "device": plan.device}
    finally:
        path.unlink()


def test_a_round_on_a_prompt(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["inspect", str(artifact), "--prompt", "abcabc", "--round", "2"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "round 2, rule greedy" in printed and "drafted tokens accepted" in printed
    sampled = [*command, "--temperature", "1", "--seed", "2", "--rule", "rejection", "--json"]
    assert main(sampled) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rule"] == "rejection" and len(found["nodes"]) == 4
    assert all(0 <= node["drafted"] <= 1 for node in found["nodes"][1:])
    assert "needs a draw below" in found["nodes"][1]["why"]
    target = str(artifact.parent / "target")
    lookup = ["inspect", "lookup", "--target", target, "--prompt", "abcabc", "--tree", "chain:2"]
    assert main(lookup) == 0
    assert "round 1, rule greedy, chain:2" in capsys.readouterr().out
    assert main(["inspect", str(artifact), "--prompt", ""]) == 2
