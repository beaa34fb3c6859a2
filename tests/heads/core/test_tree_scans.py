"""Recurrences over trees read, at each node, what a walk along its path would have left."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.heads.core.recurrent import TreeRun, Updates, add_path
from headstart.heads.core.tree import ancestor_mask
from headstart.heads.core.tree_scans import convolve, delta_rule, state_space
from tests.support.tiny import path_to, random_parents

BATCH, NODES, HEADS = 2, 11, 4


def trees(draws: torch.Generator, nodes: int = NODES) -> TreeRun:
    """A random tree for each row."""
    parents = torch.tensor([random_parents(nodes, draws) for _ in range(BATCH)])
    deepest = max(len(path_to(row.tolist(), node)) for row in parents for node in range(nodes))
    return TreeRun(parents, ancestor_mask(parents), levels=deepest - 1)


def paths(tree: TreeRun) -> list[tuple[int, int, list[int]]]:
    """Row, node, and the nodes from the root to it."""
    rows = tree.parents.tolist()
    return [(b, n, path_to(rows[b], n)) for b in range(BATCH) for n in range(len(rows[b]))]


def committed(state: Tensor, updates: Updates, tree: TreeRun, last: Tensor) -> Tensor:
    """The state [B, H, D1, D2] after the path to `last` [B] is added to it."""
    found, rows = state.clone().unsqueeze(0), torch.arange(BATCH)
    stacked = Updates(*(each.unsqueeze(0) for each in updates))
    add_path(found, stacked, tree.ancestors[rows, last])
    return found[0]


def walked_delta(
    given: tuple[Tensor, ...], state: Tensor, normalize: bool
) -> tuple[Tensor, Tensor]:
    """The gated delta rule, token by token, of one row: [T, H, Dv] and the state."""
    query, key, value, g, beta = given
    if normalize:
        query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    out = []
    for t in range(len(query)):
        decay = g[t].exp()
        state = state * (decay.view(-1, 1, 1) if decay.dim() == 1 else decay.unsqueeze(-1))
        moved = beta[t].unsqueeze(-1) * (value[t] - torch.einsum("hkv,hk->hv", state, key[t]))
        state = state + torch.einsum("hk,hv->hkv", key[t], moved)
        out.append(torch.einsum("hkv,hk->hv", state, query[t]) * query.shape[-1] ** -0.5)
    return torch.stack(out), state


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("nodes", [1, NODES])
def test_the_delta_rule(nodes: int, channels: bool, normalize: bool) -> None:
    draws = torch.Generator().manual_seed(nodes)
    tree = trees(draws, nodes)

    def rand(*size: int) -> Tensor:
        return torch.randn(BATCH, nodes, *size, generator=draws, dtype=torch.float64)

    query, key, value = rand(HEADS, 6) * 0.4, rand(HEADS, 6) * 0.4, rand(HEADS, 5)
    g, beta = -rand(HEADS, *[6] * channels).exp(), rand(HEADS).sigmoid()
    state = torch.randn(BATCH, HEADS, 6, 5, generator=draws, dtype=torch.float64)
    given = query, key, value, g, beta
    out, updates = delta_rule(query, key, value, g, beta, state, normalize, tree)
    for row, node, path in paths(tree):
        walk, after = walked_delta(tuple(x[row, path] for x in given), state[row], normalize)
        torch.testing.assert_close(out[row, node], walk[-1], rtol=1e-10, atol=1e-10)
        found = committed(state, updates, tree, torch.full((BATCH,), node))[row]
        torch.testing.assert_close(found, after, rtol=1e-10, atol=1e-10)


def test_keys_that_several_values_share() -> None:
    draws = torch.Generator().manual_seed(0)
    tree = trees(draws)
    query, key = torch.randn(2, BATCH, NODES, 2, 6, generator=draws).double()
    value = torch.randn(BATCH, NODES, HEADS, 5, generator=draws).double()
    g, beta = -torch.rand(2, BATCH, NODES, HEADS, generator=draws).double()
    state = torch.zeros(BATCH, HEADS, 6, 5, dtype=torch.float64)
    queries, keys = (x.repeat_interleave(2, dim=2) for x in (query, key))
    own = delta_rule(query, key, value, g, -beta, state, True, tree)[0]
    assert torch.equal(own, delta_rule(queries, keys, value, g, -beta, state, True, tree)[0])


def test_a_long_chain_of_one_token_in_single_precision() -> None:
    """The keys are the same, and each step is whole: what is solved is as ill as it can be."""
    nodes = 64
    parents = torch.arange(-1, nodes - 1).unsqueeze(0)
    tree = TreeRun(parents, ancestor_mask(parents), levels=nodes - 1)
    draws = torch.Generator().manual_seed(0)
    key = torch.randn(1, 1, 1, 16, generator=draws).expand(1, nodes, 1, 16)
    value = torch.randn(1, nodes, 1, 16, generator=draws)
    g, beta = torch.full((1, nodes, 1), -1e-4), torch.full((1, nodes, 1), 0.999)
    state = torch.zeros(1, 1, 16, 16)
    out = delta_rule(key, key, value, g, beta, state, True, tree)[0]
    given = tuple(x[0].double() for x in (key, key, value, g, beta))
    walk = walked_delta(given, state[0].double(), True)[0]
    assert (out[0] - walk).abs().max() < 1e-5


def test_decays_that_leave_nothing() -> None:
    """Between branches the sums differ by more than any exponent holds; they are never taken."""
    draws = torch.Generator().manual_seed(0)
    tree = trees(draws)
    query, key, value = torch.randn(3, BATCH, NODES, HEADS, 6, generator=draws)
    g = torch.full((BATCH, NODES, HEADS), -1e4)
    g[:, ::2] = 0
    state = torch.ones(BATCH, HEADS, 6, 6)
    out, updates = delta_rule(query, key, value, g, g * 0 + 0.5, state, True, tree)
    after = committed(state, updates, tree, torch.full((BATCH,), NODES - 1))
    assert out.isfinite().all() and after.isfinite().all()


@pytest.mark.parametrize("nodes", [1, NODES])
def test_the_state_space(nodes: int) -> None:
    draws = torch.Generator().manual_seed(nodes)
    tree = trees(draws, nodes)

    def rand(*size: int) -> Tensor:
        return torch.randn(BATCH, nodes, *size, generator=draws, dtype=torch.float64)

    x, step, keys, queries = rand(HEADS, 5), rand(HEADS).exp(), rand(2, 3), rand(2, 3)
    rate, skip = -torch.rand(HEADS, generator=draws).double(), torch.arange(HEADS).double()
    state = torch.randn(BATCH, HEADS, 5, 3, generator=draws, dtype=torch.float64)
    out, updates = state_space(x, step, rate, keys, queries, skip, state, tree)
    for row, node, path in paths(tree):
        now, read = state[row], torch.empty(0)
        for n in path:
            k, q = (each[row, n].repeat_interleave(2, dim=0) for each in (keys, queries))  # [H, S]
            now = now * (step[row, n] * rate).exp().view(-1, 1, 1)
            now = now + torch.einsum("h,hp,hs->hps", step[row, n], x[row, n], k)
            read = torch.einsum("hps,hs->hp", now, q) + skip.unsqueeze(1) * x[row, n]
        torch.testing.assert_close(out[row, node], read, rtol=1e-10, atol=1e-10)
        found = committed(state, updates, tree, torch.full((BATCH,), node))[row]
        torch.testing.assert_close(found, now, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("first", [1, 4, NODES - 1])
def test_nodes_that_run_behind_others(first: int) -> None:
    """As a drafter grows a tree: what nodes read does not depend on which ran before."""
    draws = torch.Generator().manual_seed(first)
    tree = trees(draws)
    before = TreeRun(tree.parents[:, :first], tree.ancestors[:, :first, :first], 0, first - 1)
    after = TreeRun(tree.parents, tree.ancestors, first, NODES - first - 1)

    def rand(*size: int) -> Tensor:
        return torch.randn(BATCH, NODES, *size, generator=draws, dtype=torch.float64)

    def check(run: Any, given: tuple[Tensor, ...], *rest: Any) -> None:
        out, updates = run(*given, *rest, tree)
        some = run(*(x[:, :first] for x in given), *rest, before)
        found, later = run(*(x[:, first:] for x in given), *rest, after, some[1])
        torch.testing.assert_close(torch.cat([some[0], found], 1), out)
        torch.testing.assert_close(later, updates)

    state = torch.randn(BATCH, HEADS, 6, 5, generator=draws, dtype=torch.float64)
    query, key, value = rand(HEADS, 6), rand(HEADS, 6), rand(HEADS, 5)
    for g in (-rand(HEADS).exp(), -rand(HEADS, 6).exp()):
        check(delta_rule, (query, key, value, g, rand(HEADS).sigmoid()), state, True)
    rate = -torch.rand(HEADS, generator=draws).double()

    def space(x: Tensor, step: Tensor, keys: Tensor, queries: Tensor, *rest: Any) -> Any:
        return state_space(x, step, rate, keys, queries, None, state, *rest)

    check(space, (rand(HEADS, 6), rand(HEADS).exp(), rand(2, 5), rand(2, 5)))

    weight, inputs = torch.randn(3, 4).double(), torch.randn(BATCH, 3, 3 + NODES).double()
    whole = convolve(inputs, weight, None, "silu", tree)
    torch.testing.assert_close(convolve(inputs, weight, None, "silu", after), whole[..., first:])


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_convolution(width: int, activation: str | None) -> None:
    draws = torch.Generator().manual_seed(0)
    tree, channels = trees(draws), 3
    kept = torch.randn(BATCH, channels, width - 1, generator=draws).double()
    new = torch.randn(BATCH, channels, NODES, generator=draws).double()
    weight, bias = torch.randn(channels, width).double(), torch.randn(channels).double()
    out = convolve(torch.cat([kept, new], -1), weight, bias, activation, tree)
    for row, node, path in paths(tree):
        text = torch.cat([kept[row], new[row][:, path]], -1)  # [C, W - 1 + T]
        read = F.conv1d(text.unsqueeze(0), weight.unsqueeze(1), bias, groups=channels)[0, :, -1]
        read = read if activation is None else F.silu(read)
        torch.testing.assert_close(out[row, :, node], read, rtol=1e-12, atol=1e-12)
