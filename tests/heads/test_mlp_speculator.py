"""MLP speculators: the formula, trees, checkpoints of others, what they start as, options."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from headstart.heads import (
    ArtifactError,
    Manifest,
    OptionError,
    fingerprint,
    load_drafter,
    save_drafter,
)
from headstart.heads.artifacts.engines import serve_line
from headstart.heads.mlp_speculator import MlpSpeculator, MlpSpeculatorConfig
from headstart.infer import Speculator, parse_tree
from tests.support.drafters import KEPT, started
from tests.support.every_path import check_every_path
from tests.support.published_mlp_speculator import GATES, LAYOUTS, SIZE, WIDE, Layout, logits
from tests.support.tiny import VOCAB, one_line, prompts, tiny

OPTIONS: dict[str, dict[str, Any]] = {
    "tied": {"inner_dim": 24},
    "apart": {"tied": False, "scale_input": False, "inner_dim": 40},
    "lstm": {"cell": "lstm"},
    "trimmed": {"output": "trimmed", "draft_vocab_size": 20},
}


def speculator_of(options: str, random: bool = True, heads: int = 4) -> MlpSpeculator:
    return started("mlp_speculator", random, heads=heads, **OPTIONS[options])


def by_hand(drafter: MlpSpeculator, feature: Tensor, tokens: list[int]) -> Tensor:
    """Logits [Vd] after a feature [D] and the tokens since, from the formula."""
    config, weights = drafter.config, drafter.state_dict()
    wide = config.inner_dim or config.hidden_size
    b = 0.5 ** (1 / (2 * config.heads))
    a = ((1 - b * b) * wide / 2) ** 0.5 / b

    def norm(x: Tensor, name: str = "") -> Tensor:
        x = x / (x.square().mean() + 1e-6).sqrt()
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"] if name else x

    state = norm(feature) / 2**0.5 if config.scale_input else feature
    cell = torch.zeros(wide, dtype=torch.float64)
    for depth, token in enumerate(tokens):
        stage, place = (0, min(depth, 1)) if config.tied else (depth, depth)
        mixed, seen = weights[f"proj.{place}.weight"] @ state, weights[f"emb.{stage}.weight"][token]
        if config.cell == "mlp":
            state = F.gelu(norm(mixed + a * seen, f"ln.{stage}"))
            continue
        forget, take, give, candidate = (gate + a * seen for gate in mixed.chunk(4))
        cell = cell * forget.sigmoid() + take.sigmoid() * F.gelu(norm(candidate, "ln.0"))
        state = give.sigmoid() * F.gelu(norm(cell, "state_ln.0"))
    return weights[f"head.{0 if config.tied else len(tokens) - 1}.weight"] @ state


@pytest.mark.parametrize("options", OPTIONS)
@torch.no_grad()
def test_a_tree_follows_the_formula_along_every_path(options: str) -> None:
    drafter = speculator_of(options)
    kept = KEPT.tolist() if options == "trimmed" else None
    steps = check_every_path(drafter, by_hand)
    known = [None if each.vocabulary is None else each.vocabulary.tolist() for each in steps]
    assert known == [kept] * 8
    assert not drafter.independent and drafter.max_depth == drafter.train_depths == 4


@pytest.mark.parametrize("options", OPTIONS)
@torch.no_grad()
def test_what_a_new_drafter_starts_with(options: str) -> None:
    """The target's weights where they are as wide; embeddings of the authors' size in any case."""
    drafter, model = speculator_of(options, random=False), tiny("llama")
    wide = drafter.config.width
    rows, words = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    rows = rows[KEPT] if options == "trimmed" else rows
    weights = drafter.state_dict()
    for stage in range(drafter.config.stages):
        head, embedding = (weights[f"{kind}.{stage}.weight"] for kind in ("head", "emb"))
        assert (wide == 32) == (head.shape == rows.shape and torch.equal(head, rows))
        assert embedding.square().mean().sqrt() == pytest.approx(wide**-0.5, rel=0.1)
        alike = F.cosine_similarity(embedding, words) if wide == 32 else torch.zeros(1)
        assert bool((alike > 1 - 1e-9).all()) == (wide == 32)


def read(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """What loads from a folder with these files."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    stored = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    return load_drafter(folder, tiny("llama"))


@pytest.mark.parametrize("name", LAYOUTS)
@torch.no_grad()
def test_published_drafters_compute_what_they_do_elsewhere(name: str, tmp_path: Path) -> None:
    layout, model = LAYOUTS[name], tiny("llama")
    tensors = layout.tensors()
    drafter = read(tmp_path / "it", layout.config, tensors)
    assert type(drafter) is MlpSpeculator and drafter.max_depth == layout.heads
    feature, state = torch.randn(1, 1, SIZE).double(), drafter.start(1, 8)
    path = [5, 9, 17, 2, 40][: layout.heads]
    steps = [drafter.begin(state, feature, torch.tensor([[5]]), torch.tensor([1]))]
    for node, token in enumerate(path[1:]):
        steps.append(drafter.extend(state, torch.tensor([[token]]), torch.tensor([[node - 1]])))
    for depth, step in enumerate(steps, start=1):
        expected = logits(layout, tensors, feature[0, 0], path[:depth])
        assert step.logits is not None
        torch.testing.assert_close(step.logits[0, 0], expected, rtol=1e-12, atol=1e-12)
    ids, _ = prompts([7])
    plain = Speculator(model).generate(ids, max_new_tokens=16, do_sample=False)
    speculator = Speculator(model, drafter, tree=parse_tree(f"chain:{layout.heads}"))
    assert torch.equal(speculator.generate(ids, max_new_tokens=16, do_sample=False), plain)


def test_several_shards_in_half_precision(tmp_path: Path) -> None:
    layout = LAYOUTS["each stage its own"]
    tensors = {name: tensor.half() for name, tensor in layout.tensors().items()}
    (tmp_path / "config.json").write_text(json.dumps(layout.config))
    files, names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)], sorted(tensors)
    halves = [names[::2], names[1::2]]
    for file, part in zip(files, halves, strict=True):
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    places = {name: file for file, part in zip(files, halves, strict=True) for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    drafter: Any = load_drafter(tmp_path, tiny("llama"))
    assert drafter.dtype == torch.float64  # the target's
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, tensors[f"speculator.{name}"].double()), name


def test_a_pickle_is_asked_for(tmp_path: Path) -> None:
    layout = LAYOUTS["Arctic's LSTM"]
    (tmp_path / "config.json").write_text(json.dumps(layout.config))
    torch.save(layout.tensors(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ArtifactError, match="--allow-pickle"):
        load_drafter(tmp_path, tiny("llama"))
    drafter: Any = load_drafter(tmp_path, tiny("llama"), allow_pickle=True)
    assert drafter.config.cell == "lstm"


def changed(tensors: dict[str, Tensor], **by: Tensor | None) -> dict[str, Tensor]:
    """The same tensors with some others; without those that are None; `__` stands for a dot."""
    found = tensors | {name.replace("__", "."): tensor for name, tensor in by.items()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


@pytest.mark.parametrize(
    ("layout", "config", "by", "said"),
    [
        (Layout(), {}, {"head__0__weight": None}, "head.0.weight is missing"),
        (Layout(), {}, {"proj__0__weight": None}, "proj.0.weight is missing"),
        (Layout(), {}, {"emb__1__weight": None}, "found emb.1.weight missing, expected [64, 24]"),
        (Layout(), {}, {"ln__1__bias": torch.ones(9)}, "found ln.1.bias [9], expected [24]"),
        (Layout(), {}, {"head__0__bias": torch.ones(VOCAB)}, "head.0.bias [64], expected none"),
        (Layout(), {"tie_weights": True}, {}, "is not what other stages have"),
        (Layout(tied=True), {"n_predict": "3"}, {}, "its n_predict is '3'"),
        (Layout(), {}, {"head__0__weight": torch.ones(40, WIDE)}, "vocabulary 40, and this one's"),
        (Layout(), {}, {"proj__0__weight": torch.ones(WIDE, 48)}, "hidden size 48, and this one's"),
        (Layout(method="sum_rnn"), {}, {"emb__0__1__weight": torch.ones(WIDE)},
         "several layers, such as emb.0.1.weight"),
        (LAYOUTS["Arctic's LSTM"], {}, {"cell_emb__0__weight": torch.ones(VOCAB, WIDE)},
         "cell gate has embeddings of its own"),
        (LAYOUTS["Arctic's LSTM"], {}, {"input_proj__1__weight": None}, "proj.1.weight"),
    ],
)  # fmt: skip
def test_what_is_not_run_is_refused(
    layout: Layout, config: dict[str, Any], by: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ArtifactError) as caught:
        read(tmp_path / "it", layout.config | config, changed(layout.tensors(), **by))
    assert said in one_line(caught.value)


@pytest.mark.parametrize("options", ["tied", "lstm"])
def test_the_line_for_vllm_asks_for_its_plugin(options: str) -> None:
    drafter = speculator_of(options)
    line, kind = serve_line(drafter, "vllm", "them/it"), "LSTM" if options == "lstm" else "MLP"
    assert str(line).startswith("ARCTIC_INFERENCE_ENABLED=1 vllm serve ")
    assert '"method": "arctic", "model": "them/it", "num_speculative_tokens": 4' in str(line)
    config = MlpSpeculator.exports["vllm"](drafter).config
    assert config["architectures"] == [f"Arctic{kind}SpeculatorPreTrainedModel"]


def test_arctic_finds_the_names_that_it_takes() -> None:
    """Its loader takes these by name, and fails where one is missing."""
    drafter = speculator_of("lstm")
    written = MlpSpeculator.exports["vllm"](drafter)
    for gate in GATES:
        for name in (f"{gate}_emb.0.weight", f"{gate}_proj.0.weight", f"{gate}_proj.1.weight"):
            assert written.tensors.pop(name).shape[1] == 32
    rest = {f"{n}.0.{p}" for n in ("cell_ln", "state_ln") for p in ("weight", "bias")}
    assert written.tensors.keys() == rest | {"head.0.weight"}
    assert written.config["base_model_archs"] == ["LlamaForCausalLM"]
    assert all(type(written.config[f"{n}_dim"]) is str for n in ("emb", "proj", "inner"))


@pytest.mark.parametrize("options", OPTIONS)
def test_round_trip(options: str, tmp_path: Path) -> None:
    drafter, model = speculator_of(options), tiny("llama")
    manifest = Manifest("mlp_speculator", "tiny", fingerprint(model))
    loaded = load_drafter(save_drafter(drafter, tmp_path / "it", manifest), model)
    assert isinstance(loaded, MlpSpeculator)
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"heads": 0}, "drafter.heads is 0"),
        ({"inner_dim": -1}, "drafter.inner_dim is -1"),
        ({"cell": "gru"}, "cell"),
        ({"cell": "lstm", "tied": False}, "drafter.cell is 'lstm' with drafter.tied false"),
        ({"output": "trimmed"}, "draft_vocab_size is 0"),
        ({"output": "shared"}, "output"),
        ({"depths": 3}, "drafter.depths is not an option of 'mlp_speculator'"),
    ],
)
def test_bad_options_are_one_line(options: dict[str, Any], named: str) -> None:
    with pytest.raises(OptionError) as caught:
        MlpSpeculatorConfig.for_target(tiny("llama"), **options)
    assert named in one_line(caught.value)
