"""Gemma 4's assistants against transformers', their trees and rounds, and who may load them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma4TextConfig

from headstart.heads import (
    FAMILIES,
    ArtifactError,
    HeadstartError,
    OptionError,
    Sampling,
    family,
    load_drafter,
)
from headstart.heads.artifacts.conversion import convert
from headstart.heads.artifacts.files import read_json
from headstart.heads.core import capture, row_seeds
from headstart.heads.families import KNOWN, PUBLISHED, check_options
from headstart.heads.gemma4_assistant import Gemma4Assistant, Gemma4AssistantConfig
from headstart.heads.parts.published.gemma4_assistant import gemma4_assistant
from headstart.infer import Speculator
from headstart.infer.rules.registry import RULES
from tests.support import gemma4
from tests.support.families import TREES
from tests.support.scripted import decoding_of
from tests.support.syncs import run_rounds
from tests.support.tiny import letters, one_line, prompts, tiny

LENGTH, STEPS = 20, 4  # further than the window of 6


def text(vocabulary: int = 64, length: int = LENGTH, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (1, length), generator=generator)


def loaded(folder: Path, made: Any, model: Any) -> Gemma4Assistant:
    made.save_pretrained(folder)
    found = load_drafter(folder, model, dtype=torch.float64)
    assert isinstance(found, Gemma4Assistant)
    return found


def begun(drafter: Any, ids: Tensor, committed: int = 1) -> tuple[Any, Any]:
    """A state after a text [1, T], whose last `committed` tokens it took at once; and logits."""
    features = capture(drafter.target, drafter.config.feature_layers, ids[:, :-1])
    first = ids.shape[1] - committed
    state, count = drafter.start(1, 64), torch.tensor([first])
    drafter.reserve(state, first, 12)
    drafter.prefill(state, features[:, :first], ids[:, :first], count)
    drafter.reserve(state, ids.shape[1] - 1, 12)
    given = features[:, first - 1 :], ids[:, first:]
    return state, drafter.begin(state, *given, torch.tensor([committed])).logits


TARGETS: dict[str, dict[str, Any]] = {
    "shared layers": {},
    "none shared": {"num_kv_shared_layers": 0},
    "keys are values": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "no embeddings of layers": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
}


@torch.no_grad()
@pytest.mark.parametrize("groups", [8, 0])
@pytest.mark.parametrize("name", TARGETS)
def test_each_step_has_the_logits_of_transformers(name: str, groups: int, tmp_path: Path) -> None:
    changes = TARGETS[name]
    model = gemma4.target(**changes)
    heads = {key: changes[key] for key in changes if key.startswith(("attention", "num_global"))}
    made = gemma4.assistant(groups=groups, **heads)
    ids = text()
    expected, tokens = gemma4.steps_of(made, model, ids, STEPS)
    drafter: Any = loaded(tmp_path, made, model)
    state, logits = begun(drafter, ids)
    for step in range(STEPS):
        chosen = logits.isfinite()
        assert chosen.sum() == (24 if groups else 64)
        torch.testing.assert_close(logits[chosen], expected[step][chosen], rtol=0, atol=1e-9)
        assert expected[step].argmax() == logits.argmax()
        logits = drafter.extend(state, tokens[step], torch.tensor([[step - 1]])).logits


@torch.no_grad()
def test_the_unified_one_too(tmp_path: Path) -> None:
    model = gemma4.target("Gemma4Unified")
    made, ids = gemma4.assistant("Gemma4Unified"), text()
    expected, _ = gemma4.steps_of(made, model, ids, 1)
    _, logits = begun(loaded(tmp_path, made, model), ids)
    chosen = logits.isfinite()
    torch.testing.assert_close(logits[chosen], expected[0][chosen], rtol=0, atol=1e-9)


@torch.no_grad()
def test_a_target_that_reads_images_is_the_same() -> None:
    """As Gemma 4 is published; of text."""
    ids, mask = prompts([9, 4, 7])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    given = {"input_ids": ids % 60, "attention_mask": mask, **options}
    model = gemma4.with_images(gemma4.target())
    drafter = gemma4.drafter(model)
    plain = begun(gemma4.drafter(gemma4.target()), text(60))[1]
    torch.testing.assert_close(begun(drafter, text(60))[1], plain)
    speculator = Speculator(model, drafter, tree=TREES[1])
    assert torch.equal(speculator.generate(**given), model.generate(**given))


@torch.no_grad()
def test_what_was_committed_in_a_round_is_as_if_it_were_a_prompt() -> None:
    """In a batch, too, whose rows commit 3, 1 and no tokens."""
    drafter = gemma4.drafter(gemma4.target())
    ids = text()
    alone = [begun(drafter, ids[:, : 12 + more])[1] for more in (3, 1)]
    torch.testing.assert_close(begun(drafter, ids[:, :15], committed=3)[1], alone[0])
    features = capture(drafter.target, drafter.config.feature_layers, ids[:, :14])
    state = drafter.start(3, 64)
    drafter.reserve(state, 14, 12)
    rows = [each.expand(3, -1, *each.shape[2:]) for each in (features, ids)]
    drafter.prefill(state, rows[0][:, :12], rows[1][:, :12], torch.tensor([12, 12, 12]))
    step = drafter.begin(state, rows[0][:, 11:14], rows[1][:, 12:15], torch.tensor([3, 1, 0]))
    assert step.logits is not None and step.logits.shape == (3, 1, 64)
    for row, expected in enumerate(alone):
        torch.testing.assert_close(step.logits[row], expected[0])


@torch.no_grad()
def test_a_node_reads_its_parent_alone() -> None:
    """A tree's nodes draft what chains do, whatever stands beside them."""
    drafter: Any = gemma4.drafter(gemma4.target())
    ids = text()
    state, _ = begun(drafter, ids)
    drafter.extend(state, torch.tensor([[5, 6]]), torch.tensor([[-1, -1]]))
    level = drafter.extend(state, torch.tensor([[7, 7, 8]]), torch.tensor([[1, 0, 0]])).logits
    for node, path in enumerate(([6, 7], [5, 7], [5, 8])):
        state, _ = begun(drafter, ids)
        found = [
            drafter.extend(state, torch.tensor([[token]]), torch.tensor([[depth - 1]])).logits
            for depth, token in enumerate(path)
        ]
        torch.testing.assert_close(level[:, node], found[-1][:, 0])


@torch.no_grad()
def test_a_layer_with_a_window_sees_no_further() -> None:
    model, ids = gemma4.target(), text()
    whole = {"kinds": ["full_attention"], "head_dims": {"full_attention": 16}}
    windowed = {"kinds": ["sliding_attention"], "head_dims": {"sliding_attention": 8}, "window": 6}
    for options, sees in ((windowed, 6), (whole, LENGTH - 2)):
        drafter = gemma4.drafter(model, **options)
        state, before = begun(drafter, ids)
        for back in (sees, sees + 1):
            if (slot := LENGTH - 2 - back) < 0:
                continue
            drafter.extend(state, ids[:, :1], torch.tensor([[-1]]))
            keys, _ = state.slab.layer(0)
            kept = keys[:, :, slot].clone()
            keys[:, :, slot] += 3
            final = capture(model, [-1], ids[:, :-1])[:, -1:]
            changed = drafter._propose(drafter._states(state, ids[:, -1:], final)).logits
            keys[:, :, slot] = kept
            assert changed is not None and torch.equal(changed, before) == (back > sees)


def few_tokens(**options: Any) -> tuple[Any, Gemma4Assistant]:
    """A target and a drafter of so few tokens that some drafts are accepted by chance."""
    model = gemma4.target(vocab_size=8, vocab_size_per_layer_input=8)
    return model, gemma4.drafter(model, centroids=4, **options)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("tree", TREES)
def test_greedy_text_is_that_of_generate(tree: str, graphs: bool) -> None:
    model, drafter = few_tokens()
    ids, mask = prompts([9, 4, 7])
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    speculator = Speculator(model, drafter, tree=tree, graphs=graphs)
    found = speculator.generate(ids % 8, attention_mask=mask, **options)
    assert torch.equal(found, model.generate(ids % 8, attention_mask=mask, **options))
    assert speculator.stats.tau > 1.1


@pytest.mark.parametrize("rule", ["coupled", "match", "rejection", "traversal"])
def test_a_round_does_not_wait(rule: str) -> None:
    model, drafter = few_tokens()
    ids, mask = prompts([9, 4, 7])
    how: dict[str, Any] = {"rule": RULES[rule], "expansion": RULES[rule].children}
    chosen = Sampling(row_seeds(3, 3))
    decoding = decoding_of(model, drafter, "cartesian:3,2", chosen, **how)
    with torch.no_grad():
        decoding.prefill(ids % 8, mask, 16)
        assert run_rounds(decoding) > 2


def test_an_artifact_of_it_is_the_same_drafter(tmp_path: Path) -> None:
    gemma4.target().save_pretrained(tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float64)
    drafter = loaded(tmp_path / "published", gemma4.assistant(), model)
    convert(tmp_path / "published", model, letters(), tmp_path / "artifact")
    again = load_drafter(tmp_path / "artifact", model, letters(), dtype=torch.float64)
    assert drafter.config.family_name() == again.config.family_name() == "gemma4_assistant"
    state = again.state_dict()
    assert state.keys() == drafter.state_dict().keys()
    assert not any(part in name for name in state for part in ("k_proj", "v_proj", "embed_tokens"))
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert list(again.config.feature_layers) == [-1, 3, 2]


PUBLISHED_E2B: dict[str, Any] = {
    "architectures": ["Gemma4AssistantForCausalLM"], "backbone_hidden_size": 1536,
    "centroid_intermediate_top_k": 32, "dtype": "bfloat16", "model_type": "gemma4_assistant",
    "num_centroids": 2048, "tie_word_embeddings": True, "use_ordered_embeddings": True,
    "text_config": {
        "_name_or_path": "", "architectures": None, "attention_bias": False,
        "attention_dropout": 0.0, "attention_k_eq_v": False, "bos_token_id": 2,
        "chunk_size_feed_forward": 0, "dtype": "bfloat16", "enable_moe_block": False,
        "eos_token_id": 1, "final_logit_softcapping": None, "global_head_dim": 512,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 256,
        "hidden_size_per_layer_input": 0, "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
        "initializer_range": 0.02, "intermediate_size": 2048, "is_encoder_decoder": False,
        "label2id": {"LABEL_0": 0, "LABEL_1": 1},
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "max_position_embeddings": 131072, "model_type": "gemma4_text",
        "moe_intermediate_size": None, "num_attention_heads": 4, "num_experts": None,
        "num_global_key_value_heads": None, "num_hidden_layers": 4, "num_key_value_heads": 1,
        "num_kv_shared_layers": 4, "output_attentions": False, "output_hidden_states": False,
        "pad_token_id": 0, "problem_type": None, "return_dict": True, "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
        "sliding_window": 512, "tie_word_embeddings": True, "top_k_experts": None,
        "use_bidirectional_attention": None, "use_cache": True, "use_double_wide_mlp": False,
        "vocab_size": 262144, "vocab_size_per_layer_input": 0,
    },
}  # fmt: skip
"""The config of google/gemma-4-E2B-it-assistant, without the ids of images and sounds."""


def test_the_config_that_is_published() -> None:
    sizes = {
        "hidden_size": 1536, "vocab_size": 262144, "kinds": ["sliding_attention"] * 3 + KINDS[:1],
        "width": 256, "inner_dim": 2048, "query_heads": 4, "window": 512, "eps": 1e-6,
        "head_dims": {"full_attention": 512, "sliding_attention": 256},
        "activation": "gelu_pytorch_tanh", "centroids": 2048, "top_centroids": 32,
    }  # fmt: skip
    shapes = Gemma4AssistantConfig(**sizes).shapes()
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    tensors["masked_embedding.token_ordering"] = torch.arange(262144, dtype=torch.int32)
    tensors["model.embed_tokens.weight"] = tensors.pop("lm_head.weight")  # as tied weights are kept
    known, found = gemma4_assistant(PUBLISHED_E2B, tensors) or ({}, {})
    target = Gemma4TextConfig().rope_parameters
    assert known.pop("rope_parameters") == target and known == sizes
    assert found.keys() == shapes.keys()
    assert round(sum(tensor.numel() for tensor in found.values()) / 1e6) == 78  # as its card says


KINDS = ["full_attention", "sliding_attention"]
ANGLES = {"rope_type": "default", "rope_theta": 999.0}
OTHERS: dict[str, tuple[Any, str]] = {
    "another model": (lambda: tiny("llama"), "the target is a llama, .* as Gemma 4 has them"),
    "another size": (
        lambda: gemma4.target(hidden_size=16), "hidden size 32, and this one's is 16",
    ),
    "other keys": (
        lambda: gemma4.target(global_head_dim=8),
        "4 queries of full_attention have size 16, and the target has 2 keys of size 8",
    ),
    "one kind of attention": (
        lambda: gemma4.target(layer_types=["full_attention"] * 6),
        "queries of sliding_attention have size 8, and the target has none",
    ),
    "other angles": (
        lambda: gemma4.target(rope_parameters=dict.fromkeys(KINDS, ANGLES)),
        "rotary positions of full_attention are .*999",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_another_target_is_refused(name: str, tmp_path: Path) -> None:
    make, said = OTHERS[name]
    gemma4.assistant().save_pretrained(tmp_path)
    with pytest.raises(HeadstartError, match=said) as caught:
        load_drafter(tmp_path, make())
    one_line(caught.value)


DAMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "no layers": ({"text_config": None}, "no text_config that can be used"),
    "code": ({"text_config": {"auto_map": {"AutoConfig": "evil.py"}}}, "no text_config"),
    "of another kind": ({"text_config": {"model_type": "gemma4_text", "rms_norm_eps": "x"}},
                        "describes no layers of Gemma 4"),
    "groups": ({"num_centroids": 7}, "centroids is 7 .* expected a divisor of"),
    "too many groups": ({"centroid_intermediate_top_k": 9}, "top_centroids 9"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_config_that_contradicts_is_refused(name: str, tmp_path: Path) -> None:
    change, said = DAMAGE[name]
    gemma4.assistant().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(read_json(path) | change))
    with pytest.raises(ArtifactError, match=said) as caught:
        load_drafter(tmp_path, gemma4.target())
    one_line(caught.value)


@pytest.mark.parametrize("wrong", [64, -1])
def test_tokens_that_there_are_not_are_refused(wrong: int, tmp_path: Path) -> None:
    """A GPU would stop at the first one."""
    made = gemma4.assistant()
    made.masked_embedding.token_ordering[5] = wrong
    made.save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match="expected ids of the 64 tokens") as caught:
        load_drafter(tmp_path, gemma4.target())
    one_line(caught.value)


def test_it_is_no_family_of_recipes() -> None:
    assert PUBLISHED.keys() == {"gemma4_assistant"} == KNOWN.keys() - FAMILIES.keys()
    assert not family("gemma4_assistant").trainable
    with pytest.raises(OptionError, match="not trained here; load one that was published") as error:
        check_options("gemma4_assistant", {})
    one_line(error.value)
    with pytest.raises(ArtifactError, match="is a family of drafters that are not trained") as own:
        load_drafter("gemma4_assistant", gemma4.target())
    one_line(own.value)
