"""Launches and bytes of a round, counted, and the kernels compiled for GPUs that are not here."""

import copy
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.drafter_launches import FAMILIES, MATCHING, count_level, count_matching
from benchmarks.launches import Counts, as_on_a_gpu, count_forward, kernel_launches, recorded
from headstart.infer.target import Target
from tests.support.families import target
from tests.support.interpreter import without_triton


def test_counts_by_hand() -> None:
    left, table, some = torch.ones(4, 8), torch.ones(100, 2), torch.tensor([3, 5])
    with Counts() as counted:
        (left.t().contiguous() @ left).view(64)  # 128 bytes to 128; twice 128 to 256
        _ = left + left[:1].expand(4, 8)  # 128 and 32 to 128
        torch.nn.functional.embedding(some, table)  # 16 to 16
        table.index_copy_(0, some, left[:2, :2])  # 16, and 16 of where
        torch.empty(9)
    assert counted.launches == 5
    assert counted.bytes == 256 + 512 + 288 + 2 * 16 + 2 * (16 + 16)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_plain_token_takes_fewer_launches(dtype: torch.dtype) -> None:
    model = copy.deepcopy(target("tiny")).to(dtype)
    with as_on_a_gpu():
        runners = [Target(model, (), "tree", fused=fused) for fused in (False, True)]
    plain, fewer = (count_forward(runner, 1, 3) for runner in runners)
    layers = model.config.num_hidden_layers
    assert fewer.launches <= 0.6 * plain.launches
    # In each layer: of two sums with norms 16, of rotary and the write 11, of queries, keys and
    # values 2, and of the gated product 3. And 7 of the first norm, which comes after no sum, and
    # 9 of cosines and sines.
    assert plain.launches - fewer.launches == 32 * layers + 7 + 9
    assert fewer.bytes < plain.bytes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("width", [1, 8])
def test_a_level_of_a_drafter_takes_few_launches(family: str, width: int) -> None:
    counted, layers = count_level(family, width, Counts, as_on_a_gpu)
    assert layers == 1
    assert counted.launches == {"draft_model": 18, "eagle": 23}[family] + (width > 1)


@pytest.mark.parametrize("family", MATCHING)
def test_drafters_that_match_texts_look_levels_up(family: str) -> None:
    begun, level = count_matching(family, Counts)
    assert begun.launches == {"lookup": 56, "retrieval": 116, "suffix": 132}[family]
    assert level.launches == {"lookup": 9}.get(family, 11)


@without_triton
def test_few_programs_serve_all_trees(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None is compiled again for a number of nodes or rows that is 1, or a multiple of 16.

    But attention is, since its tiles and parts are others, and so are products for one row.
    """
    from headstart.heads.core import fused_kernels, kernels, nucleus_kernels
    from headstart.infer.rules import level_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    by_nodes = {nodes: kernel_launches(nodes, 100, 1024) for nodes in (1, 9, 16)}
    for name in [each for each in by_nodes[1] if not each.startswith("attention")]:
        others = ("level of traversal", "queries, keys and values", "gated layers")
        others += ("nodes of a search", "shape of a tree", "one layer", "output layer")
        nodes = (9, 16) if name in others else (1, 9, 16)
        made = [by_nodes[each][name].compile(90) for each in nodes]
        assert len({each.hash for each in made}) == 1, name

    def compiled(module: Any, name: str, call: Callable[[], Any]) -> str:
        return recorded(module, [name], call)[0].compile(90).hash

    def move(batch: int) -> str:
        slots = torch.zeros(batch, 16, dtype=torch.int64)
        rows = torch.empty(4, 16 * batch, 2, 64)
        return compiled(kernels, "_move", lambda: kernels.move_path(rows, slots, slots[:, :8]))

    def write(nodes: int) -> str:
        slab, slots = torch.empty(100, 2, 64), torch.zeros(nodes, dtype=torch.int64)
        key = torch.empty(1, nodes, 2, 64).transpose(1, 2)
        given = slab, slab, slots, key, key
        return compiled(fused_kernels, "_write", lambda: fused_kernels.write(*given))

    def judge(level: int, nodes: int = 7, vocabulary: int = 1024) -> str:
        left = torch.empty(2, 1, nodes, vocabulary)
        entry, weights = torch.zeros(1, nodes, dtype=torch.int64), torch.empty(1, nodes)
        groups = torch.empty(1, 1 + 5 * level, vocabulary)
        given: list[Any] = [left, entry, weights, weights, left[0], groups, *[entry] * 5, None]
        judged: Any = level_kernels.judge_level
        run = functools.partial(judged, *given, level, level, replacement=False)
        return compiled(level_kernels, "_judge", run)

    def judge_odd(nodes: int) -> str:  # a vocabulary that is no multiple of 16
        return judge(1, nodes, 1001)

    def top_p(rows: int) -> str:
        shares = torch.empty(rows, dtype=torch.float64)
        given = torch.empty(rows, 1024), shares, -math.inf
        return compiled(nucleus_kernels, "_top_p", lambda: nucleus_kernels.top_p(*given))

    kinds = (move, (1, 2, 16)), (write, (1, 9, 16)), (judge, (0, 1, 2, 3))
    for kernel, numbers in (*kinds, (judge_odd, (9, 16)), (top_p, (1, 3, 16))):
        assert len({kernel(number) for number in numbers}) == 1, kernel.__name__


@without_triton
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_gpus_that_are_not_here(
    capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from headstart.heads.core import best_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # so that they do compile
    launches = kernel_launches(1, 100)
    assert len(launches) == 24
    for dtype in (torch.bfloat16, torch.float64):
        scores = torch.empty(2, 300, dtype=dtype)
        found = recorded(
            best_kernels, ["_part", "_merge"], lambda given=scores: best_kernels.best_of(given, 3)
        )
        launches |= {f"best of {dtype}, {launch.kernel}": launch for launch in found}
    for name, launch in launches.items():
        found = launch.compiled(capability)
        # Triton 3.6 spills 44 bytes of one of them on 8.0.
        assert found["shared"] <= 99 << 10 and found.get("spilled", 0) <= 64, name
        assert launch.programs > 0
