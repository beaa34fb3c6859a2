"""Hydra: the formula, trees, the prefix, what it starts as, checkpoints of others, options."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from headstart.heads import (
    ArtifactError,
    Manifest,
    OptionError,
    fingerprint,
    load_drafter,
    save_drafter,
)
from headstart.heads.hydra import Hydra, HydraConfig
from tests.support.drafters import KEPT, started
from tests.support.published_hydra import HEADS, SIZE, public
from tests.support.tiny import COMMON, VOCAB, one_line, tiny

OPTIONS: dict[str, dict[str, Any]] = {
    "own": {"output": "own", "layers": 3},
    "shared": {},
    "trimmed": {"output": "trimmed", "draft_vocab_size": 20},
    "prefix": {"prefix": True, "layers": 2},
}


def hydra(options: str, random: bool = True) -> Hydra:
    return started("hydra", random, heads=HEADS, **OPTIONS[options])


def prefix_by_hand(weights: dict[str, Tensor], features: Tensor, target: Any = None) -> Tensor:
    """Features [B, T, D] after a one-layer model of transformers with these weights."""
    sizes = {
        name: getattr((target or tiny("llama")).config, name)
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "hidden_act",
                     "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters")
    }  # fmt: skip
    model = LlamaModel(LlamaConfig(**sizes, vocab_size=VOCAB, num_hidden_layers=1)).double()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing == ["embed_tokens.weight"] and not unexpected
    return model(inputs_embeds=features).last_hidden_state


def by_hand(drafter: Hydra, feature: Tensor, tokens: list[int]) -> Tensor:
    """Logits [Vd] after what stands for h [D] and the tokens since, from the formula."""
    weights, head = drafter.state_dict(), len(tokens) - 1
    embedding = tiny("llama").model.embed_tokens.weight
    states = torch.cat([feature, *embedding[tokens] * drafter.config.embedding_scale])

    def linear(name: str, given: Tensor) -> Tensor:
        name = f"mlp.{head}.{name}"
        return weights[f"{name}.weight"] @ given + weights[f"{name}.bias"]

    for layer in range(drafter.config.layers):
        beside = states if layer else linear("0.res_connection", states)
        states = beside + F.silu(linear(f"{layer}.linear", states))
    if drafter.output is None:
        return tiny("llama").lm_head.weight @ states
    return weights[f"output.{head}.weight"] @ states + weights[f"output.{head}.bias"]


@torch.no_grad()
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("prompt", [[4, 2], [1, 1]])
def test_a_tree_follows_the_formula_along_every_path(options: str, prompt: list[int]) -> None:
    drafter, longest = hydra(options), max(prompt)
    committed = torch.tensor([[3, 1], [0, 2], [2, 3]])
    text = torch.randn(2, 12, SIZE, dtype=torch.float64)  # each row's features, as they come
    used = torch.tensor(prompt)
    state = drafter.start(2, 40)
    read = [F.pad(text[r, :n], (0, 0, 0, longest - n), value=7.0) for r, n in enumerate(prompt)]
    drafter.prefill(state, torch.stack(read), torch.zeros(2, longest, dtype=torch.long), used)
    used = used - 1  # the prompt's last feature comes again
    for count in committed:  # nothing of a round is left in the next one
        features = torch.stack([text[row, int(used[row]) :][:3] for row in range(2)])
        tokens = torch.randint(VOCAB, (2, 3))
        used = used + count
        drafter.reserve(state, int(used.max()), 3 + 5)
        steps = [drafter.begin(state, features, tokens, count)]
        # Level 1: nodes a b under the root; level 2: c d under b, e under a.
        levels = [torch.randint(VOCAB, (2, width)) for width in (2, 3)]
        for level, parent in zip(levels, [[-1, -1], [1, 1, 0]], strict=True):
            steps.append(drafter.extend(state, level, torch.tensor([parent] * 2)))
        for row in range(2):
            if not count[row]:
                continue  # the row has ended: any answer will do
            root, read = int(tokens[row, int(count[row]) - 1]), text[row, : int(used[row])]
            if drafter.prefix is not None:
                read = prefix_by_hand(drafter.prefix.state_dict(), read.unsqueeze(0))[0]
            a, b, c, d, e = torch.cat([level[row] for level in levels]).tolist()
            paths = [[[]], [[a], [b]], [[b, c], [b, d], [a, e]]]
            for step, expected in zip(steps, paths, strict=True):
                assert step.logits is not None and step.logits.shape[1] == len(expected)
                for node, path in enumerate(expected):
                    logits = by_hand(drafter, read[-1], [root, *path])
                    torch.testing.assert_close(step.logits[row, node], logits)
    assert not drafter.independent and drafter.max_depth == drafter.train_depths == HEADS


@pytest.mark.parametrize("options", OPTIONS)
def test_a_new_head_says_what_the_target_says(options: str) -> None:
    """Blocks start as the identity on h, and the prefix as all but that: its norm has one size."""
    drafter, model = hydra(options, random=False), tiny("llama")
    text = torch.randint(VOCAB, (2, 6))
    features, every = model.model(text)[0].detach(), torch.ones_like(text, dtype=torch.bool)
    states = drafter.draft_hidden_states(features, text, every, HEADS)
    expected = model.lm_head(features).flatten(0, 1)
    if options == "trimmed":
        assert drafter.vocabulary.tolist() == KEPT.tolist()
        expected = expected[:, KEPT]
    for depth in range(1, HEADS + 1):
        logits = drafter.draft_logits(depth)(states[depth - 1])
        if options == "prefix":
            size = features.square().mean(-1).sqrt().flatten().unsqueeze(-1)
            assert (size.max() / size.min()) < 1.5
            assert drafter.prefix is not None
            level = cast(Tensor, drafter.prefix.norm.weight)[0]
            assert 0.8 < size.mean() / level < 1.25
            logits = logits * size / level
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def public_logits(
    config: dict[str, Any], tensors: dict[str, Tensor], features: Tensor, tokens: Tensor
) -> Tensor:
    """What the published heads say of features [B, T, D] and their tokens [B, T].

    Head i reads [h ; E(y_t+1) … E(y_t+1+i)]; the first block has a residual of its own.
    """
    prefixed = config["hydra_head_arch"] == "prefix-mlp"
    step, hidden = (2 if prefixed else 1), features
    if prefixed:
        start = "prefix_embeding_layer."
        own = {
            name.removeprefix(start): tensor
            for name, tensor in tensors.items()
            if name.startswith(start) and "embed_tokens" not in name and "rotary" not in name
        }
        hidden = prefix_by_hand(own, features)
    embedding, found = tensors["input_embed_fn.weight"], []
    for head in range(HEADS):
        seen = [embedding[tokens.roll(-shift, 1)] for shift in range(1, head + 2)]
        states = torch.cat([hidden, *seen], -1)
        for layer in range(config["hydra_num_layers"]):
            name = f"hydra_mlp.{head}.{step * layer + step - 1}"
            weight, bias = tensors[f"{name}.linear.weight"], tensors[f"{name}.linear.bias"]
            beside = states
            if not layer:
                name = f"{name}.res_connection"
                beside = F.linear(states, tensors[f"{name}.weight"], tensors[f"{name}.bias"])
            states = beside + F.silu(F.linear(states, weight, bias))
        name = f"hydra_lm_head.{head}" + (".1" if prefixed else "")
        found.append(F.linear(states, tensors[f"{name}.weight"], tensors[f"{name}.bias"]))
    return torch.stack(found)  # [K, B, T, V]


@pytest.mark.parametrize(("arch", "layers"), [("mlp", 1), ("mlp", 3), ("prefix-mlp", 4)])
@pytest.mark.parametrize("shared", ["named", "once"])
def test_a_public_checkpoint_says_what_it_says_there(arch: str, layers: int, shared: str) -> None:
    config, tensors = public(arch, layers)
    given, step = tensors, 2 if arch == "prefix-mlp" else 1
    if shared == "once":  # a format that keeps one of several names of a tensor
        given = {
            name: tensor
            for name, tensor in tensors.items()
            if not name.startswith("hydra_mlp") or int(name.split(".")[2]) < 2 * step
        }
    translated = Hydra.from_checkpoint(config, given)
    assert translated is not None
    fields, weights = translated
    assert (fields.pop("hidden_size"), fields.pop("vocab_size")) == (SIZE, VOCAB)
    assert fields.pop("embedding") == "own"
    sizes: dict[str, Any] = HydraConfig.for_target(tiny("llama"), **fields).to_dict() | {
        "embedding": "own"
    }
    drafter = Hydra(HydraConfig(**sizes)).double().bind(tiny("llama"))
    drafter.load_state_dict(weights)
    drafter.eval()
    tokens = torch.randint(VOCAB, (2, 7))
    features = torch.randn(2, 7, SIZE, dtype=torch.float64)
    expected = public_logits(config, tensors, features, tokens)
    where = torch.ones_like(tokens, dtype=torch.bool)
    states = drafter.draft_hidden_states(features, tokens, where, HEADS).unflatten(1, (2, 7))
    for depth in range(1, HEADS + 1):
        known = slice(0, 7 - depth)  # beyond, the published roll wraps round
        logits = drafter.draft_logits(depth)(states[depth - 1])
        torch.testing.assert_close(logits[:, known], expected[depth - 1][:, known])


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3"])
@torch.no_grad()
def test_a_public_prefix_layer_is_one_of_its_target(kind: str, tmp_path: Path) -> None:
    """Rotary positions are scaled, and the activation is, as the target's config says."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 16}
    sizes = {**COMMON, "rope_parameters": rope, "hidden_act": "gelu", "max_position_embeddings": 16}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes)).double().eval()
    config, tensors = public("prefix-mlp", 1)
    tensors["input_embed_fn.weight"] = model.get_input_embeddings().weight.detach()
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "hydra_lm_head.safetensors")
    drafter: Any = load_drafter(tmp_path, model)
    assert drafter.config.embedding == "shared"  # they are the target's
    features = torch.randn(1, 12, SIZE, dtype=torch.float64)
    start = "prefix_embeding_layer."
    own = {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}
    own = {n: t for n, t in own.items() if "embed_tokens" not in n and "rotary" not in n}
    expected = prefix_by_hand(own, features, model)
    found = drafter.prefix(inputs_embeds=features).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    plain = prefix_by_hand(own, features)
    assert (found - plain).abs().max() > 1e-2, "the control: scaling and activation matter"


def test_checkpoints_of_others() -> None:
    config, tensors = public("mlp", 1)
    assert Hydra.from_checkpoint(config, {"0.0.linear.weight": torch.ones(2, 2)}) is None
    blind = {name: tensor for name, tensor in tensors.items() if "res_connection" not in name}
    for change, given, named in (
        ({"hydra_head_arch": "cross-attn"}, tensors, "hydra_head_arch is 'cross-attn'"),
        ({"hydra_head_arch": "eagle-attn"}, tensors, "hydra_head_arch is 'eagle-attn'"),
        ({"grounded_heads": False}, blind, "grounded_heads False"),
        ({"hidden_state_offset": 1}, tensors, "hidden_state_offset 1"),
    ):
        with pytest.raises(ArtifactError) as caught:
            Hydra.from_checkpoint({**config, **change}, given)
        assert named in one_line(caught.value)
    translated = Hydra.from_checkpoint(config, {**tensors, "hydra_gate.weight": torch.ones(1)})
    assert translated is not None and "hydra_gate.weight" in translated[1]  # fits no drafter


@pytest.mark.parametrize("options", OPTIONS)
def test_round_trip(options: str, tmp_path: Path) -> None:
    drafter, model = hydra(options), tiny("llama")
    folder = save_drafter(drafter, tmp_path / "it", Manifest("hydra", "tiny", fingerprint(model)))
    with safe_open(folder / "model.safetensors", "pt") as file:
        kinds = {name.partition(".")[0] for name in set(file.keys())}
    extra = {"own": {"output"}, "trimmed": {"output", "vocabulary"}, "prefix": {"prefix"}}
    assert kinds == {"mlp", *extra.get(options, ())}  # and so nothing of the target
    loaded = load_drafter(folder, model)
    assert isinstance(loaded, Hydra)
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    assert loaded.config.embedding_scale == drafter.config.embedding_scale != 1
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_dropout_is_for_training_alone() -> None:
    drafter = Hydra(HydraConfig.for_target(tiny("llama"), heads=1, dropout=0.5)).double()
    drafter.bind(tiny("llama"))
    text, features = torch.ones(1, 40, dtype=torch.long), torch.ones(1, 40, SIZE).double()
    every = torch.ones_like(text, dtype=torch.bool)
    assert torch.equal(drafter.eval().draft_hidden_states(features, text, every, 1)[0], features[0])
    dropped = drafter.train().draft_hidden_states(features, text, every, 1)[0]
    assert set(dropped.unique().tolist()) == {0.0, 4.0}  # before the block, and after it
    assert 0.6 < (dropped == 0).double().mean() < 0.9


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"heads": 0}, "drafter.heads is 0"),
        ({"layers": 0}, "drafter.layers is 0"),
        ({"dropout": 1.0}, "drafter.dropout is 1.0"),
        ({"output": "trimmed"}, "draft_vocab_size is 0"),
        ({"draft_vocab_size": 8}, "draft_vocab_size is 8 with output 'shared'"),
        ({"prefix": 3}, "prefix"),
        ({"layer": {}}, "drafter.layer is not an option of 'hydra'"),
    ],
)
def test_bad_options_are_one_line(options: dict[str, Any], named: str) -> None:
    with pytest.raises(OptionError) as caught:
        HydraConfig.for_target(tiny("llama"), **options)
    assert named in one_line(caught.value)


def test_an_embedding_of_another_width_is_refused() -> None:
    drafter = Hydra(HydraConfig(hidden_size=16, vocab_size=VOCAB))
    with pytest.raises(OptionError, match=r"hidden state 16; hydra needs") as caught:
        drafter.bind(tiny("llama"))
    one_line(caught.value)
