"""ReDrafter: the formula, trees, what it starts as, its options, and the artifact."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

from headstart.heads import Manifest, OptionError, family, fingerprint, load_drafter, save_drafter
from headstart.heads.redrafter import ReDrafter, ReDrafterConfig
from headstart.infer import Speculator, parse_tree
from tests.support.drafters import KEPT, started
from tests.support.every_path import check_every_path
from tests.support.tiny import VOCAB, one_line, tiny

OPTIONS: dict[str, dict[str, Any]] = {
    "own": {},
    "narrow": {"exit_dim": 24, "layers": 1},
    "trimmed": {"output": "trimmed", "draft_vocab_size": 20},
    "sums": {"rnn": False, "layers": 0},
}


def redrafter(options: str, random: bool = True) -> ReDrafter:
    return started("redrafter", random, **OPTIONS[options])


def by_hand(drafter: ReDrafter, feature: Tensor, tokens: list[int]) -> Tensor:
    """Logits [Vd] after a feature [D] and the tokens since, from the formula."""
    weights = drafter.state_dict()
    state = torch.zeros_like(feature)
    for token in tokens:
        embedding = tiny("llama").model.embed_tokens.weight[token]
        if not drafter.config.rnn:
            state = state + embedding
            continue
        state = F.silu(
            weights["rnn_w.weight"] @ embedding
            + weights["rnn_u.weight"] @ state
            + weights["rnn_u.bias"]
        )
    out = torch.cat([feature, state])
    if "input_proj.weight" in weights:
        out = weights["input_proj.weight"] @ out + weights["input_proj.bias"]
    layers = drafter.config.layers
    for layer in range(layers):
        weight, bias = (weights[f"lm_head.{layer}.linear.{name}"] for name in ("weight", "bias"))
        out = out + F.silu(weight @ out + bias)
    return weights[f"lm_head.{layers}.weight"] @ out


@pytest.mark.parametrize("options", OPTIONS)
def test_a_tree_follows_the_formula_along_every_path(options: str) -> None:
    drafter = redrafter(options)
    check_every_path(drafter, by_hand)
    assert not drafter.independent and drafter.max_depth is None and drafter.train_depths == 5


@pytest.mark.parametrize("options", ["own", "trimmed"])
def test_a_new_drafter_says_what_the_target_says(options: str) -> None:
    """The output layer starts blind to the cell, as the target's own."""
    drafter, model = redrafter(options, random=False), tiny("llama")
    feature = torch.randn(1, 1, 32, dtype=torch.float64)
    step = drafter.begin(drafter.start(1, 9), feature, torch.tensor([[5]]), torch.tensor([1]))
    expected = model.get_output_embeddings()(feature)
    if options == "trimmed":
        assert step.vocabulary is not None and step.vocabulary.tolist() == KEPT.tolist()
        expected = expected[..., KEPT]
    assert step.logits is not None
    torch.testing.assert_close(step.logits, expected)
    inputs = drafter.rnn_w(model.get_input_embeddings()(torch.arange(VOCAB)))
    assert 0.8 < inputs.square().mean().sqrt() < 1.25  # whatever the embeddings' size


def test_decoding_is_that_of_the_target() -> None:
    drafter, model = redrafter("own"), tiny("llama")
    ids = torch.randint(1, VOCAB, (3, 7))
    plain = Speculator(model).generate(ids, max_new_tokens=20, do_sample=False)
    for tree in ("chain:4", "chain:7", "cartesian:3,2,2"):  # also deeper than it was taught
        speculator = Speculator(model, drafter, tree=parse_tree(tree))
        assert torch.equal(speculator.generate(ids, max_new_tokens=20, do_sample=False), plain)


@pytest.mark.parametrize("options", OPTIONS)
def test_round_trip(options: str, tmp_path: Path) -> None:
    drafter, model = redrafter(options), tiny("llama")
    folder = save_drafter(
        drafter, tmp_path / "it", Manifest("redrafter", "tiny", fingerprint(model))
    )
    layers = drafter.config.layers
    names = {f"lm_head.{layers}.weight"}
    names |= set() if options == "sums" else {"rnn_w.weight", "rnn_u.weight", "rnn_u.bias"}
    names |= {f"lm_head.{i}.linear.{name}" for i in range(layers) for name in ("weight", "bias")}
    names |= {"input_proj.weight", "input_proj.bias"} if options == "narrow" else set()
    names |= {"vocabulary"} if options == "trimmed" else set()
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == names  # and so nothing of the target
    loaded = load_drafter(folder, model)
    assert isinstance(loaded, ReDrafter)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"depths": 0}, "drafter.depths is 0"),
        ({"layers": -1}, "drafter.layers is -1"),
        ({"exit_dim": -1}, "drafter.exit_dim is -1"),
        ({"output": "trimmed"}, "draft_vocab_size is 0"),
        ({"draft_vocab_size": 8}, "draft_vocab_size is 8 with output 'own'"),
        ({"output": "shared"}, "output"),
        ({"heads": 3}, "drafter.heads is not an option of 'redrafter'"),
    ],
)
def test_bad_options_are_one_line(options: dict[str, Any], named: str) -> None:
    with pytest.raises(OptionError) as caught:
        ReDrafterConfig.for_target(tiny("llama"), **options)
    assert named in one_line(caught.value)


def test_an_embedding_of_another_width_is_refused() -> None:
    assert family("redrafter") is ReDrafter
    drafter = ReDrafter(ReDrafterConfig(hidden_size=16, vocab_size=VOCAB))
    with pytest.raises(OptionError, match="32 wide and its hidden state 16") as caught:
        drafter.bind(tiny("llama"))
    one_line(caught.value)
