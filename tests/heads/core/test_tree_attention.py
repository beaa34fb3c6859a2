"""Tree attention equals masked attention, whatever is ragged, windowed, capped or grouped."""

import copy
import logging
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headstart.heads import OptionError, SlabCache, UnsupportedTarget
from headstart.heads.core import (
    AttentionWindows,
    check_tree,
    choose_attention,
    probe_layers,
    tree_forward,
)
from headstart.heads.core.tree_attention import plain_attention, tree_attention
from tests.support.tiny import COMMON, one_line, tiny
from tests.support.trees import SCALING, Case, Tree, make_tree

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


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma3", "gpt2"])
def test_the_trial_finds_rounding_only(name: str) -> None:
    """And every layer's attention is the tree's, in that forward alone."""
    model = tiny(name)
    windows = choose_attention(model, AttentionWindows.of(model), probe_layers(model), "tree")
    assert windows.tree
    assert check_tree(model, windows, probe_layers(model)) <= 1e-12
    assert model.config._attn_implementation == "sdpa"


def test_a_forward_that_fails_leaves_the_model_as_it_was() -> None:
    model = tiny("llama")
    windows = AttentionWindows(None, None, tree=True)
    slab, one = SlabCache(probe_layers(model), 1, 8), torch.zeros(1, 1, dtype=torch.long)
    with pytest.raises(IndexError):
        tree_forward(model, slab, windows, one + 10**6, one[0], one, torch.ones(1, 1, 1).bool(), 8)
    assert model.config._attn_implementation == "sdpa"


def choose(model: Any, attention: str) -> AttentionWindows:
    return choose_attention(model, AttentionWindows.of(model), probe_layers(model), attention)


def test_without_its_kernel_masks_are_kept_and_the_reason_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "headstart"):
        assert not choose(tiny("llama"), "auto").tree
    assert [record.getMessage() for record in caplog.records] == [
        "No tree attention, but masks: its kernel runs on CUDA, and the keys are on cpu."
    ]
    caplog.clear()
    assert not choose(tiny("llama"), "masked").tree
    assert not caplog.records


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma3", "gpt2"])
def test_with_its_kernel_it_is_taken(name: str, dtype: torch.dtype) -> None:
    model = copy.deepcopy(tiny(name)).to("cuda", dtype)
    assert choose(model, "auto").tree


def test_what_it_cannot_attend_to_is_refused() -> None:
    config = {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2}
    model: Any = tf.GptOssForCausalLM(tf.GptOssConfig(**config)).eval()
    with pytest.raises(UnsupportedTarget, match="GptOssAttention attends with s_aux") as caught:
        choose(model, "tree")
    one_line(caught.value)
    assert not choose(model, "auto").tree
    with pytest.raises(OptionError, match="attention is 'flash'; expected one of auto") as refused:
        choose(tiny("llama"), "flash")
    one_line(refused.value)


def test_a_softcap_that_the_model_leaves_out_is_not_put_in() -> None:
    """Some releases of transformers run gemma2 as sdpa, without its softcap; the text is theirs."""
    config: Any = tf.Gemma2Config(**COMMON)
    config._attn_implementation = "eager"
    model: Any = tf.Gemma2ForCausalLM(config).eval()
    windows, shapes = AttentionWindows.of(model), probe_layers(model)
    assert choose_attention(model, windows, shapes, "tree").tree
    model.config._attn_implementation = "sdpa"
    with pytest.raises(UnsupportedTarget, match="gemma2 runs as sdpa, which knows no softcap") as e:
        choose_attention(model, windows, shapes, "tree")
    one_line(e.value)
