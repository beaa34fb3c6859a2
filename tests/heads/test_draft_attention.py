"""Attention over several depths: the dense mask, and the blocks that FlexAttention computes."""

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import config
from torch._dynamo.utils import counters

from headstart.heads.parts import draft_attention
from headstart.heads.parts.draft_attention import block_mask, depth_mask, text_and_block_mask
from tests.support.families import drafter, target
from tests.support.tiny import VOCAB


def layout(width: int, length: int, block: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ascending queries in documents of 7 tokens, with some of padding behind the first row's."""
    monkeypatch.setattr(draft_attention, "_BLOCK", block)
    at = torch.stack([torch.randperm(length)[:width].sort().values for _ in range(2)])
    at[0, -3:] = torch.tensor([0, 5, 1])  # what is not chosen follows, in any order
    return at, at - at % 7


@pytest.mark.parametrize("added", [0, 1, 4])
@pytest.mark.parametrize(("width", "length", "block"), [(20, 33, 8), (16, 16, 8), (5, 40, 16)])
def test_blocks_hold_all_that_the_dense_mask_does(
    added: int, width: int, length: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, start = layout(width, length, block, monkeypatch)
    dense: Any = depth_mask(at, start, length, added)
    for query in range(width):
        keys = dense[0, 0, query].nonzero().squeeze(1).tolist()
        own = [length + depth * width + query for depth in range(added)]
        assert keys == [*range(int(start[0, query]), int(at[0, query]) + 1), *own]
    blocks: Any = depth_mask(at, start, length, added, flex=True)
    computed = blocks.to_dense().repeat_interleave(block, 2).repeat_interleave(block, 3)
    computed = computed[:, :, :width, : dense.shape[-1]].bool()
    assert not (dense & ~computed).any()
    assert added == 0 or length < 4 * block or not computed.all(), "the control: some are left out"


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("places", [1, 3, 8])
@pytest.mark.parametrize(("count", "length", "block"), [(20, 33, 8), (16, 16, 8), (5, 40, 16)])
def test_blocks_hold_all_that_the_dense_mask_of_whole_blocks_does(
    window: int | None,
    causal: bool,
    places: int,
    count: int,
    length: int,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at, start = layout(count, length, block, monkeypatch)
    dense: Any = block_mask(at, start, length, places, causal, window)
    for query in range(count * places):
        keys = dense[0, 0, query].nonzero().squeeze(1).tolist()
        one, place = divmod(query, places)
        far, last = window or length + places, int(at[0, one])
        own = range(max(place + 1 - far, 0), place + 1 if causal else min(places, place + far))
        text = range(max(int(start[0, one]), last + 2 + place - far), last + 1)
        assert keys == [*text, *(length + one * places + each for each in own)]
    blocks: Any = block_mask(at, start, length, places, causal, window, flex=True)
    computed = blocks.to_dense().repeat_interleave(block, 2).repeat_interleave(block, 3)
    computed = computed[:, :, : count * places, : dense.shape[-1]].bool()
    assert not (dense & ~computed).any()
    assert count * places < 2 * block or not computed.all(), "the control: some are left out"


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("block", [8, 16])
def test_blocks_hold_all_that_the_dense_mask_of_text_and_blocks_does(
    window: int | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_attention, "_BLOCK", block)
    length, longest = 33, 4
    sizes = [[3, 1, 4, 2], [4, 4, 1, 1]]  # of the blocks of each row, behind these keys:
    ends = torch.tensor([[3, 4, 20, 32], [0, 9, 10, 31]])
    every = torch.arange(length)
    rows = zip(ends, map(torch.tensor, sizes), strict=True)
    owner = torch.stack([end.repeat_interleave(size) for end, size in rows])
    at = torch.cat([every.expand(2, -1), owner], 1)
    start = at - at % 7
    number = torch.cat([torch.full((2, length), -1), owner], 1)
    dense: Any = text_and_block_mask(at, start, number, length, longest, window)
    for row, own in enumerate(sizes):
        places = [place for size in own for place in range(size)]
        for query in range(length + sum(own)):
            keys = dense[row, 0, query].nonzero().squeeze(1).tolist()
            text = [*range(int(start[row, query]), int(at[row, query]) + 1)]
            before = 0
            if query >= length:
                before = min(places[query - length] + 1, window or longest)
            assert keys == text + [query - each for each in reversed(range(before))]
    blocks: Any = text_and_block_mask(at, start, number, length, longest, window, flex=True)
    computed = blocks.to_dense().repeat_interleave(block, 2).repeat_interleave(block, 3)
    computed = computed[:, :, : dense.shape[2], : dense.shape[3]].bool()
    assert not (dense & ~computed).any() and not computed.all()


MASKS = {
    **dict.fromkeys(("eagle", "eagle3", "mtp"), depth_mask),
    "dflash": block_mask,
    "pard": text_and_block_mask,
}
AT_ONCE = {"dflash": "dflash", "pard": "parts.mask_blocks"}  # and the module that calls for a mask


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_both_ways_give_the_same_states(
    name: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlexAttention as it runs without a compiler; it has no backward pass on a CPU."""
    made: Any = drafter(name, "tiny")
    tokens = torch.randint(VOCAB, (2, 24))
    features = torch.randn(2, 24, 32 * len(made.config.feature_layers), dtype=torch.double)
    where = torch.rand(2, 24) < 0.6
    positions = torch.arange(24).expand(2, -1)
    given: dict[str, Tensor] = {"positions": positions % 10} if packed else {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        expected = made.draft_hidden_states(features, tokens, where, 4, **given)
        ways = []

        def by_flex(*how: Any, **more: Any) -> Any:
            mask = MASKS[name](*how, **more, flex=True)
            ways.append(type(mask).__name__)
            return mask

        replace_mask(name, by_flex, monkeypatch)
        found = made.draft_hidden_states(features, tokens, where, 4, **given)
    assert ways == ["BlockMask"] * (1 if name in AT_ONCE else 4 if packed else 3)
    inside = where & (positions < 19)
    known = inside[where]  # a state that needs a token past the row's end may be anything
    torch.testing.assert_close(found[:, known], expected[:, known], rtol=1e-9, atol=1e-9)
    assert made.model.config._attn_implementation == "sdpa"
    assert target("tiny") is made.target


def replace_mask(name: str, by: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = AT_ONCE.get(name, "eagle")
    monkeypatch.setattr(f"headstart.heads.{module}.{MASKS[name].__name__}", by)


@pytest.mark.parametrize("most", [8, draft_attention._COMPILED])
def test_it_is_compiled_for_all_that_it_meets(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for eight of them, as torch does, which holds all scores in memory for the others."""
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(draft_attention, "_COMPILED", most)
    attend = draft_attention._compiled.__wrapped__()
    with torch.no_grad(), warnings.catch_warnings(), config.patch(automatic_dynamic_shapes=False):
        warnings.simplefilter("ignore")  # what is not compiled says so
        for length in range(130, 140):
            at = torch.arange(length).unsqueeze(0)
            mask = depth_mask(at, torch.zeros_like(at), length, 0, flex=True)
            states = torch.randn(1, 2, length, 16)
            attend(states, states, states, block_mask=mask)
    torch._dynamo.reset()
    assert counters["frames"]["ok"] == min(most, 10)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MASKS)
def test_both_ways_give_the_same_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = drafter(name, "tiny")
    made = copy.deepcopy(made).float().cuda()
    made.bind(copy.deepcopy(target("tiny")).float().cuda())
    tokens = torch.randint(VOCAB, (2, 300)).cuda()
    features = torch.randn(2, 300, 32 * len(made.config.feature_layers)).cuda()
    where, found = torch.rand(2, 300).cuda() < 0.6, []
    inner = ("fc.weight", "q_proj.weight")
    weight = next(p for name, p in made.named_parameters() if name.endswith(inner))
    for flex in (True, False):
        replace_mask(name, partial(MASKS[name], flex=flex), monkeypatch)
        states = made.draft_hidden_states(features, tokens, where, 4)[:, :-10]
        found.append(torch.autograd.grad(states.square().mean(), weight)[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-5)
