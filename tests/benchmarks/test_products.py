"""The cuts that are tried, and that the fastest is found."""

from typing import Any

import pytest
import torch

from benchmarks.gpu import products
from tests.support.interpreter import without_triton


@without_triton
@pytest.mark.parametrize("kind", ["three", "gated", "one", "output"])
def test_what_is_used_is_among_what_is_tried(kind: str) -> None:
    """But for cuts that few GPUs have the memory for, see `_SHARED`."""
    from headstart.heads.core.product_kernels import _CUTS

    for rows in products._UP_TO:
        tried = list(products.cuts(kind, rows))
        assert _CUTS[kind][rows] in tried and len(tried) == len(set(tried)) < 256


@without_triton
def test_the_fastest_cut_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from headstart.heads.core import product_kernels

    seen: list[Any] = []

    def microseconds(call: Any, weights: Any) -> float:
        cut = product_kernels._CUTS["one"][16]
        if cut.columns == 16:
            raise RuntimeError("it does not compile")
        seen.append(cut)
        return 1.0 * abs(cut.columns - 32) + cut.stages + cut.warps + cut.depth + cut.across

    monkeypatch.setattr(products, "microseconds", microseconds)
    before = product_kernels._CUTS["one"][16]
    own = [products.Product("a", "one", (64,), 32), products.Product("b", "one", (64,), 64)]
    monkeypatch.setattr(products, "_COPIES", 1)
    (total, cut), *others = products.fastest(own, 16, torch.device("cpu"))
    found = min(set(seen), key=lambda c: abs(c.columns - 32) + c.stages + c.warps + c.depth)
    assert cut == found and total <= others[0][0] and product_kernels._CUTS["one"][16] == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert products.main([]) == 2
    assert "no GPU was found" in capsys.readouterr().err


@pytest.mark.gpu
def test_products_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert products.main(["--rows", "16"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(products.PRODUCTS)
