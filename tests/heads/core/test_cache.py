"""The slab cache: ragged writes, commits that overlap, growth, and targets it refuses."""

import pytest
import torch
import transformers as tf

from headstart.heads import SlabCache, UnsupportedTarget
from headstart.heads.core import LayerShape, probe_layers
from tests.support.tiny import CONFIGS, VOCAB, one_line, tiny

CPU = torch.device("cpu")
# Keys and values of different width, and two kinds of layers: three slabs.
SHAPES = [
    LayerShape(CPU, torch.float64, (2, 4), (2, 6)),
    LayerShape(CPU, torch.float64, (1, 8), (1, 8)),
    LayerShape(CPU, torch.float64, (2, 4), (2, 6)),
]


def filled(capacity: int = 8, batch: int = 3) -> SlabCache:
    """A cache whose entry of (layer, kind, row, slot) is a number that names it."""
    cache = SlabCache(SHAPES, batch, capacity)
    cache.set_slots(torch.arange(capacity).expand(batch, -1), live=capacity)
    for layer in range(len(SHAPES)):
        keys, values = (named(layer, kind, batch, range(capacity)) for kind in (0, 1))
        cache.update(keys, values, layer)
    return cache


def named(layer: int, kind: int, batch: int, slots: range) -> torch.Tensor:
    heads, size = (SHAPES[layer].key, SHAPES[layer].value)[kind]
    row = torch.arange(batch, dtype=torch.float64)[:, None] * 100
    number = row + torch.tensor(slots, dtype=torch.float64) + 1000 * (2 * layer + kind)  # [B, N]
    inner = torch.arange(heads * size, dtype=torch.float64).view(heads, 1, size) / 1000
    return number[:, None, :, None] + inner  # [B, H, N, D]


@pytest.mark.parametrize("slots", [[[0, 1], [4, 5], [7, 2]], [[3, 5]]], ids=["ragged", "one row"])
def test_writes_land_where_aimed(slots: list[list[int]]) -> None:
    batch = len(slots)
    cache = SlabCache(SHAPES, batch, 8)
    cache.set_slots(torch.tensor(slots), live=6)
    for layer in range(3):
        keys, values = (named(layer, kind, batch, range(2)) for kind in (0, 1))
        seen_keys, seen_values = cache.update(keys, values, layer)
        all_keys, all_values = cache.layer(layer)
        assert torch.equal(seen_keys, all_keys[:, :, :6]) and seen_values.shape[2] == 6
        for row in range(batch):
            assert torch.equal(all_keys[row][:, slots[row]], keys[row])
            assert torch.equal(all_values[row][:, slots[row]], values[row])
            empty = [slot for slot in range(8) if slot not in slots[row]]
            assert not all_keys[row][:, empty].any() and not all_values[row][:, empty].any()


def test_views_show_later_writes() -> None:
    cache = SlabCache(SHAPES, 1, 4)
    cache.set_slots(torch.tensor([[0]]), live=4)
    seen, _ = cache.update(named(0, 0, 1, range(1)), named(0, 1, 1, range(1)), 0)
    cache.set_slots(torch.tensor([[3]]), live=4)
    cache.update(named(0, 0, 1, range(3, 4)), named(0, 1, 1, range(3, 4)), 0)
    assert torch.equal(seen[:, :, 3:], named(0, 0, 1, range(3, 4)))


START = [2, 0, 3]  # where each row's last forward wrote its five nodes


def committed(paths: list[list[int]]) -> tuple[SlabCache, SlabCache, torch.Tensor]:
    """A cache after a commit, the same cache before it, and the aimed slots [B, N]."""
    cache, before = filled(), filled()
    slots = torch.tensor(START).unsqueeze(1) + torch.arange(5)
    cache.set_slots(slots, live=8)
    cache.commit(torch.tensor(paths))
    return cache, before, slots


@pytest.mark.parametrize(
    "path",
    [
        [0, 2, 4],
        [0, 1, 1],
        [1, 2, 3, 4],  # shifts down by one
        [0, 0, 1, 2],  # shifts up: a copy node by node would smear node 0
        [3, 2, 1, 0],
    ],
)
def test_commit_reads_before_it_writes(path: list[int]) -> None:
    cache, before, slots = committed([path] * 3)
    for layer in range(3):
        for new, old in zip(cache.layer(layer), before.layer(layer), strict=True):
            for row in range(3):
                expected = old[row].clone()
                expected[:, slots[row, : len(path)]] = old[row][:, slots[row, path]]
                assert torch.equal(new[row], expected)


def test_commit_keeps_rows_apart() -> None:
    paths = [[0, 4], [0, 1], [2, 3]]
    cache, before, slots = committed(paths)
    keys, old = cache.layer(1)[0], before.layer(1)[0]
    for row, path in enumerate(paths):
        expected = old[row].clone()
        expected[:, slots[row, :2]] = old[row][:, slots[row, path]]
        assert torch.equal(keys[row], expected)


def test_growth_keeps_what_is_cached() -> None:
    cache, before = filled(), filled()
    cache.reserve(20)
    assert cache.capacity == 20
    for layer in range(3):
        for new, old in zip(cache.layer(layer), before.layer(layer), strict=True):
            assert new.shape[2] == 20
            assert torch.equal(new[:, :, :8], old) and not new[:, :, 8:].any()
    cache.reserve(5)
    assert cache.capacity == 20  # never shrinks
    cache.set_slots(torch.tensor([[19], [8], [0]]), live=20)
    keys, _ = cache.update(named(0, 0, 3, range(1)), named(0, 1, 3, range(1)), 0)
    assert torch.equal(keys[1, :, 8], named(0, 0, 3, range(1))[1, :, 0])
    assert torch.equal(keys[1, :, 7], before.layer(0)[0][1, :, 7])


def test_it_is_whole_again_after_memory_was_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the next size is: one that it had before, or of the rows that did not fit."""
    cache = SlabCache(SHAPES, 1, 64)

    def none(*given: object, **options: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    for batch in (1, 3):
        with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
            patch.setattr(torch, "empty", none)
            cache.resize(3, 999)
        cache.resize(batch, 64)
        cache.set_slots(torch.tensor([[0, 1]] * batch), live=2)
        keys, values = (named(0, kind, batch, range(2)) for kind in (0, 1))
        assert all(map(torch.equal, cache.update(keys, values, 0), (keys, values)))
    cache.release()
    cache.resize(1, 4)
    assert (cache.batch, cache.capacity) == (1, 4)


@pytest.mark.parametrize("name", CONFIGS)
def test_probe_finds_every_layer(name: str) -> None:
    model = tiny(name)
    config = model.config
    shapes = probe_layers(model)
    assert len(shapes) == config.num_hidden_layers
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    assert {shape.key for shape in shapes} == {shape.value for shape in shapes} == {(heads, 8)}
    assert {shape.dtype for shape in shapes} == {torch.float64}


def test_probe_refuses_a_state_that_cannot_roll_back() -> None:
    config = tf.JambaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=4,
    )
    with pytest.raises(UnsupportedTarget, match="jamba keeps a state at layer 0") as caught:
        probe_layers(tf.JambaForCausalLM(config).eval())
    one_line(caught.value)


def test_probe_leaves_the_mode_as_it_was() -> None:
    model = tf.LlamaForCausalLM(CONFIGS["llama"]()).train()
    probe_layers(model)
    assert model.training
