"""What the suite measures with random weights: shapes, the parts of a round, costs."""

from typing import Any

import pytest
import torch

from benchmarks.gpu import round_profile
from benchmarks.gpu.bandwidth import copy_bandwidth
from benchmarks.gpu.costs import compiled_costs, plain_costs, usual_tree
from benchmarks.gpu.round_profile import profile_rounds, state_bytes
from benchmarks.gpu.shapes import SHAPES, random_drafter, random_target, read_bytes, weight_bytes
from headstart.heads import FAMILIES
from headstart.infer import Speculator
from headstart.infer.graphs import RoundGraphs
from headstart.infer.trees.static import StaticTree
from tests.support.tape import Tape

CPU = torch.device("cpu")


def toy() -> Any:
    return random_target(SHAPES["toy"], CPU, torch.float32)


def test_shapes_are_made_on_their_device_in_their_dtype() -> None:
    meta = torch.device("meta")
    sizes = {"1b": (1.24e9, 1.24e9), "8b": (8.03e9, 8.03e9 - 128_256 * 4096)}
    for name, (parameters, read) in sizes.items():
        model = random_target(SHAPES[name], meta, torch.bfloat16)
        kinds = {(p.device.type, p.dtype) for p in model.parameters()}
        assert kinds == {("meta", torch.bfloat16)}
        assert model.num_parameters() == pytest.approx(parameters, rel=0.01)
        # An embedding that is the output layer as well is read whole.
        assert read_bytes(model) == pytest.approx(2 * read, rel=0.01)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_a_random_drafter_that_decodes(name: str) -> None:
    target = toy().to(torch.bfloat16)
    drafter = random_drafter(name, target)
    weights = list(drafter.parameters())
    assert {p.dtype for p in weights} <= {torch.bfloat16}
    assert all(p.any() for p in weights) and (weight_bytes(drafter) > 0) == bool(weights)
    width = drafter.config.to_dict().get("draft_vocab_size") or 0
    assert width <= 512 // 4
    ids = torch.arange(20).view(1, -1)
    decoder = Speculator(target, drafter, tree="chain:2")
    decoder.generate(ids, max_new_tokens=6, do_sample=False)
    assert decoder.stats.rounds > 0


def test_the_parts_of_a_round_are_the_round() -> None:
    target = toy()
    drafter = random_drafter("draft_model", target)
    decoder = Speculator(target, drafter, tree="cartesian:2,2")
    parts, state = profile_rounds(decoder, torch.arange(24).view(1, -1), rounds=1)
    inside = sum(value for name, value in parts.items() if name != "round")
    assert parts["round"] == pytest.approx(inside)
    assert all(parts[name] > 0 for name in ("round", "draft", "grow", "verify", "commit"))
    # One layer's keys and values of 2 heads of 16, float32: at least those of the text.
    assert state >= 2 * 2 * 16 * 4 * 24
    assert "verify" not in vars(decoder.target) and "begin" not in vars(drafter)


class Ticks:
    """A stopwatch on the device, which a mark moves on by one, also in a round that is replayed."""

    now = torch.zeros(1)

    def __init__(self, device: torch.device):
        pass

    def mark(self) -> torch.Tensor:
        self.now.add_(1)
        return self.now.clone()

    def between(self, begin: torch.Tensor, end: torch.Tensor) -> float:
        assert begin <= end and self.now - end <= 16, "marks of an earlier round"
        return float(end - begin)


@pytest.mark.parametrize("tree", ["cartesian:2,2", "chain:1"])
def test_captured_rounds_are_taken_apart_where_they_run(
    tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marks are replayed with the round, so none of them is an earlier one's, of twelve ticks."""
    target, tape = toy(), Tape()
    monkeypatch.setattr(round_profile, "Stopwatch", Ticks)
    monkeypatch.setattr(RoundGraphs, "on", lambda device: RoundGraphs(tape))
    drafter = random_drafter("draft_model", target)
    found = []
    for graphs in (True, False):
        decoder = Speculator(target, drafter, tree=tree, graphs=graphs)
        found.append(profile_rounds(decoder, torch.arange(24).view(1, -1), rounds=16)[0])
    replayed, written = found
    assert tape.replayed >= 16 > tape.taped
    inside = ("draft", "grow", "verify", "commit")
    assert [replayed[part] for part in inside] == [written[part] for part in inside]
    # A mark at both ends of a round as a whole, of which eight share one pair.
    assert replayed["round"] == written["round"] - 1 + 1 / 8
    assert sum(replayed[part] for part in (*inside, "accept")) == replayed["round"]


def test_a_state_counts_every_storage_once() -> None:
    text = torch.zeros(4, 8)
    state = {"text": text, "views": [text[0], (text[1],)], "layer": torch.nn.Linear(9, 9)}
    assert state_bytes(state) == 128 and state_bytes(None) == 0


def test_the_usual_tree_is_one() -> None:
    tree = StaticTree(usual_tree(64, 5))
    assert (tree.nodes, tree.max_depth) == (64, 5)


def test_copies_count_what_is_read_and_written() -> None:
    found = copy_bandwidth(CPU, [1, 2], repeats=2)
    assert set(found["by_megabytes"]) == {1, 2}
    assert found["gb_per_s"] == found["by_megabytes"][2] > 0


def test_plain_tokens_read_weights_and_cache() -> None:
    found = plain_costs(toy(), context=40, new_tokens=4, repeats=1, megabytes=1)
    assert found["cache_bytes_per_token"] == 40 * (2 * 2 * 2 * 16 * 4)
    weights = found["weight_bytes_per_token"]
    assert found["bytes_per_token"] == weights + found["cache_bytes_per_token"]
    assert all(found[f"{who}_ms_per_token"] > 0 for who in ("plain", "generate", "bare"))
    assert found["peak_bytes"] is None


def test_compiled_tokens_read_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    true = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda run, **how: compiled.append(how) or true(run, backend="eager")
    )
    found = compiled_costs(toy(), context=40, new_tokens=4, repeats=1, megabytes=1)
    plain = plain_costs(toy(), context=40, new_tokens=4, repeats=1, megabytes=1)
    assert compiled == [{"dynamic": False, "mode": "default"}]
    assert found["bytes_per_token"] == plain["bytes_per_token"]
    times = ("compiled_ms_per_token", "plain_ms_per_token", "compile_seconds")
    assert all(found[name] > 0 for name in times)
