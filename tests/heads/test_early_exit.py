"""Early exit: the target's own layers draft, with its own weights and a cache of their own."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

import headstart
from headstart.heads import (
    ArtifactError,
    Manifest,
    OptionError,
    family,
    fingerprint,
    load_drafter,
)
from headstart.heads.artifacts.files import PICKLE
from headstart.heads.artifacts.saving import save_drafter
from headstart.heads.artifacts.source import DrafterSource, SourceKind
from headstart.heads.artifacts.trimming import trimmed
from headstart.heads.core import CpuLinear, capture, decoder_layers, decoder_of
from headstart.heads.early_exit import EarlyExit, EarlyExitConfig
from headstart.heads.parts.first_layers import first_layers
from headstart.heads.parts.own_layers import attending_layers, silence
from headstart.train.checks.plan import CheckError, plan_run
from headstart.train.recipe import parse_recipe
from tests.support.architectures import ARCHITECTURES
from tests.support.drafters import made
from tests.support.recipes import TINY
from tests.support.recurrent import RECURRENT, fresh
from tests.support.tiny import large_enough, one_line, prompts, tiny

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
TREE = "[[0],[1],[2],[0,0],[0,1],[0,0,0]]"
REFUSED = {"gemma4"}
"""Whose embeddings have a part for each layer."""
MODELS = [*ARCHITECTURES, *RECURRENT]


def model_of(name: str) -> Any:
    torch.manual_seed(1)
    model = (fresh(name) if name in RECURRENT else ARCHITECTURES[name]()).double().eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped_mm takes no float64
    return model


def attending(model: Any) -> int:
    """How many layers there are up to the first one that attends."""
    return attending_layers(model.config, alone=False)[0] + 1


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_first_layers_leave_what_enters_the_next_one(name: str) -> None:
    model = model_of(name)
    count = min(attending(model), len(decoder_layers(model)) - 1)
    before = {key: id(value) for key, value in model.named_parameters()}
    try:
        student: Any = first_layers(model, count, norm=False)
    except OptionError as error:
        assert name in REFUSED, one_line(error)
        return
    assert name not in REFUSED
    ids, _ = prompts([9, 9])
    hidden = decoder_of(student)(input_ids=ids, use_cache=False)[0]
    assert (hidden - capture(model, [count], ids)).abs().max() < 1e-10
    assert {key: id(value) for key, value in model.named_parameters()} == before
    theirs = {id(weight) for weight in model.parameters()}
    assert all(id(weight) in theirs for weight in student.parameters())
    assert len(decoder_layers(model)) > len(decoder_layers(student)) == count


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2"])
@torch.no_grad()
def test_the_name_alone_drafts_with_the_targets_norm_and_output_layer(name: str) -> None:
    """What it proposes is the argmax of these, of the hidden state that enters layer E."""
    model = copy.deepcopy(tiny(name))
    speculator = headstart.load(model, "early_exit:1", tree="chain:3")
    (drafter,) = speculator.drafters.drafters
    assert isinstance(drafter, EarlyExit) and not list(drafter.parameters())
    ids, mask = prompts([9, 4, 7])
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(speculator.generate(ids, attention_mask=mask, **GREEDY), expected)
    state, count = drafter.start(1, 40), torch.tensor([8])
    features = capture(model, [1], ids[:1])
    drafter.prefill(state, features[:, :8], ids[:1, :8], count)
    drafter.reserve(state, 9, 8)
    step = drafter.begin(state, features[:, 7:8], ids[:1, 8:], torch.ones_like(count))
    decoder: Any = model.get_decoder()
    norm = decoder.ln_f if name == "gpt2" else decoder.norm
    logits = model.get_output_embeddings()(norm(features[:, -1]))
    assert step.logits is not None
    assert (step.logits[0] - logits).abs().max() < 1e-10


@pytest.mark.parametrize("layers", [0, 1])
@pytest.mark.parametrize("name", ["lfm2", "bamba", "nemotron-h"])
def test_the_exit_is_not_before_the_first_layer_that_attends(name: str, layers: int) -> None:
    model = model_of(name)
    drafter = EarlyExit(EarlyExitConfig.for_target(model, layers=layers)).double().bind(model)
    assert attending(model) == drafter.config.exit_layer == 2
    ids, _ = prompts([9])
    text = headstart.load(model, drafter.eval(), tree=TREE).generate(ids, **GREEDY)
    assert torch.equal(text, headstart.load(model, None).generate(ids, **GREEDY))


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection", "traversal"])
def test_all_drafts_are_accepted_where_the_other_layers_add_nothing(rule: str) -> None:
    model = copy.deepcopy(tiny("llama"))
    for layer in decoder_layers(model)[1:]:
        silence(layer)
    drafter = family("early_exit").of_target(model).eval().bind(model)
    speculator = headstart.load(model, drafter, tree="chain:3", rule=rule)
    sample = {} if rule == "greedy" else {"do_sample": True, "seed": 3}
    ids, _ = prompts([9])
    speculator.generate(ids, **{**GREEDY, "max_new_tokens": 17, **sample})
    assert speculator.stats.tau == 4


def test_what_has_no_layers_of_its_own_is_an_artifact_without_weights(tmp_path: Path) -> None:
    """So that a plan can be saved with it."""
    model = tiny("llama")
    manifest = Manifest("early_exit", "tiny", fingerprint(model))
    made = load_drafter("early_exit:1", model)
    again: Any = load_drafter(save_drafter(made, tmp_path / "made", manifest), model)
    assert isinstance(again, EarlyExit) and again.config.to_dict() == made.config.to_dict()
    ids, _ = prompts([9])
    found = [headstart.load(model, each).generate(ids, **GREEDY) for each in (made, again)]
    assert torch.equal(*found)
    with pytest.raises(ArtifactError, match="an early_exit drafter has no output layer that could"):
        trimmed(made, torch.arange(9))


def test_what_would_train_nothing_is_refused() -> None:
    own = {"family": "early_exit", "layers": 0}
    with pytest.raises(CheckError, match="early_exit has no weights to train") as caught:
        plan_run(parse_recipe(TINY | {"drafter": own}))
    one_line(caught.value)
    with pytest.raises(OptionError, match=r"output is 'trimmed' and drafter\.layers 0"):
        EarlyExitConfig.for_target(tiny("llama"), layers=0, output="trimmed", draft_vocab_size=40)


def test_what_is_trained_starts_as_the_exit_without_layers_of_its_own() -> None:
    model = tiny("llama")
    ids, mask = prompts([9, 6])
    cls: Any = family("early_exit")
    config = cls.config_class.for_target(model, exit_layer=1, layers=2)
    drafter = cls(config).double().bind(model).eval()
    drafter.init_from_target()
    found = []
    for each in (drafter, "early_exit:1"):
        speculator = headstart.load(model, each, tree=TREE)
        options = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": True, "seed": 1}
        texts = speculator.generate(ids, **options)
        found.append((texts.tolist(), speculator.stats.tau))
    assert found[0] == found[1]


@pytest.mark.parametrize("own", [True, False])
def test_it_runs_by_the_kernels_that_the_target_runs_by(own: bool) -> None:
    model = large_enough(torch.float32, num_hidden_layers=3)
    drafter = made("early_exit", model) if own else EarlyExit.of_target(model).eval().bind(model)
    speculator = headstart.load(model, drafter, tree=TREE, compile="packed")
    ids, _ = prompts([9])
    expected = model.generate(ids, **GREEDY)
    assert torch.equal(speculator.generate(ids, **GREEDY), expected)
    assert not any(type(part) is CpuLinear for part in model.modules())
    running: Any = speculator.decoding_drafters.drafters[0]
    first = running._first.cached.model
    weights = {part.weight.data_ptr() for part in first.modules() if type(part) is CpuLinear}
    assert len(weights) == 7 and weights < {weight.data_ptr() for weight in model.parameters()}
    assert "forward" in vars(first), "all layers are one call"


def test_the_number_of_layers_may_follow_the_name() -> None:
    assert DrafterSource("early_exit:2").kind is SourceKind.IN_TARGET
    model = large_enough(torch.float32, num_hidden_layers=9)
    loaded: Any = [load_drafter(name, model) for name in ("early_exit", "early_exit:5")]
    assert [drafter.config.exit_layer for drafter in loaded] == [2, 5]
    for name in ("early_exit:0", "early_exit:x", "early_exit:", "early_exit:-1"):
        with pytest.raises(ArtifactError, match="such as early_exit:4") as caught:
            headstart.load(model, name)
        one_line(caught.value)
    with pytest.raises(ArtifactError, match="'lookup:3' drafts without weights"):
        headstart.load(model, "lookup:3")
    with pytest.raises(OptionError, match=r"exit_layer is 9; .* 9 layers: expected 1 … 8") as wrong:
        headstart.load(model, "early_exit:9")
    one_line(wrong.value)


class Adapter(torch.nn.Module):
    """A layer of Kangaroo's authors: Llama's without an MLP."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.self_attn = LlamaAttention(config, 0)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Any, **given: Any) -> Any:
        return hidden + self.self_attn(self.input_layernorm(hidden), **given)[0]


@torch.no_grad()
def test_an_adapter_of_kangaroo(tmp_path: Path) -> None:
    """Its authors name tensors so, and compute this with them."""
    model, sizes = tiny("llama"), {"rms_norm_eps": 1e-5, "num_hidden_layers": 1}
    config = LlamaConfig(**{**model.config.to_dict(), **sizes, "rope_parameters": None})
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    layer = Adapter(config).double()
    norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps).double()
    for weight in (*layer.parameters(), *norm.parameters()):
        weight.copy_(torch.randn_like(weight) * 0.4)
    tensors = {f"layers.0.{name}": weight for name, weight in layer.state_dict().items()}
    tensors |= {"norm.weight": norm.weight, "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    torch.save({name: weight.detach() for name, weight in tensors.items()}, tmp_path / PICKLE)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | {"model_type": "llama"}))
    drafter: Any = load_drafter(tmp_path, model, allow_pickle=True)
    assert isinstance(drafter, EarlyExit) and drafter.config.exit_layer == 1
    ids, _ = prompts([12])
    hidden, places = capture(model, [1], ids), torch.arange(12).unsqueeze(0)
    angles = LlamaRotaryEmbedding(config)(hidden, places)
    mask = torch.full((12, 12), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    left = norm(layer(hidden, position_embeddings=angles, attention_mask=mask))
    expected = model.get_output_embeddings()(left[:, -1])
    state, count = drafter.start(1, 40), torch.tensor([11])
    drafter.prefill(state, hidden[:, :11], ids[:, :11], count)
    drafter.reserve(state, 12, 8)
    step = drafter.begin(state, hidden[:, 10:11], ids[:, 11:], torch.ones_like(count))
    assert step.logits is not None and (step.logits[0] - expected).abs().max() < 1e-6
    text = headstart.load(model, drafter, tree=TREE).generate(ids, **GREEDY)
    assert torch.equal(text, model.generate(ids, **GREEDY))
    found = {name: weight.detach().contiguous() for name, weight in tensors.items()}
    (tmp_path / PICKLE).rename(tmp_path / "pickle")
    save_file(found, tmp_path / "model.safetensors", {"format": "pt"})  # as the Hub converts it
    again: Any = load_drafter(tmp_path, model)
    for name, weight in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pickle").rename(tmp_path / PICKLE)
    config.num_attention_heads = 5
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises(ArtifactError, match="num_attention_heads is 5, with states of") as caught:
        load_drafter(tmp_path, model, allow_pickle=True)
    one_line(caught.value)
