"""One forward over ragged trees equals a plain forward of each path, and what it refuses."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from transformers import PreTrainedModel

from headstart.heads import FINAL, OptionError, SlabCache, UnsupportedTarget
from headstart.heads.core import (
    AttentionWindows,
    FeatureTap,
    PositionLimit,
    Topology,
    check_tree,
    prefill_forward,
    probe_layers,
    tree_forward,
    tree_mask,
)
from headstart.heads.core.masks import shifted_mask
from tests.support.tiny import (
    COMMON,
    CONFIGS,
    VOCAB,
    WINDOWED,
    one_line,
    path_to,
    random_parents,
    tiny,
)

LENGTHS = [5, 12, 1]  # shorter than the window of 9, past it, and a single token
NODES = 11
LIVE = 32
# Eager attention takes its softmax in float32 whatever the model's type.
TOLERANCE = {"sdpa": 1e-10, "eager": 1e-4}
SHOWS = 1e-2


@dataclass
class Batch:
    """Prompts, and under each a random tree whose root follows the prompt."""

    prompts: list[Tensor]
    parents: list[list[int]]
    tokens: Tensor  # [B, N]

    @property
    def topology(self) -> Topology:
        deepest = max(len(path_to(row, node)) for row in self.parents for node in range(NODES))
        return Topology.from_parents(torch.tensor(self.parents), deepest - 1)

    def path(self, row: int, node: int) -> Tensor:
        """The tokens from the prompt's first to this node's."""
        return torch.cat([self.prompts[row], self.tokens[row, path_to(self.parents[row], node)]])


def make_batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randint(VOCAB, (length,), generator=generator) for length in LENGTHS]
    parents = [random_parents(NODES, generator) for _ in LENGTHS]
    parents[1] = [-1, *range(NODES - 1)]  # a chain longer than the window
    return Batch(draw, parents, torch.randint(VOCAB, (len(LENGTHS), NODES), generator=generator))


@torch.no_grad()
def prefilled(model: PreTrainedModel, batch: Batch) -> tuple[SlabCache, Tensor]:
    cache = SlabCache(probe_layers(model), len(LENGTHS), LIVE)
    padded = torch.nn.utils.rnn.pad_sequence(batch.prompts, batch_first=True)
    return cache, prefill_forward(model, cache, padded, LENGTHS)


@torch.no_grad()
def run_tree(
    model: PreTrainedModel,
    batch: Batch,
    *,
    all_nodes: bool = False,
    shift: int = 0,
    windows: AttentionWindows | None = None,
    packed: bool = False,
) -> Tensor:
    """Logits [B, N, V], by tree attention if `packed`; the other options break one thing each."""
    cache, _ = prefilled(model, batch)
    shape, lengths = batch.topology, torch.tensor(LENGTHS)
    return tree_forward(
        model,
        cache,
        replace(windows or AttentionWindows.of(model), tree=packed),
        batch.tokens,
        lengths,
        lengths.unsqueeze(1) + shape.depth + shift,
        torch.ones_like(shape.ancestors) if all_nodes else shape.ancestors,
        LIVE,
    )


@torch.no_grad()
def distance(model: PreTrainedModel, batch: Batch, logits: Tensor) -> float:
    """The largest difference between the tree's logits and a plain forward of each path."""
    worst = 0.0
    for row in range(len(LENGTHS)):
        for node in range(NODES):
            plain = model(batch.path(row, node).unsqueeze(0), use_cache=False).logits[0, -1]
            worst = max(worst, (plain - logits[row, node]).abs().max().item())
    return worst


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("implementation", TOLERANCE)
def test_every_path_equals_a_plain_forward(name: str, implementation: str) -> None:
    model = tiny(name)
    model.set_attn_implementation(implementation)
    try:
        for seed in range(3):
            batch = make_batch(seed)
            assert distance(model, batch, run_tree(model, batch)) <= TOLERANCE[implementation]
    finally:
        model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("name", CONFIGS)
def test_so_it_does_by_tree_attention(name: str) -> None:
    model, batch = tiny(name), make_batch(0)
    assert distance(model, batch, run_tree(model, batch, packed=True)) <= TOLERANCE["sdpa"]


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_equals_a_plain_forward(name: str) -> None:
    model, batch = tiny(name), make_batch(0)
    _, logits = prefilled(model, batch)
    for row, prompt in enumerate(batch.prompts):
        plain = model(prompt.unsqueeze(0), use_cache=False).logits[0, -1]
        assert (plain - logits[row]).abs().max() <= 1e-10


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_seeing_other_branches_shows(name: str, packed: bool) -> None:
    model, batch = tiny(name), make_batch(0)
    logits = run_tree(model, batch, all_nodes=True, packed=packed)
    assert distance(model, batch, logits) > SHOWS


@pytest.mark.parametrize("name", CONFIGS)
def test_positions_off_by_one_show(name: str) -> None:
    model, batch = tiny(name), make_batch(0)
    assert distance(model, batch, run_tree(model, batch, shift=1)) > SHOWS


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", WINDOWED)
def test_a_dropped_window_shows(name: str, packed: bool) -> None:
    model, batch = tiny(name), make_batch(0)
    true = AttentionWindows.of(model)
    wide = AttentionWindows(None, true.by_type and dict.fromkeys(true.by_type))
    logits = run_tree(model, batch, windows=wide, packed=packed)
    assert distance(model, batch, logits) > SHOWS


def test_windows_are_read_from_the_config() -> None:
    def windows(name: str) -> AttentionWindows:
        return AttentionWindows.of(tiny(name))

    assert windows("llama") == AttentionWindows(None, None)
    assert windows("mistral") == AttentionWindows(9, None)
    assert windows("gpt2") == AttentionWindows(None, None)
    assert windows("gemma3") == AttentionWindows(
        None, {"sliding_attention": 9, "full_attention": None}
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_the_trial_finds_rounding_only(name: str) -> None:
    model = tiny(name)
    windows, shapes = AttentionWindows.of(model), probe_layers(model)
    assert check_tree(model, windows, shapes) <= 1e-12


def test_a_failing_tree_forward_is_refused() -> None:
    """Such as a cache that the model writes in another layout; the reason is passed on."""
    model = tiny("llama")
    wrong = probe_layers(tiny("gpt2"))  # twice as many heads
    with pytest.raises(UnsupportedTarget, match=r"llama cannot run a token tree \(\w+: ") as caught:
        check_tree(model, AttentionWindows.of(model), wrong)
    one_line(caught.value)


def test_mask_by_hand() -> None:
    """One row, three cached tokens, a root with two children, a window of three positions."""
    ancestors = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    positions = torch.tensor([[3, 4, 4]])
    mask = tree_mask(torch.tensor([3]), positions, ancestors, 8, torch.float32, window=3)
    assert (mask[0, 0] == 0).int().tolist() == [
        [0, 1, 1, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 1, 0, 0],
    ]
    assert mask.min() == torch.finfo(torch.float32).min
    wide = tree_mask(torch.tensor([3]), positions, ancestors, 8, torch.float32)
    assert (wide[0, 0, :, :3] == 0).all()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("window", [None, 2, 9, 50])
@pytest.mark.parametrize("seed", range(3))
def test_a_kept_mask_fits_every_length(seed: int, window: int | None, batch: int) -> None:
    """Also after the cache has grown; and it is made once for each capacity, not in each round."""
    parents = torch.tensor([random_parents(NODES, torch.Generator().manual_seed(seed))])
    shape = Topology.from_parents(parents, NODES - 1).expand(batch)
    slab = SlabCache(probe_layers(tiny("llama")), batch, LIVE)
    for capacity in (LIVE, 3 * LIVE):
        slab.reserve(capacity)
        kept = set()
        for seen in range(capacity - NODES + 1):
            lengths = torch.full((batch,), seen)
            positions = lengths.unsqueeze(1) + shape.depth
            for live in (seen + NODES, capacity):
                rest = (shape.ancestors, live, slab.dtype, window)
                found = shifted_mask(shape, slab, seen, live, window)
                assert torch.equal(found, tree_mask(lengths, positions, *rest))
                kept.add(found.untyped_storage().data_ptr())
        assert len(kept) == 1 and len(shape.masks) == 1


@pytest.mark.parametrize("layers", [[FINAL], [0], [1], [1, FINAL, 0]])
@pytest.mark.parametrize("name", CONFIGS)
def test_features_are_the_hidden_states(name: str, layers: list[int]) -> None:
    """Against a forward cut by hand: embeddings enter layer 0, the output layer reads the last."""
    model = tiny(name)
    size = model.config.hidden_size
    ids = torch.randint(VOCAB, (2, 6))
    with torch.no_grad(), FeatureTap(model, layers) as tap:
        output = model(ids, output_hidden_states=True, use_cache=False)
        features = tap.take()
    assert features.shape == (2, 6, size * len(layers))
    for part, layer in zip(features.split(size, -1), layers, strict=True):
        if layer == FINAL:
            assert torch.equal(model.get_output_embeddings()(part), output.logits)
        else:
            assert torch.equal(part, output.hidden_states[layer])
    with torch.no_grad():
        model(ids[:, :3])
    assert torch.equal(tap.take(), features)  # closed: nothing is captured any more


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_what_leaves_the_last_layer_can_be_read(name: str) -> None:
    """Some heads name one layer more than there are; the last norm makes the final state of it."""
    model = tiny(name)
    count = model.config.num_hidden_layers
    with torch.no_grad(), FeatureTap(model, [count, FINAL]) as tap:
        model(torch.randint(VOCAB, (2, 6)), use_cache=False)
        left, final = tap.take().chunk(2, -1)
        assert torch.equal(model.get_decoder().norm(left), final)


def test_a_missing_feature_layer_is_refused() -> None:
    with pytest.raises(OptionError, match=r"feature layer 7.*0 … 2") as caught:
        FeatureTap(tiny("llama"), [7])
    one_line(caught.value)


def test_other_attention_is_refused() -> None:
    model = tf.LlamaForCausalLM(CONFIGS["llama"]())
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UnsupportedTarget, match=r"llama.*flex_attention.*sdpa") as caught:
        AttentionWindows.of(model)
    one_line(caught.value)


def turned(kind: str | None, **options: Any) -> Any:
    """A llama whose rotary scaling is of that kind."""
    scaling = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0, **options}
    return tf.LlamaForCausalLM(tf.LlamaConfig(**COMMON, rope_parameters=scaling))


def test_batch_dependent_rotary_scaling_has_a_limit() -> None:
    """Below the trained length the frequencies are fixed, for every row of a batch."""
    limit = PositionLimit.of(turned("dynamic"))
    assert limit is not None and limit.positions == COMMON["max_position_embeddings"]
    assert "dynamic" in limit.reason
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    limit = PositionLimit.of(turned("longrope", original_max_position_embeddings=40, **factors))
    assert limit is not None and limit.positions == 40
    assert "longrope" in limit.reason
    for kind in ("default", "linear", "yarn"):
        assert PositionLimit.of(turned(kind)) is None


def test_a_table_of_positions_has_a_limit() -> None:
    for name in CONFIGS:
        limit = PositionLimit.of(tiny(name))
        if name == "gpt2":
            assert limit is not None and limit.positions == 256 and "table" in limit.reason
        else:
            assert limit is None
    opt = tf.OPTConfig(
        vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=1, num_attention_heads=4,
        word_embed_proj_dim=32, max_position_embeddings=96,
    )  # fmt: skip
    limit = PositionLimit.of(tf.OPTForCausalLM(opt))  # two rows stand before position 0
    assert limit is not None and limit.positions == 96


def test_an_unknown_layer_type_is_refused() -> None:
    model = tf.LlamaForCausalLM(CONFIGS["llama"]())
    model.config.layer_types = ["full_attention", "indexed_attention"]
    with pytest.raises(UnsupportedTarget, match=r"llama has layers of type 'indexed_attention'"):
        AttentionWindows.of(model)
