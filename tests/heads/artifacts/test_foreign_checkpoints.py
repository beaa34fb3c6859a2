"""Checkpoints of others: what they compute by their public definitions, and what is refused."""

import json
import logging
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from headstart.heads import ArtifactError, Drafter, load_drafter
from headstart.heads.artifacts.foreign_files import read_tensors, recognise
from headstart.heads.artifacts.source import DrafterSource, SourceKind
from headstart.heads.families import FAMILIES, family
from headstart.infer import Speculator
from tests.support import published_dflash as dflash
from tests.support import published_eagle as eagle
from tests.support import published_hydra as hydra
from tests.support.drafters import made
from tests.support.tiny import COMMON, VOCAB, one_line, prompts, tiny

SIZE = COMMON["hidden_size"]
Tensors = dict[str, Tensor]
PT, SAFE = "medusa_lm_head.pt", "medusa_lm_head.safetensors"
MODEL = "model.safetensors"
LLAMA = {"model_type": "llama"}
VICUNA = {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "medusa_num_layers": 1}


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64) / shape[-1] ** 0.5


def write(folder: Path, config: dict[str, Any], tensors: Any, file: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def block(states: Tensor, tensors: Tensors, place: str) -> Tensor:
    """x + SiLU(Wx + b), as both public definitions have it."""
    return states + F.silu(F.linear(states, tensors[f"{place}.weight"], tensors[f"{place}.bias"]))


def decodes_exactly(drafter: Drafter) -> None:
    ids, _ = prompts([7])
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    speculator = Speculator(tiny("llama"), drafter)
    text = speculator.generate(ids, **options)
    assert torch.equal(text, Speculator(tiny("llama")).generate(ids, **options))
    assert speculator.stats.rounds > 0


# Medusa.


def medusa(heads: int = 5, layers: int = 1, own: bool = True, prefix: str = "") -> Tensors:
    tensors = {}
    for k in range(heads):
        for layer in range(layers):
            tensors[f"{prefix}{k}.{layer}.linear.weight"] = normal(SIZE, SIZE)
            tensors[f"{prefix}{k}.{layer}.linear.bias"] = normal(SIZE)
        if own:
            tensors[f"{prefix}{k}.{layers}.weight"] = normal(VOCAB, SIZE)
    return tensors


def medusa_logits(tensors: Tensors, features: Tensor, heads: int, layers: int) -> Tensor:
    """Features [B, D] -> [B, K, V]: Sequential(block × L, Linear), head by head."""
    found = []
    for k in range(heads):
        states = features
        for layer in range(layers):
            states = block(states, tensors, f"{k}.{layer}.linear")
        shared: Tensor = tiny("llama").lm_head.weight
        output = tensors.get(f"{k}.{layers}.weight", shared)
        found.append(F.linear(states, output))
    return torch.stack(found, 1)


@pytest.mark.parametrize(
    ("file", "heads", "layers", "own", "prefix"),
    [
        (PT, 5, 1, True, ""),  # the first layout
        (SAFE, 3, 1, False, ""),  # the second
        (SAFE, 11, 2, True, ""),
        (MODEL, 2, 1, True, "medusa_head."),  # inside of their target
    ],
)
@torch.no_grad()
def test_medusa(file: str, heads: int, layers: int, own: bool, prefix: str, tmp_path: Path) -> None:
    tensors = medusa(heads, layers, own, prefix)
    others = {"model.norm.weight": normal(SIZE)} if prefix else {}
    config = VICUNA | {"medusa_num_heads": 2}  # what the published config of five heads says
    write(tmp_path, config | ({"model_type": "llama"} if prefix else {}), tensors | others, file)
    drafter: Any = load_drafter(tmp_path, tiny("llama"), allow_pickle=True)
    assert (drafter.config.heads, drafter.config.layers, drafter.max_depth) == (
        heads,
        layers,
        heads,
    )
    assert drafter.dtype == torch.float64 and not drafter.training
    features = normal(4, 1, SIZE)
    count = torch.ones(4, dtype=torch.long)
    step = drafter.begin(None, features, torch.zeros(4, 1, dtype=torch.long), count)
    bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    expected = medusa_logits(bare, features[:, 0], heads, layers)
    torch.testing.assert_close(step.logits, expected, rtol=1e-12, atol=1e-12)
    decodes_exactly(drafter)


def test_a_layer_that_vllms_heads_lack_is_named() -> None:
    shapes = {f"blocks.{k}.layers.{n}.weight": (SIZE, SIZE) for k in range(2) for n in range(2)}
    shapes |= {f"lm_heads.{k}.weight": (VOCAB, SIZE) for k in range(2)}
    del shapes["blocks.1.layers.1.weight"]
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    with pytest.raises(ArtifactError, match=r"blocks.1.layers.1.\w+ is missing") as caught:
        family("medusa").from_checkpoint({}, tensors)
    one_line(caught.value)


@pytest.mark.parametrize("kind", ["own", "mapped", "shared", "without biases"])
@torch.no_grad()
def test_medusa_as_vllm_reads_it(kind: str, tmp_path: Path) -> None:
    """`blocks.K.layers.L` and `lm_heads.K`, a token map in any order, one output layer for all."""
    kept = torch.randperm(VOCAB)[:20] if kind == "mapped" else torch.arange(VOCAB)
    tensors, plain = {}, medusa(2, 2)
    output = normal(VOCAB, SIZE)
    for k in range(2):
        for layer in range(2):
            for part in ("weight", "bias"):
                value = plain[f"{k}.{layer}.linear.{part}"]
                if part == "bias" and kind == "without biases":
                    value.zero_()
                    continue
                tensors[f"blocks.{k}.layers.{layer}.{part}"] = value
        if kind == "shared":
            plain[f"{k}.2.weight"] = output
        else:
            tensors[f"lm_heads.{k}.weight"] = plain[f"{k}.2.weight"][kept]
    tensors |= {"lm_heads.0.weight": output} if kind == "shared" else {}
    tensors |= {"token_map": kept} if kind == "mapped" else {}
    config = {
        "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": SIZE,
        "num_heads": 2, "num_hidden_layers": 2, "vocab_size": VOCAB, "max_paths": 64,
        "truncated_vocab_size": len(kept), "original_lm_head": kind == "shared",
        "medusa_fc_bias": kind != "without biases",
    }  # fmt: skip
    write(tmp_path, config, tensors, MODEL)
    drafter: Any = load_drafter(tmp_path, tiny("llama"))
    features = normal(4, 1, SIZE)
    step = drafter.begin(None, features, torch.zeros(4, 1).long(), torch.ones(4).long())
    expected = medusa_logits(plain, features[:, 0], 2, 2)[..., kept.sort().values]
    torch.testing.assert_close(step.logits, expected, rtol=1e-12, atol=1e-12)
    assert step.vocabulary is None or torch.equal(step.vocabulary, kept.sort().values)
    assert (step.vocabulary is not None) == (kind == "mapped")
    decodes_exactly(drafter)


@torch.no_grad()
def test_a_block_that_all_layers_share(tmp_path: Path) -> None:
    """The authors' heads of several layers hold one block under several names."""
    tensors = medusa(heads=2, layers=1)
    for k in range(2):
        tensors[f"{k}.2.weight"] = tensors.pop(f"{k}.1.weight")
        for part in ("weight", "bias"):
            tensors[f"{k}.1.linear.{part}"] = tensors[f"{k}.0.linear.{part}"]
    write(tmp_path, VICUNA, tensors, PT)
    drafter: Any = load_drafter(tmp_path, tiny("llama"), allow_pickle=True)
    features = normal(1, 1, SIZE)
    step = drafter.begin(None, features, torch.zeros(1, 1, dtype=torch.long), torch.ones(1).long())
    expected = medusa_logits(tensors, features[:, 0], heads=2, layers=2)
    torch.testing.assert_close(step.logits, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("own", [True, False])
@torch.no_grad()
def test_blocks_that_a_whole_model_holds_once(own: bool, tmp_path: Path) -> None:
    """A format that keeps one of several names of a tensor, inside of the target."""
    once = medusa(heads=2, layers=1, own=False, prefix="medusa_head.")
    every = {name.removeprefix("medusa_head."): t for name, t in once.items()}
    for k in range(2):
        for part, layer in product(("weight", "bias"), (1, 2)):
            every[f"{k}.{layer}.linear.{part}"] = every[f"{k}.0.linear.{part}"]
        if own:
            once[f"medusa_head.{k}.3.weight"] = every[f"{k}.3.weight"] = normal(VOCAB, SIZE)
    count = {"medusa_num_heads": 2, "medusa_num_layers": 1 if own else 3}  # a config of another
    write(tmp_path, LLAMA | count, once | {"model.norm.weight": normal(SIZE)}, MODEL)
    drafter: Any = load_drafter(tmp_path, tiny("llama"))
    assert (drafter.config.heads, drafter.config.layers) == (2, 3)
    features = normal(1, 1, SIZE)
    step = drafter.begin(None, features, torch.zeros(1, 1, dtype=torch.long), torch.ones(1).long())
    expected = medusa_logits(every, features[:, 0], heads=2, layers=3)
    torch.testing.assert_close(step.logits, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("file", ["m-2.safetensors", "../out.safetensors", "m-3.safetensors", 7])
def test_heads_inside_of_a_model_in_several_files(file: Any, tmp_path: Path) -> None:
    heads = medusa(2, 1, True, "medusa_head.")
    config = LLAMA | {"medusa_num_heads": 2}
    folder = write(
        tmp_path / "whole", config, {"model.norm.weight": normal(SIZE)}, "m-1.safetensors"
    )
    write(folder, config, heads, "m-2.safetensors")
    save_file(heads, tmp_path / "out.safetensors")
    places = {"model.norm.weight": "m-1.safetensors"} | dict.fromkeys(heads, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    if file == "m-2.safetensors":
        drafter: Any = load_drafter(folder, tiny("llama"))
        assert torch.equal(drafter.output[1], heads["medusa_head.1.1.weight"])
        return
    with pytest.raises(ArtifactError, match="which is not there"):
        load_drafter(folder, tiny("llama"))


# ReDrafter.


def redrafter(exit_dim: int = 2 * SIZE, layers: int = 2, rnn: bool = True) -> Tensors:
    tensors = {
        "rnn_w.weight": normal(SIZE, SIZE),
        "rnn_u.weight": normal(SIZE, SIZE),
        "rnn_u.bias": normal(SIZE),
        f"lm_head.{layers}.weight": normal(VOCAB, exit_dim),
    }
    for layer in range(layers):
        tensors[f"lm_head.{layer}.linear.weight"] = normal(exit_dim, exit_dim)
        tensors[f"lm_head.{layer}.linear.bias"] = normal(exit_dim)
    if exit_dim != 2 * SIZE:
        tensors["input_proj.weight"] = normal(exit_dim, 2 * SIZE)
        tensors["input_proj.bias"] = normal(exit_dim)
    return tensors if rnn else {n: t for n, t in tensors.items() if not n.startswith("rnn_")}


REDRAFTER = {"model_type": "recurrent_drafting_drafter", "rnn": True, "num_lookback_tokens": -1}


def redrafter_logits(tensors: Tensors, feature: Tensor, tokens: list[int], layers: int) -> Tensor:
    """[V] after a feature [D] and the tokens since."""
    cell = torch.zeros(SIZE, dtype=torch.float64)
    for token in tokens:
        word = tiny("llama").get_input_embeddings().weight[token]
        if "rnn_w.weight" not in tensors:
            cell = cell + word
            continue
        from_cell = F.linear(cell, tensors["rnn_u.weight"], tensors["rnn_u.bias"])
        cell = F.silu(F.linear(word, tensors["rnn_w.weight"]) + from_cell)
    states = torch.cat([feature, cell])
    if "input_proj.weight" in tensors:
        states = F.linear(states, tensors["input_proj.weight"], tensors["input_proj.bias"])
    for layer in range(layers):
        states = block(states, tensors, f"lm_head.{layer}.linear")
    return F.linear(states, tensors[f"lm_head.{layers}.weight"])


@pytest.mark.parametrize(
    ("exit_dim", "layers", "rnn"),
    [(2 * SIZE, 2, True), (48, 1, True), (2 * SIZE, 0, False), (48, 2, False)],
)
@torch.no_grad()
def test_redrafter(exit_dim: int, layers: int, rnn: bool, tmp_path: Path) -> None:
    tensors = redrafter(exit_dim, layers, rnn)
    sizes = {"hidden_size": SIZE, "vocab_size": VOCAB, "exit_dim": -1, "num_draft_layers": -1}
    write(tmp_path, REDRAFTER | sizes | {"rnn": rnn}, tensors, MODEL)
    drafter: Any = load_drafter(tmp_path, tiny("llama"))
    feature, state = normal(1, 1, SIZE), drafter.start(1, 8)
    root, child = torch.tensor([[5]]), torch.tensor([[9]])
    first = drafter.begin(state, feature, root, torch.ones(1, dtype=torch.long))
    then = drafter.extend(state, child, torch.tensor([[-1]]))
    for step, tokens in ((first, [5]), (then, [5, 9])):
        expected = redrafter_logits(tensors, feature[0, 0], tokens, layers)
        torch.testing.assert_close(step.logits[0, 0], expected, rtol=1e-12, atol=1e-12)
    decodes_exactly(drafter)


# Hydra and EAGLE, whose own tests compare them with their definitions.


def reads(folder: Path, name: str, fields: dict[str, Any], weights: Tensors) -> None:
    """The checkpoint in a folder loads as this family, with these fields and weights."""
    drafter = load_drafter(folder, tiny("llama"), allow_pickle=True)
    assert type(drafter) is family(name) and drafter.dtype == torch.float64
    assert {field: getattr(drafter.config, field) for field in fields} == fields
    found = drafter.state_dict()
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], weights[key]) for key in found)
    decodes_exactly(drafter)


@pytest.mark.parametrize("arch", ["mlp", "prefix-mlp"])
def test_hydra(arch: str, tmp_path: Path) -> None:
    config, tensors = hydra.public(arch, 2)
    write(tmp_path, config, tensors, "hydra_lm_head.pt")
    found = family("hydra").from_checkpoint(config, tensors)
    assert found is not None
    reads(tmp_path, "hydra", *found)


@pytest.mark.parametrize("dialect", eagle.DIALECTS)
def test_eagle(dialect: str, tmp_path: Path) -> None:
    version, prefix, config, trimmed = eagle.DIALECTS[dialect]
    tensors = eagle.published(version, prefix, trimmed)
    write(tmp_path, config, tensors, "pytorch_model.bin" if version == 1 else MODEL)
    name = "eagle" if version == 1 else "eagle3"
    found = family(name).from_checkpoint(config, tensors)
    assert found is not None
    reads(tmp_path, name, *found)


def sharded(folder: Path, config: dict[str, Any], shards: list[Tensors]) -> Path:
    places = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write(folder, config, tensors, file)
        places |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def test_heads_in_several_files_and_under_model(tmp_path: Path) -> None:
    version, prefix, config, trimmed = eagle.DIALECTS["EAGLE-3"]
    tensors = eagle.published(version, prefix, trimmed)
    found = family("eagle3").from_checkpoint(config, tensors)
    assert found is not None
    inside = {f"model.{name}": t for name, t in tensors.items() if name not in ("d2t", "t2d")}
    inside |= {name: tensors[name] for name in ("d2t", "t2d")}
    names = sorted(inside)
    halves = [{n: inside[n] for n in names[::2]}, {n: inside[n] for n in names[1::2]}]
    reads(sharded(tmp_path / "it", config, halves), "eagle3", *found)


def test_drafters_without_fc_are_found_in_several_files(tmp_path: Path) -> None:
    no_mixing = eagle.published(3, "midlayer.")
    del no_mixing["fc.weight"]
    config = eagle.SAID | {"eagle_config": {"use_aux_hidden_state": False}}
    module = family("mtp").exports["speculators"](made("mtp", tiny("qwen3")))
    for name, said, tensors, model in (
        ("eagle3", config, no_mixing, tiny("llama")),
        ("mtp", module.config, module.tensors, tiny("qwen3")),
    ):
        names = sorted(tensors)
        halves = [{n: tensors[n].clone() for n in names[first::2]} for first in (0, 1)]
        drafter = load_drafter(sharded(tmp_path / name, said, halves), model)
        assert drafter.config.family_name() == name


def test_the_index_says_which_file_holds_a_tensor(tmp_path: Path) -> None:
    """Also where another one holds it too; where it is not there, this is an error."""
    tensors = eagle.published(1, "layers.0.")
    names = sorted(tensors)
    halves = [{n: tensors[n] for n in names[::2]}, {n: tensors[n] for n in names[1::2]}]
    expected = reads_of(sharded(tmp_path / "apart", eagle.SAID, halves))
    twice = [halves[0], halves[1] | {names[0]: tensors[names[0]] + 1}]
    folder = sharded(tmp_path / "twice", eagle.SAID, twice)
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    places[names[0]] = places[names[2]]
    index.write_text(json.dumps({"weight_map": places}))
    found = reads_of(folder)
    assert all(found[name].equal(expected[name]) for name in expected)
    assert names[1] == "fc.bias" and places["fc.bias"] != places[names[0]]
    index.write_text(json.dumps({"weight_map": places | {"fc.bias": places[names[0]]}}))
    with pytest.raises(ArtifactError, match=r"index\.json places fc\.bias in model-0") as caught:
        load_drafter(folder, tiny("llama"))
    one_line(caught.value)


def reads_of(folder: Path) -> Tensors:
    return load_drafter(folder, tiny("llama")).state_dict()


def test_of_a_target_in_several_files_the_heads_alone_are_read(tmp_path: Path) -> None:
    """The other file is no safetensors at all."""
    heads = medusa(2, 1, True, "medusa_head.")
    folder = sharded(tmp_path / "it", LLAMA | {"medusa_num_heads": 2}, [heads, {"x": normal(2)}])
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"not read")
    drafter: Any = load_drafter(folder, tiny("llama"))
    assert torch.equal(drafter.output[1], heads["medusa_head.1.1.weight"])


def test_embeddings_of_the_target_are_not_copied(tmp_path: Path) -> None:
    """In whichever dtype they were saved; others are the drafter's own, and an output layer is."""
    model, own = tiny("llama"), eagle.published(1, "layers.0.")
    theirs = model.get_input_embeddings().weight.detach()
    output = model.lm_head.weight.detach()
    for number, (embedding, head, fields) in enumerate((
        (theirs.bfloat16(), output.bfloat16(), ("shared", "shared")),
        (theirs.clone(), normal(VOCAB, SIZE), ("shared", "own")),
        (normal(VOCAB, SIZE), output.float(), ("own", "shared")),
    )):  # fmt: skip
        tensors = own | {"embed_tokens.weight": embedding, "lm_head.weight": head}
        folder = write(tmp_path / str(number), eagle.SAID, tensors, MODEL)
        drafter: Any = load_drafter(folder, model)
        assert (drafter.config.embedding, drafter.config.output) == fields
        assert ("embed_tokens.weight" in drafter.state_dict()) == (fields[0] == "own")
        states = normal(3, SIZE)
        wanted = head.double() if fields[1] == "own" else output
        torch.testing.assert_close(drafter.draft_logits(1)(states), F.linear(states, wanted))
        torch.testing.assert_close(drafter.draft_output(1)(states), F.linear(states, wanted))
        decodes_exactly(drafter)


@pytest.mark.parametrize(
    ("ids", "layers", "read"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}, 4, [0, 2, 3]),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 1, 2]}}, 4, [0, 2, 3]),
        ({"aux_hidden_states_layer_ids": [-1, 1, 2]}, 4, [0, 2, 3]),  # as AngelSlim writes them
        ({}, 5, [2, 2, 2]),  # what the published rule gives, and engines read
        ({}, 4, [2, 2, 1]),
        ({}, 8, [2, 4, 5]),
        ({}, 2, "names no layers of the target, which are then [2, 1, -1], and this target has 2"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, 4, [2, 3, 4]),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}, 4,
         "input of layer 5 of its target (the output of layer 4), and this target has the layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}, 4,
         "input of layer 5 of its target (the output of layer 4)"),
        ({"eagle_aux_hidden_state_layer_ids": [-2, 1, 2]}, 4, "names the layers [-2, 1, 2] of"),
        ({"eagle_aux_hidden_state_layer_ids": [-1, 1, 2]}, 4, "whole numbers, at least 0"),
    ],
)  # fmt: skip
def test_the_layers_that_are_read(
    ids: dict, layers: int, read: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes: dict[str, Any] = COMMON | {"num_hidden_layers": layers}
    model: Any = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)).eval()
    folder = write(tmp_path / "it", eagle.SAID | ids, eagle.published(3, "midlayer."), MODEL)
    if isinstance(read, str):
        with pytest.raises(ArtifactError) as caught:
            load_drafter(folder, model)
        assert read in one_line(caught.value)
        return
    assert list(load_drafter(folder, model).config.feature_layers) == read
    said = f"so it reads the inputs of layers {', '.join(map(str, read))}, those that engines take"
    assert (said in caplog.text) == (not ids)


def latent(tensors: Tensors) -> Tensors:
    name = "midlayer.self_attn.q_proj.weight"
    others = {n: t for n, t in tensors.items() if n != name}
    return others | {"midlayer.self_attn.kv_a_proj_with_mqa.weight": normal(8, SIZE)}


# What is said, and what is refused.


def test_without_a_network_the_cache_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, VICUNA, medusa(), SAFE)
    asked: list[str] = []
    source = "headstart.heads.artifacts.source"
    monkeypatch.setattr(f"{source}.file_names", lambda name: asked.append(name) or [])
    monkeypatch.setattr(f"{source}.download", lambda name, files: asked.extend(files) or tmp_path)
    assert load_drafter("them/heads@v1", tiny("llama")).max_depth == 5
    assert asked.count("them/heads@v1") == asked.count("config.json") == asked.count(SAFE) == 1
    assert not any(name.endswith((".pt", ".bin")) for name in asked)


def test_what_is_not_known_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, VICUNA, medusa(), SAFE)
    with caplog.at_level(logging.WARNING, "headstart.heads.artifacts.foreign_checkpoints"):
        drafter = load_drafter(tmp_path, tiny("llama"), dtype=torch.bfloat16)
    (record,) = [
        each
        for each in caplog.records
        if each.name == "headstart.heads.artifacts.foreign_checkpoints"
    ]
    assert "Only shapes" in record.message and "lmsys/vicuna-7b-v1.3" in record.message
    assert drafter.dtype == torch.bfloat16
    assert DrafterSource(tmp_path).kind is SourceKind.CHECKPOINT


def test_a_target_that_the_config_names_is_named_or_taken_for_the_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, prefix, config, trimmed = eagle.DIALECTS["speculators"]
    said = config | {"speculators_config": {"verifier": {"name_or_path": "them/base"}}}
    write(tmp_path, said, eagle.published(version, prefix, trimmed), MODEL)
    with caplog.at_level(logging.WARNING, "headstart.heads.artifacts.foreign_checkpoints"):
        load_drafter(tmp_path, tiny("llama"))
        assert "its config names 'them/base'" in caplog.text
        caplog.clear()
        monkeypatch.setattr(tiny("llama"), "name_or_path", "them/base")
        load_drafter(tmp_path, tiny("llama"))
    assert "Only shapes" not in caplog.text


class Bomb:
    """Unpickling it runs code."""

    def __reduce__(self) -> tuple:
        return os.mkdir, (os.environ["BOMB"],)


def without(tensors: Tensors, name: str) -> Tensors:
    return {other: tensor for other, tensor in tensors.items() if other != name}


@pytest.mark.parametrize(
    ("config", "tensors", "file", "said"),
    [
        (VICUNA, lambda: without(medusa(), "4.1.weight"), SAFE, "4.1.weight is missing"),
        (VICUNA, lambda: medusa() | {"0.1.bias": normal(4)}, SAFE, "0.1.bias is missing"),
        (VICUNA, lambda: medusa() | {"2.0.linear.weight": normal(4, 4)}, SAFE, "together"),
        (VICUNA, lambda: {"0.0.weight": normal(VOCAB, SIZE)}, SAFE, "no family here"),
        (VICUNA, lambda: {"0.0.linear.weight": normal(48, 48), "0.0.linear.bias": normal(48)}, SAFE,
         "hidden size 48, and this one's is 32"),
        (VICUNA, lambda: {n: t[:40] if n.endswith("1.weight") else t for n, t in medusa().items()},
         SAFE, "vocabulary 40, and this one's is 64"),
        (VICUNA, lambda: {n: t[:, :9] if "linear.weight" in n else t for n, t in medusa().items()},
         SAFE, "found weight [1, 5, 32, 9], expected [1, 5, 32, 32]"),
        (VICUNA, lambda: {"x": normal(3)}, SAFE, "no family here"),
        (VICUNA, lambda: {}, "weights.bin", "no file of weights"),
        (VICUNA, lambda: {"x": Bomb()}, PT, "more than tensors"),
        (VICUNA, lambda: [normal(3)], PT, "a list, expected tensors by name"),
        (VICUNA, lambda: {"x": normal(3).to_sparse()}, PT, "by name, none of them sparse"),
        (LLAMA | {"medusa_num_heads": 5}, lambda: {}, "m-1-of-2.safetensors", "no weights of such"),
        (REDRAFTER, lambda: without(redrafter(), "rnn_w.weight"), MODEL, "rnn_w"),
        (REDRAFTER, lambda: without(redrafter(), "lm_head.2.weight"), MODEL,
         "lm_head.2.weight"),
        (REDRAFTER, lambda: redrafter() | {"more": normal(2)}, MODEL, "found more [2]"),
        ({"model_type": "x"}, lambda: {"x": normal(3)}, MODEL, "of another kind"),
        (LLAMA, lambda: {"model.norm.weight": normal(3)}, MODEL, "no tokenizer"),
        (eagle.SAID, lambda: latent(eagle.published(3, "midlayer.")), MODEL, "multi-head latent"),
        (LLAMA | {"speculators_model_type": "xpress"}, dict, MODEL, "calls it 'xpress'"),
        (LLAMA | {"architectures": ["DFlashLinearDraftModel"]}, dict, MODEL, "'DFlashLinearDra"),
        (eagle.SAID | {"target_hidden_size": 32}, lambda: {
            **eagle.published(3, "midlayer."), "fc.weight": normal(SIZE, 3 * 48)}, MODEL,
         "hidden size 48, and this one's is 32; load the target that it was trained for"),
        (eagle.SAID | {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}, lambda: {
            **eagle.published(3, "midlayer."), "gate.weight": normal(2)}, MODEL,
         "found gate.weight [2], expected none; it has a part that is not run here"),
    ],
)  # fmt: skip
def test_refused(
    config: dict, tensors: Any, file: str, said: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("BOMB", str(tmp_path / "boom"))
    folder = write(tmp_path / "heads", config, tensors(), file)
    with pytest.raises(ArtifactError) as caught:
        load_drafter(folder, tiny("llama"), allow_pickle=True)
    assert said in one_line(caught.value)
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize("file", [PT, "hydra_lm_head.pt", "pytorch_model.bin"])
def test_a_pickle_is_asked_for(file: str, tmp_path: Path) -> None:
    write(tmp_path, VICUNA, medusa(), file)
    with pytest.raises(ArtifactError, match="--allow-pickle") as caught:
        load_drafter(tmp_path, tiny("llama"))
    assert file in one_line(caught.value)
    load_drafter(tmp_path, tiny("llama"), allow_pickle=True)


def test_a_pickle_beside_a_whole_model_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, LLAMA, medusa(), "pytorch_model.bin")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ArtifactError, match="no tokenizer"):
        load_drafter(tmp_path, tiny("llama"))


def test_damage(tmp_path: Path) -> None:
    for file in (SAFE, PT):
        folder = write(tmp_path / file, VICUNA, medusa(), file)
        data = (folder / file).read_bytes()
        for length in (0, 7, 100, len(data) // 2):
            (folder / file).write_bytes(data[:length])
            with pytest.raises(ArtifactError, match="damaged") as caught:
                load_drafter(folder, tiny("llama"), allow_pickle=True)
            more = "holds more than tensors" in one_line(caught.value)
            assert more == (file == PT), "that can only be said of a pickle"


def test_no_family_takes_a_language_model() -> None:
    """Small models draft as they are, whichever family is asked."""
    model: Any = tiny("llama")
    for name in FAMILIES:
        assert family(name).from_checkpoint(tf.LlamaConfig().to_dict(), model.state_dict()) is None


def test_of_a_language_model_no_tensor_is_read_to_tell_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its header tells; of a head of the same file name the tensors are needed."""
    read: list[Path] = []

    def counted(file: Path, *options: Any) -> Any:
        read.append(file)
        return read_tensors(file, *options)

    monkeypatch.setattr("headstart.heads.artifacts.foreign_files.read_tensors", counted)
    tiny("llama").save_pretrained(tmp_path / "model")
    head = write(tmp_path / "head", eagle.SAID, eagle.published(1, "layers.0."), MODEL)
    for folder, is_head in ((tmp_path / "model", False), (head, True)):
        source = DrafterSource(folder)
        files, found = recognise(source, json.loads((folder / "config.json").read_text()))
        assert [file.name for file in files] == [MODEL]
        assert (found is not None) == is_head and read == files * is_head


IDS = {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4}}
UP, QUERY = "midlayer.mlp.up_proj.weight", "midlayer.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("said", "changes", "named"),
    [
        ({}, {UP: torch.ones(24, SIZE, dtype=torch.int8)}, "up_proj.weight in int8, as quantized"),
        ({}, {UP: torch.ones(24, SIZE).to(torch.float8_e4m3fn)}, "in float8_e4m3fn, as quantized"),
        (AWQ, {UP: None, f"{UP[:-6]}qweight": torch.ones(SIZE, 3, dtype=torch.int32)},
         "up_proj.qweight in int32, as quantized weights are"),
        (AWQ, {f"{UP}_scale": torch.ones(1)}, "it is quantized (awq): look for it in full"),
        (AWQ, {}, ""),  # whose tensors are not
        ({}, {QUERY: None}, "model.safetensors has a drafter's fc.weight, and lacks tensors"),
        ({}, {"fc.weight": normal(1, SIZE, 3 * SIZE)}, "has a drafter's fc.weight, and lacks"),
    ],
)  # fmt: skip
def test_quantized_and_damaged_heads(said: dict, changes: dict, named: str, tmp_path: Path) -> None:
    """They are told as what they are, and not taken for language models."""
    tensors = {**eagle.published(3, "midlayer."), **changes}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    folder = write(tmp_path / "heads", eagle.SAID | IDS | said, tensors, MODEL)
    if not named:
        load_drafter(folder, tiny("llama"))
        return
    with pytest.raises(ArtifactError) as caught:
        load_drafter(folder, tiny("llama"))
    assert named in one_line(caught.value)


def test_an_embedding_of_the_mask_token_beside_a_drafter_is_refused(tmp_path: Path) -> None:
    """Without it the drafts would be made from another embedding, and nobody would be told."""
    folder = write(tmp_path, dflash.Form().config, dflash.Form().tensors, MODEL)
    load_drafter(folder, tiny("llama"))
    torch.save({"embedding": normal(SIZE)}, folder / "mask_embedding.pt")
    with pytest.raises(ArtifactError) as caught:
        load_drafter(folder, tiny("llama"), allow_pickle=True)
    assert "has an embedding of the mask token in mask_embedding.pt" in one_line(caught.value)
