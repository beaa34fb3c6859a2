"""The Triton kernel equals the plain form: in Triton's interpreter here, compiled on a GPU."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.launches import of_ptxas, recorded
from headstart.heads.core.tree_attention import plain_attention
from tests.support.interpreter import run_interpreted, without_triton
from tests.support.trees import SCALING, Case, Tree, make_tree

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CLOSE = {F32: 1e-5, F16: 4e-3, BF16: 3e-2}
CASES = [
    (Case(nodes=1, slots=70), F32),
    (Case(rows=3, heads=1, groups=4, slots=200, size=64), F32),
    (Case(groups=8, nodes=33, slots=150, size=80, last=9), F32),
    (Case(rows=1, groups=2, nodes=70, slots=150, size=24, value=10, window=9), F32),
    (Case(groups=4, slots=200, size=128, window=100, softcap=2.0), F32),
    (Case(rows=1, heads=1, groups=2, nodes=128, slots=200, size=64, softcap=2.0), F16),
    (Case(groups=4, nodes=16, slots=200, size=256), BF16),
]
MOVES = [
    (F32, (2, 8), [[0, 2, 4, 4], [0, 1, 3, 5], [0, 5, 5, 5]]),  # paths end, and repeat their last
    (BF16, (3, 24), [[0, 3, 4, 6, 7]]),  # columns that are no power of two
    (torch.float64, (8, 80), [[3, 2, 1, 0], [0, 0, 1, 2]]),  # several blocks; what is read, written
    (F16, (1, 4), [[2], [0]]),
]
"""Of keys moved along paths: their dtype, heads and size, and each row's path."""


def worst(tree: Tree, splits: int | None = None, told: torch.Tensor | None = None) -> float:
    """The largest difference between kernel and plain form; slots past the tree hold NaN.

    Args:
        told: another packed tree for the kernel.
    """
    from headstart.heads.core.kernels import split_attention

    packed, softcap = tree.packed(), tree.case.softcap
    plain = plain_attention(tree.query, tree.key, tree.value, packed, SCALING, softcap)
    key, value = tree.key.clone(), tree.value.clone()
    for row, length in enumerate(tree.lengths.tolist()):
        key[row, :, length + tree.case.nodes :] = torch.nan
        value[row, :, length + tree.case.nodes :] = torch.nan
    told = packed if told is None else told
    out = split_attention(tree.query, key, value, told, SCALING, softcap, splits)
    assert out.dtype == plain.dtype and out.shape == plain.shape
    return (out.float() - plain.float()).abs().max().item()


def moved(dtype: torch.dtype, shape: tuple[int, int], paths: list[list[int]], on: str) -> int:
    """How many numbers a move by the kernel leaves otherwise than the plain one; ragged rows."""
    from headstart.heads.core.cache import plain_move
    from headstart.heads.core.kernels import move_path

    batch, slots, nodes = len(paths), 20, 8
    rows = torch.randn(3, batch * slots, *shape, device=on).to(dtype)
    starts = torch.arange(batch, device=on) * (slots + 3)  # each row's first slot, and its length
    aimed = starts.unsqueeze(1) + torch.arange(nodes, device=on)
    path, plain = torch.tensor(paths, device=on), rows.clone()
    plain_move(plain, aimed, path)
    assert not torch.equal(plain, rows)
    move_path(rows, aimed, path)
    return int((rows != plain).sum())


def interpreted() -> dict[str, float]:
    """By case, the difference in units of what is allowed; and for other splits of one case."""
    cases = [(case, dtype) for case, dtype in CASES if dtype != BF16]  # it multiplies their bits
    off = {f"{case} {dtype}": worst(make_tree(case, dtype)) / CLOSE[dtype] for case, dtype in cases}
    case, dtype = CASES[1]
    for splits in (1, 7):
        off[f"{splits} splits"] = worst(make_tree(case, dtype), splits) / CLOSE[dtype]
    tree = make_tree(case, dtype)
    blind = torch.eye(case.nodes, dtype=torch.bool).expand_as(tree.ancestors)
    wrong = {"blind": tree.packed(ancestors=blind), "longer": tree.packed(tree.lengths + 1)}
    off |= {f"move {number}": moved(*case, "cpu") for number, case in enumerate(MOVES)}
    return off | {name: worst(tree, told=told) / CLOSE[dtype] for name, told in wrong.items()}


@without_triton
def test_in_the_interpreter() -> None:
    off = run_interpreted(__name__)
    assert len(off) == 14
    for name, difference in off.items():
        most = 0 if name.startswith("move") else 1
        assert (difference <= most) == (name not in ("blind", "longer")), (name, difference)


@without_triton
@pytest.mark.parametrize("capability", [80, 90])
def test_it_compiles_for_gpus_that_are_not_here(
    capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The compiler refuses what the interpreter runs; and shared memory must suffice."""
    from headstart.heads.core import kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # so that it does compile
    query = torch.empty(1, 32, 64, 128, dtype=BF16)
    slab = torch.empty(1, 8, 2048, 128, dtype=BF16)
    packed = torch.empty(1, 1, 64, 2 + 64, dtype=torch.int32)
    rows, slots = torch.empty(64, 2048, 8, 128, dtype=BF16), torch.zeros(1, 64, dtype=torch.int64)
    made = [
        launch.compile(capability)
        for launch in (
            *recorded(
                kernels,
                ["_attend", "_merge"],
                lambda: kernels.split_attention(query, slab, slab, packed, 0.1, 30.0),
            ),
            *recorded(kernels, ["_move"], lambda: kernels.move_path(rows, slots, slots[:, :8])),
        )
    ]
    assert all(each.metadata.shared <= 99 * 1024 for each in made)
    attend, _, move = (each.asm["ptx"] for each in made)
    assert "mma" in attend and "cp.async" in attend
    assert move.rindex("ld.global") < move.rindex("bar.sync") < move.index("st.global")
    assert "ld.global.v4" in move and "st.global.v4" in move  # sixteen bytes at once


def repeated(ttgir: str) -> list[str]:
    """Products of which warps compute some numbers more than once, by their shape and layout."""
    layouts, found = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", ttgir, re.MULTILINE)), []
    products = re.findall(r"(?:tt\.dot|warp_group_dot) .*-> tensor<(\d+)x(\d+)xf32, (#\w+)>", ttgir)
    assert len(products) == 6  # two each for slots that all rows see, for others, for the tree
    for *shape, name in products:

        def numbers(key: str, layout: str = layouts[name]) -> list[int]:
            listed = re.search(rf"{key} = \[([\d, ]+)\]", layout)
            assert listed, (key, layout)
            return [int(each) for each in listed[1].split(",")]

        if "nvidia_mma" in layouts[name]:
            one = numbers("instrShape")[:2]
        else:
            pairs = zip(numbers("sizePerThread"), numbers("threadsPerWarp"), strict=True)
            one = [each * threads for each, threads in pairs]
        warps = numbers("warpsPerCTA")
        if any(a * b > int(c) for a, b, c in zip(warps, one, shape, strict=True)):
            found.append(f"{shape} by {warps} warps of {one}")
    return found


def cut(tile: Any, rows: int, size: int, dtype: torch.dtype, capability: int) -> Any:
    """What attention is compiled to for so many rows; by `Tile.fit` if no tile is given."""
    from headstart.heads.core import kernels

    query = torch.empty(1, 2, rows, size, dtype=dtype)
    slab = torch.empty(1, 2, 2048, size, dtype=dtype)
    packed = torch.empty(1, 1, rows, 2 + rows, dtype=torch.int32)
    attend, _ = recorded(
        kernels,
        ["_attend", "_merge"],
        lambda: kernels.split_attention(query, slab, slab, packed, 0.1, tile=tile),
    )
    return attend.compile(capability)


@without_triton
@pytest.mark.parametrize(
    "dtype, capability, size",
    [
        (BF16, 90, 128),
        *(
            pytest.param(*case, marks=pytest.mark.proof)
            for case in [(BF16, 90, 64), (BF16, 90, 256), (BF16, 80, 128), (F32, 90, 128)]
        ),
    ],
    ids=str,
)
def test_warps_of_a_tile_share_its_work(
    dtype: torch.dtype, capability: int, size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No warp computes what another one does, shared memory suffices, and so do registers, but for
    a few numbers where an H100's larger blocks are."""
    from headstart.heads.core.kernels import Tile

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sizes = [1, 32, 64, 128, 256, 512]
    least, most = (
        {Tile.fit(rows, size, size, dtype.itemsize, shared << 10) for rows in sizes}
        for shared in (96, 227 if capability == 90 else 96)
    )
    for tile in least | most:
        made = cut(tile, tile.rows, size, dtype, capability)
        assert not repeated(made.asm["ttgir"]), tile
        assert made.metadata.shared <= (99 if tile in least else 227) << 10, tile
        assert made.metadata.shared * 8 // tile.warps <= 227 << 10, tile
        assert of_ptxas(made.asm["ptx"]).get("spilled", 0) <= (0 if tile in least else 32), tile
        assert "cp.async" in made.asm["ptx"], tile
        products = "wgmma.mma_async" if tile.rows >= 64 and capability == 90 else "mma.sync"
        assert (products in made.asm["ptx"]) == (dtype != F32), tile


@without_triton
def test_warps_that_share_no_work_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from headstart.heads.core.kernels import Tile

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = cut(Tile(64, 64, 8), 64, 128, BF16, 90)
    assert repeated(made.asm["ttgir"]) == ["['64', '64'] by [8, 1] warps of [16, 32]"] * 3
    made = cut(Tile(128, 64, 4), 128, 128, BF16, 90)
    assert of_ptxas(made.asm["ptx"]).get("spilled", 1) > 0


@without_triton
@pytest.mark.parametrize("heads, groups, nodes", [(8, 4, 1), (8, 4, 64), (32, 1, 64), (4, 8, 128)])
@pytest.mark.parametrize("batch", [1, 3, 16, 64])
def test_splits_fill_the_multiprocessors_once(
    heads: int, groups: int, nodes: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many programs as an H100 has room for, unless two for each tile are more."""
    from headstart.heads.core import kernels

    monkeypatch.setattr(kernels, "processors", lambda device: 132)
    query = torch.empty(batch, heads * groups, nodes, 128, dtype=BF16, device="meta")
    slab = torch.empty(batch, heads, 1 << 15, 128, dtype=BF16, device="meta")
    packed = torch.empty(batch, 1, nodes, 2 + nodes, dtype=torch.int32, device="meta")
    launch = recorded(
        kernels,
        ["_attend", "_merge"],
        lambda: kernels.split_attention(query, slab, slab, packed, 0.1),
    )[0]
    tiles, pairs, parts = launch.grid
    places = 132 * 8 // launch.options["num_warps"]
    assert launch.programs <= max(places, 2 * tiles * pairs)
    assert 1 <= parts <= 64 and max(launch.grid[1:]) < 1 << 16
    if tiles * pairs <= places // 8:
        assert launch.programs > 0.7 * places


@pytest.mark.gpu
@without_triton
@pytest.mark.parametrize("case, dtype", CASES, ids=str)
def test_compiled(case: Case, dtype: torch.dtype) -> None:
    assert worst(make_tree(case, dtype).to("cuda")) <= CLOSE[dtype]


@pytest.mark.gpu
@without_triton
@pytest.mark.parametrize("case", MOVES, ids=str)
def test_a_path_moves_on_a_gpu(case: Any) -> None:
    dtype, shape, paths = case
    assert not moved(dtype, shape, paths, "cuda")


@pytest.mark.gpu
@without_triton
def test_a_captured_graph_follows_the_lengths() -> None:
    """One capture over all slots serves every length, since it is read on the device."""
    from headstart.heads.core.kernels import split_attention

    tree = make_tree(Case(rows=2, groups=4, nodes=16, slots=1000, size=64), BF16).to("cuda")
    packed = tree.packed()

    def attend() -> torch.Tensor:
        return split_attention(tree.query, tree.key, tree.value, packed, SCALING)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        attend()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    for lengths in ([0, 984], [500, 1], [333, 777]):
        packed.copy_(tree.packed(torch.tensor(lengths, device="cuda")))
        graph.replay()
        plain = plain_attention(tree.query, tree.key, tree.value, packed, SCALING)
        assert (captured.float() - plain.float()).abs().max() <= CLOSE[BF16]


if __name__ == "__main__":
    print(json.dumps(interpreted()))
