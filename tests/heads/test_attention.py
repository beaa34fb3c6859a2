"""Tree attention equals masked attention, whatever is ragged, windowed, capped or grouped."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trees import SCALING, Case, Tree, make_tree

from headstart.heads.core.attention import plain_attention, tree_attention

SHOWS = 1e-2


def attend(tree: Tree, packed: Tensor | None = None, **options: Any) -> Tensor:
    packed = tree.packed() if packed is None else packed
    attention = plain_attention if options else tree_attention
    return attention(
        tree.query, tree.key, tree.value, packed, SCALING, tree.case.softcap, **options
    )


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("groups", [1, 4, 8])
def test_it_equals_masked_attention(groups: int, window: int | None, softcap: float | None) -> None:
    sizes = [(1, 1, None), (3, 7, None), (3, 40, None), (2, 9, 4)]  # rows, nodes, last
    for seed, (rows, nodes, last) in enumerate(sizes):
        case = Case(rows, groups=groups, nodes=nodes, last=last, window=window, softcap=softcap)
        exact = make_tree(case, torch.float64, seed)
        assert (attend(exact) - exact.masked()).abs().max() <= 1e-12
        assert (attend(exact, block=16) - exact.masked()).abs().max() <= 1e-12
        for dtype, close in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            tree = make_tree(case, dtype, seed)
            assert attend(tree).dtype == dtype
            assert (attend(tree) - tree.masked()).abs().max() <= close


def test_keys_and_values_may_differ_in_width() -> None:
    tree = make_tree(Case(groups=4, size=24, value=10), torch.float64)
    assert attend(tree).shape == (2, 7, 8, 10)
    assert (attend(tree) - tree.masked()).abs().max() <= 1e-12


@pytest.mark.parametrize("broken", ["ancestor", "longer", "shorter"])
def test_what_is_broken_shows(broken: str) -> None:
    tree = make_tree(Case(groups=2, slots=40), torch.float64)
    lengths, ancestors = tree.lengths.clone(), tree.ancestors.clone()
    if broken == "ancestor":
        ancestors[:, :, 0] = False  # nobody sees the root, but the root itself
        ancestors[:, 0, 0] = True
    lengths[0] += {"ancestor": 0, "longer": 0, "shorter": -1}[broken]
    lengths[1] += broken == "longer"
    off = attend(tree, tree.packed(lengths, ancestors)) - tree.masked()
    assert off.abs().max() > SHOWS


class Sizes(TorchDispatchMode):
    """Keeps the most bytes that an operator returned."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.untyped_storage().nbytes())
        return out


def test_grouped_keys_are_never_repeated() -> None:
    """One query head's keys of all rows; repeated ones would be eight times that."""
    tree = make_tree(Case(groups=8, nodes=4, size=64, slots=512), torch.float64)
    repeated = 8 * tree.key.nbytes
    packed = tree.packed()
    with Sizes() as plain:
        attend(tree, packed)
    with Sizes() as masked:
        tree.masked()
    assert plain.largest <= tree.key.nbytes < repeated <= masked.largest
