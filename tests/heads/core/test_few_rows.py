"""Attention of few rows on a CPU is what transformers' own is."""

from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from headstart.heads.core import few_rows


class _Module(torch.nn.Module):
    def __init__(self, groups: int):
        super().__init__()
        self.num_key_value_groups, self.is_causal = groups, True


def _refuse(*args: Any, **options: Any) -> Any:
    raise AssertionError("transformers' own attention was called")


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("nodes", [1, 5])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_is_attention(groups: int, nodes: int, batch: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    slab = torch.randn(2, batch, 70, 2, 16).to(dtype)
    key, value = slab.transpose(2, 3).narrow(3, 0, 64).unbind(0)
    query = torch.randn(batch, nodes, 2 * groups, 16).to(dtype).transpose(1, 2)
    hidden = torch.rand(batch, 1, nodes, 64) < 0.4
    hidden[..., 0] = False
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
    for given in (mask, None) if nodes == 1 else (mask,):
        arguments = (query, key, value, given)
        with few_rows.few_rows():
            own = sdpa_attention_forward if groups == 1 else _refuse
            found, _ = few_rows.attention(own, _Module(groups), *arguments, scaling=0.3)
        wide: Any = [None if each is None else each.double() for each in arguments]
        expected, _ = sdpa_attention_forward(_Module(groups), *wide, scaling=0.3)
        assert found.dtype == dtype and found.is_contiguous()
        own, _ = sdpa_attention_forward(_Module(groups), *arguments, scaling=0.3)
        error = (found.double() - expected).abs().max()
        assert error <= 2 * (own.double() - expected).abs().max() + 1e-14


def test_what_it_does_not_know_is_left_to_the_model() -> None:
    query = torch.randn(1, 2, 3, 8)
    options: list[dict[str, Any]] = [{"softcap": 3.0}, {"dropout": 0.5}, {"s_aux": query}]
    for more in options:
        with pytest.raises(AssertionError, match="own attention"), few_rows.few_rows():
            few_rows.attention(_refuse, _Module(1), query, query, query, None, **more)
    with pytest.raises(AssertionError, match="own attention"):  # a prompt
        few_rows.attention(_refuse, _Module(1), query, query, query, None)


def test_masks_are_prepared_once() -> None:
    query = torch.randn(1, 4, 3, 8)
    key, mask = query[:, :2], torch.zeros(1, 1, 3, 3)
    with few_rows.few_rows():
        for _ in range(2):
            few_rows.attention(_refuse, _Module(2), query, key, key, mask)
        masks = few_rows._now.masks
        assert masks is not None and len(masks) == 1
    assert not few_rows.attends_in_few_rows()
