"""EAGLE: the published definition along every path of a tree, other trainers' heads, its options.

The reference below runs one text after another, without a cache, from the names and shapes that the
authors publish.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaModel

from headstart.heads import (
    FINAL,
    ArtifactError,
    Drafter,
    Manifest,
    OptionError,
    TrainableDrafter,
    family,
    fingerprint,
    load_drafter,
    save_drafter,
)
from headstart.heads.eagle import Eagle
from headstart.heads.eagle3 import Eagle3, mixed_layers
from headstart.infer import Speculator
from tests.support.equations import attended, gated, rms
from tests.support.published_eagle import (
    DIALECTS,
    HEADS,
    KEPT,
    SAID,
    SIZE,
    published,
    random,
)
from tests.support.tiny import VOCAB, one_line, tiny

TRIMMED = {"output": "trimmed", "draft_vocab_size": 20}


def by_hand(
    version: int, tensors: dict[str, Tensor], prefix: str, features: Tensor, tokens: list[int],
    normed: bool = False,
) -> Tensor:  # fmt: skip
    """Logits after true features [T, F], and as many tokens and more, each after the one before."""
    inside = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
    embedding = tensors["embed_tokens.weight"]
    hidden = features if version == 1 else F.linear(features, tensors["fc.weight"])
    out = hidden
    for end in range(len(features), len(tokens) + 1):
        words = embedding[torch.tensor(tokens[:end])]
        if version == 1:
            states = F.linear(torch.cat([words, hidden], -1), tensors["fc.weight"])
            states = added = states + tensors["fc.bias"]
        else:
            inner = rms(hidden, inside["hidden_norm.weight"])
            states = torch.cat([rms(words, inside["input_layernorm.weight"]), inner], -1)
            added = inner if normed else hidden
        seen = torch.ones(end, end, dtype=torch.bool).tril()
        out = added + attended(inside, states, seen, SIZE // HEADS)
        inner = rms(out, inside["post_attention_layernorm.weight"])
        out = out + gated(inside, inner)
        hidden = torch.cat([hidden, out[-1:]])
    if version == 1:
        return F.linear(out[-1], tiny("llama").lm_head.weight)
    return F.linear(rms(out[-1], tensors["norm.weight"]), tensors["lm_head.weight"])


def translated(version: int, said: dict[str, Any], tensors: dict[str, Tensor]) -> Drafter:
    """A drafter of the translated config and tensors, all of which it must have."""
    cls = Eagle if version == 1 else Eagle3
    other = Eagle3 if version == 1 else Eagle
    assert other.from_checkpoint(said, tensors) is None
    found = cls.from_checkpoint(said, tensors)
    assert found is not None
    known, weights = found
    drafter = cls(cls.config_class(**known)).double()  # type: ignore[arg-type]
    drafter.load_state_dict(weights)
    return drafter.eval().bind(tiny("llama"))


@pytest.mark.parametrize("dialect", DIALECTS)
@torch.no_grad()
def test_a_published_head_follows_the_definition_along_every_path(dialect: str) -> None:
    version, prefix, said, trimmed = DIALECTS[dialect]
    tensors = published(version, prefix, trimmed)
    drafter = translated(version, said, tensors)
    layers = [FINAL] if version == 1 else ([0, 1, 1] if dialect == "EAGLE-3" else [1, 1, 0])
    assert list(drafter.config.feature_layers) == layers
    assert drafter.draft_vocabulary is None or drafter.draft_vocabulary.equal(KEPT)
    width = SIZE * len(layers)
    texts, features = torch.randint(VOCAB, (2, 12)), random(2, 12, width)
    state = drafter.start(2, 40)
    drafter.prefill(state, features[:, :4], texts[:, :4], torch.tensor([4, 1]))
    done = torch.tensor([3, 0])  # pairs of each row that are committed
    for count in (torch.tensor([1, 1]), torch.tensor([2, 3]), torch.tensor([1, 2])):
        row = torch.arange(2).unsqueeze(1)
        places = done.unsqueeze(1) + torch.arange(4)  # one is padding at least
        drafter.reserve(state, int((done + count).max()), 4 + 6)
        step = drafter.begin(state, features[row, places], texts[row, places + 1], count)
        done = done + count
        # Level 1: nodes a b under the root; level 2: c d under b, e under a; level 3: f under d.
        levels = [torch.randint(VOCAB, (2, wide)) for wide in (2, 3, 1)]
        parents, steps = [[-1, -1], [1, 1, 0], [3]], [step]
        for level, parent in zip(levels, parents, strict=True):
            steps.append(drafter.extend(state, level, torch.tensor([parent] * 2)))
        for row in range(2):
            end = int(done[row])
            text = texts[row, 1 : end + 1].tolist()
            a, b, c, d, e, f = torch.cat([level[row] for level in levels]).tolist()
            paths = [[[]], [[a], [b]], [[b, c], [b, d], [a, e]], [[b, d, f]]]
            for step, expected in zip(steps, paths, strict=True):
                assert step.logits is not None and step.logits.shape[1] == len(expected)
                for node, path in enumerate(expected):
                    logits = by_hand(
                        version, tensors, prefix, features[row, :end], text + path,
                        normed="norm_before_residual" in said,
                    )  # fmt: skip
                    torch.testing.assert_close(step.logits[row, node], logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("beside", [True, False])
@torch.no_grad()
def test_a_head_that_mixes_no_layers_reads_the_final_state(beside: bool) -> None:
    """Also where a layer that would mix them is beside it."""
    tensors = published(3, "midlayer.")
    if not beside:
        del tensors["fc.weight"]
    drafter = translated(3, SAID | {"eagle_config": {"use_aux_hidden_state": False}}, tensors)
    assert list(drafter.config.feature_layers) == [FINAL]
    features, tokens = random(1, 3, SIZE), torch.randint(VOCAB, (1, 4))
    state = drafter.start(1, 8)
    drafter.reserve(state, 4, 4)
    step = drafter.begin(state, features, tokens[:, 1:], torch.tensor([3]))
    mixed = tensors | {"fc.weight": torch.eye(SIZE, dtype=torch.float64)}
    logits = by_hand(3, mixed, "midlayer.", features[0], tokens[0, 1:].tolist())
    assert step.logits is not None
    torch.testing.assert_close(step.logits[0, 0], logits, rtol=1e-5, atol=1e-5)


def test_tables_of_ids() -> None:
    """Ids in the place of offsets, a table of every token, and none at all."""
    tensors = published(3, "midlayer.", trimmed=True)
    for ids in (tensors["d2t"], KEPT):
        found = Eagle3.from_checkpoint(SAID, tensors | {"d2t": ids})
        assert found is not None and found[1]["vocabulary"].equal(KEPT)
    del tensors["t2d"]
    found = Eagle3.from_checkpoint(SAID, tensors)
    assert found is not None and found[1]["vocabulary"].equal(KEPT)
    for table in ({}, {"d2t": torch.zeros(VOCAB, dtype=torch.long)}):
        found = Eagle3.from_checkpoint(SAID, published(3, "midlayer.") | table)
        assert found is not None and "vocabulary" not in found[1] and "output" not in found[0]


def test_biases_that_are_missing_are_zero() -> None:
    tensors = published(1, "layers.0.")
    del tensors["fc.bias"]
    for name, size in {"q": 32, "k": 16, "v": 16}.items():
        tensors[f"layers.0.self_attn.{name}_proj.bias"] = random(size)
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = random(4)
    state = translated(1, SAID, tensors).state_dict()
    assert "fc.bias" not in state and not state["model.layers.0.self_attn.o_proj.bias"].any()
    assert state["model.layers.0.self_attn.q_proj.bias"].any()


@pytest.mark.parametrize(
    ("said", "tables", "named"),
    [
        ({"norm_before_fc": True}, {}, "input_norm.weight is missing"),
        ({"eagle_config": {"fc_norm": True}}, {}, "fc_norm.0.weight is missing"),
        ({"embed_requires_grad": True}, {"embed_tokens.weight": None}, "embed_requires_grad"),
        ({"speculators_model_type": "peagle", "mask_token_id": 3}, {}, "mask_hidden False"),
        ({}, {"mask_hidden": random(96)}, "mask_token_id None"),
        ({}, {"fc.weight": None}, "its fc.weight is missing"),
        ({"layer_types": ["linear_attention"]}, {}, "'linear_attention'"),
        ({"model_type": "gemma3_text"}, {}, "'gemma3_text'"),
        (
            {"rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.5}},
            {},
            "turn 0.5 of each head with the angles of the whole",
        ),
        ({"head_dim": 7}, {}, "no whole heads of 7"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 1, 0, 1]}, {}, "not those of 5 layers"),
        ({"num_attention_heads": None}, {}, "num_attention_heads"),
        ({"rope_scaling": {"type": "xdrope"}}, {}, "'xdrope'"),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, {}, "scaled by 0; expected a factor"),
        ({"eagle_aux_hidden_state_layer_ids": [0, True, 1]}, {}, "the layers [0, True, 1] of the"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": {"a": 1}}}, {}, "{'a': 1} of the"),
        ({}, {"d2t": KEPT + 0.5}, "its d2t is torch.float32 of shape [20]"),
        ({}, {"d2t": KEPT.view(1, -1)}, "its d2t is torch.int64 of shape [1, 20]"),
        ({}, {"t2d": torch.ones(8, 8, dtype=torch.bool)}, "its t2d is torch.bool of shape [8, 8]"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, {}, "(full_attention)"),
        ({}, {"d2t": KEPT.flip(0)}, "contradict each other"),
        ({}, {"d2t": KEPT.flip(0), "t2d": None}, "out of order"),
        ({}, {"d2t": KEPT + 30, "t2d": None}, "below 64"),
    ],
)
def test_heads_that_cannot_be_said_are_refused(
    said: dict[str, Any], tables: dict[str, Any], named: str
) -> None:
    tensors = published(3, "midlayer.", trimmed=True) | tables
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(ArtifactError) as caught:
        Eagle3.from_checkpoint(SAID | said, tensors)
    assert named in one_line(caught.value)


def test_other_peoples_rotary_positions() -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }  # fmt: skip
    tensors = published(1, "layers.0.")
    plain = translated(1, SAID, tensors).model.rotary_emb.inv_freq  # type: ignore[union-attr]
    scaled = translated(1, SAID | {"rope_scaling": scaling}, tensors).model.rotary_emb.inv_freq  # type: ignore[union-attr]
    assert not torch.allclose(plain, scaled) and (scaled <= plain + 1e-9).all()


FACTORS = {"short_factor": [1.1] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("scaling", "around"),
    [
        ({"rope_type": "longrope", **FACTORS}, {"original_max_position_embeddings": 64}),
        ({"rope_type": "longrope", **FACTORS, "original_max_position_embeddings": 64}, {}),
        ({"rope_type": "yarn", "factor": 4.0}, {"original_max_position_embeddings": 64}),
        ({"rope_type": "yarn", "factor": 4.0}, {}),
    ],
)
def test_the_length_that_positions_are_scaled_from(
    scaling: dict[str, Any], around: dict[str, Any]
) -> None:
    """It is found wherever a model's config may say it, and goes out with the factor it gives."""
    said = SAID | around | {"rope_scaling": scaling, "max_position_embeddings": 512}
    sizes = {name: value for name, value in said.items() if name != "architectures"}
    theirs = LlamaModel(LlamaConfig(**sizes)).rotary_emb
    tensors = published(1, "layers.0.")
    del tensors["embed_tokens.weight"]  # the target's are used
    drafter = translated(1, said, tensors)
    for each in (drafter, again(drafter)):
        ours: Any = each.model.rotary_emb
        assert torch.equal(ours.inv_freq, theirs.inv_freq)
        assert ours.attention_scaling == theirs.attention_scaling


def again(drafter: Any) -> Any:
    """A drafter as SGLang's format brings it back."""
    written = drafter.exports["sglang"](drafter)
    return translated(1, written.config, written.tensors)


def made(name: str, **options: Any) -> TrainableDrafter:
    cls: Any = family(name)
    return cls(cls.config_class.for_target(tiny("llama"), **options)).double().bind(tiny("llama"))


def test_decoding_is_that_of_the_target() -> None:
    """From prompts of one token, which have no pair, and deeper than it was taught."""
    model = tiny("llama")
    for ids in (torch.randint(1, VOCAB, (3, 7)), torch.tensor([[5]])):
        plain = Speculator(model).generate(ids, max_new_tokens=20, do_sample=False)
        for name in ("eagle", "eagle3"):
            speculator = Speculator(model, made(name).eval(), tree="chain:8")
            assert torch.equal(speculator.generate(ids, max_new_tokens=20, do_sample=False), plain)


@pytest.mark.parametrize(("name", "options"), [
    ("eagle", {}), ("eagle", TRIMMED), ("eagle3", TRIMMED),
])  # fmt: skip
@torch.no_grad()
def test_round_trip(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    drafter, model = made(name, **options), tiny("llama")
    counts = torch.ones(VOCAB, dtype=torch.long)
    counts[KEPT] = 10
    drafter.init_from_target(counts)
    if options:
        torch.testing.assert_close(drafter.lm_head.weight, model.lm_head.weight[KEPT])  # type: ignore[union-attr]
    folder = save_drafter(drafter, tmp_path / "it", Manifest(name, "tiny", fingerprint(model)))
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert not any("embed" in key for key in names)  # nothing of the target
    loaded = load_drafter(folder, model)
    assert type(loaded) is type(drafter)
    for key, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key
    ids = torch.randint(1, VOCAB, (1, 9))
    proposals = []
    for each in (drafter.eval(), loaded):
        state = each.start(1, 20)
        features = torch.ones(1, 9, SIZE * len(each.config.feature_layers), dtype=torch.float64)
        each.prefill(state, features, ids, torch.tensor([9]))
        each.reserve(state, 9, 1)
        proposals.append(each.begin(state, features[:, :1], ids[:, :1], torch.tensor([1])).logits)
    torch.testing.assert_close(
        *proposals, rtol=1e-6, atol=1e-6
    )  # rotary positions too, which are not saved


def test_which_layers_are_mixed() -> None:
    class Deep:
        def __init__(self, layers: int):
            self.config = self
            self.num_hidden_layers = layers

        def get_text_config(self, decoder: bool) -> Any:
            return self

    found = {count: mixed_layers(Deep(count)) for count in (1, 2, 5, 7, 12, 32)}  # type: ignore[arg-type]
    assert found == {
        1: [0, 0, 0], 2: [0, 1, 1], 5: [1, 2, 4], 7: [2, 3, 4], 12: [2, 6, 9], 32: [2, 16, 29],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("eagle", {"depths": 0}, "drafter.depths is 0"),
        ("eagle3", {"depths": 0}, "drafter.depths is 0"),
        ("eagle3", {"output": "trimmed"}, "draft_vocab_size is 0"),
        ("eagle3", {"draft_vocab_size": 8}, "draft_vocab_size is 8 with output 'own'"),
        ("eagle", {"output": "own", "draft_vocab_size": 8}, "size is 8 with output 'own'"),
        ("eagle", {"output": "small"}, "drafter.output is 'small'; expected 'shared', 'own' or"),
    ],
)
def test_bad_options_are_one_line(name: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(OptionError) as caught:
        made(name, **options)
    assert named in one_line(caught.value)
