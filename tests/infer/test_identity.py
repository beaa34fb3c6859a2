"""Greedy output equals `generate` of transformers, in float64, whatever the drafter proposes."""

from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from headstart.heads.core import masks, probe
from headstart.infer import Speculator, StaticTree, target
from tests.support.covering import covering
from tests.support.scripted import SHAPES, Cached, make, rows_of
from tests.support.tiny import CONFIGS, prompts, tiny

NEW = 22
LENGTHS = {1: [11], 4: [13, 7, 10, 3]}
TREES = {
    "plain": "plain",
    "chain": "chain:3",
    "cartesian": "cartesian:3,2,1",
    "sparse": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0, 0]],
}


@cache
def reference(name: str, batch: int, stop: bool) -> tuple[Tensor, Tensor, Tensor, int | None]:
    """Prompts, mask, what `generate` makes of them, and the token that ends a row."""
    ids, mask = prompts(LENGTHS[batch])
    eos = None
    if stop:  # what the first row writes for the first time as late as possible before place 15
        first_row = continuation(name, batch)[0, :15].tolist()
        eos = max(first_row, key=first_row.index)
    out = tiny(name).generate(ids, attention_mask=mask, **options(eos))
    return ids, mask, out, eos


@cache
def continuation(name: str, batch: int) -> Tensor:
    """What a drafter peeks at, [B, NEW + 8]: longer than any row is decoded."""
    ids, mask = prompts(LENGTHS[batch])
    out = tiny(name).generate(ids, attention_mask=mask, **options(None, NEW + 8))
    return out[:, ids.shape[1] :]


def options(eos: int | None, new: int = NEW) -> dict:
    return {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": eos}


def decode(
    name: str,
    shape: str,
    tree: str,
    batch: int,
    stop: bool,
    mode: str = "sometimes",
    check: bool = True,
) -> tuple[Tensor, Tensor, Speculator]:
    """What `generate` writes, what the speculator writes, and the speculator."""
    ids, mask, expected, eos = reference(name, batch, stop)
    rows = rows_of(ids, mask) if check else None
    drafter = make(shape, tiny(name), continuation(name, batch), mode, prompts=rows)
    speculator = Speculator(tiny(name), drafter, tree=TREES.get(tree, tree))
    out = speculator.generate(ids, attention_mask=mask, **options(eos))
    if check and shape == "cached" and tree != "plain":
        assert isinstance(drafter, Cached) and drafter.checks > 2
    return expected, out, speculator


@pytest.mark.parametrize(
    ("name", "shape", "tree", "batch", "stop"),
    covering([*product(CONFIGS, SHAPES, TREES, LENGTHS, (False, True))]),
)
def test_equals_generate(name: str, shape: str, tree: str, batch: int, stop: bool) -> None:
    expected, out, speculator = decode(name, shape, tree, batch, stop)
    assert torch.equal(out, expected)
    assert speculator.stats.tau == 1 if tree == "plain" else speculator.stats.tau > 1


@pytest.mark.parametrize("name", CONFIGS)
def test_without_a_drafter(name: str) -> None:
    ids, mask, expected, eos = reference(name, 4, True)
    speculator = Speculator(tiny(name))
    assert torch.equal(speculator.generate(ids, attention_mask=mask, **options(eos)), expected)
    assert speculator.stats.tau == 1


@pytest.mark.parametrize("batch", LENGTHS)
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_always_right_gives_a_token_more_than_the_depth(shape: str, depth: int, batch: int) -> None:
    expected, out, speculator = decode("llama", shape, f"chain:{depth}", batch, False, "always")
    assert torch.equal(out, expected)
    rounds = -(-(NEW - 1) // (depth + 1))  # the last one is cut
    assert speculator.stats.rounds == rounds * batch
    assert speculator.stats.tokens == (NEW - 1) * batch
    assert speculator.stats.acceptance_by_depth == [1.0] * depth


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("shape", SHAPES)
def test_never_right_gives_one_token_a_round(shape: str, tree: str) -> None:
    expected, out, speculator = decode("llama", shape, tree, 4, False, "never")
    assert torch.equal(out, expected)
    assert speculator.stats.tau == 1 and speculator.stats.rounds == (NEW - 1) * 4


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_wider_tree_accepts_more(width: int) -> None:
    """The right token stands at rank 0, 1 or 2, so every sibling must be able to win."""
    narrow = decode("llama", "heads", f"cartesian:{width},1,1", 4, False)[2].stats
    wide = decode("llama", "heads", f"cartesian:{width + 1},1,1", 4, False)[2].stats
    assert (wide.tau > narrow.tau) if width < 3 else (wide.tau == narrow.tau)


def test_a_shared_prompt_padded_by_more_is_the_same() -> None:
    ids, mask, expected, _ = reference("gemma3", 4, False)
    wide = torch.nn.functional.pad(ids, (5, 0))
    drafter = make("cached", tiny("gemma3"), expected[:, ids.shape[1] :])
    out = Speculator(tiny("gemma3"), drafter, tree="cartesian:2,2").generate(
        wide, attention_mask=torch.nn.functional.pad(mask, (5, 0)), **options(None)
    )
    assert torch.equal(out[:, 5:], expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_seeing_other_branches_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true = masks.tree_mask

    def blind(lengths: Tensor, positions: Tensor, ancestors: Tensor, *rest, **named) -> Tensor:
        return true(lengths, positions, torch.ones_like(ancestors), *rest, **named)

    monkeypatch.setattr(masks, "tree_mask", blind)
    monkeypatch.setattr(probe, "check_tree", lambda *args: None)  # which would refuse the model
    expected, out, _ = decode(name, "cached", "cartesian", 4, False, check=False)
    assert not torch.equal(out, expected)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("wrong", ["by node", "by one"])
def test_wrong_positions_fail(name: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true = target.tree_forward

    def shifted(model, cache, windows, tokens, lengths, positions, *rest) -> Tensor:
        nodes = torch.arange(tokens.shape[1])
        moved = lengths.unsqueeze(1) + nodes if wrong == "by node" else positions + 1
        return true(model, cache, windows, tokens, lengths, moved, *rest)

    monkeypatch.setattr(target, "tree_forward", shifted)
    expected, out, _ = decode(name, "cached", "cartesian", 4, False, check=False)
    assert not torch.equal(out, expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_skipped_commit_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.Target, "commit", lambda *args: None)
    expected, out, _ = decode(name, "cached", "cartesian", 4, False, check=False)
    assert not torch.equal(out, expected)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_dropped_window_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true = masks.tree_mask

    def wide(lengths, positions, ancestors, live, dtype, window=None) -> Tensor:
        return true(lengths, positions, ancestors, live, dtype, None)

    monkeypatch.setattr(masks, "tree_mask", wide)
    expected, out, _ = decode(name, "cached", "cartesian", 4, False, check=False)
    assert not torch.equal(out, expected)


def test_a_chain_lies_in_place() -> None:
    assert StaticTree.chain(3).in_place and not StaticTree.cartesian([2, 1]).in_place
