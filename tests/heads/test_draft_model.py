"""A draft model: cached tree steps against fresh forwards, students, the artifact, the loop."""

import io
import json
import random
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

import headstart
from headstart.heads import (
    ArtifactError,
    Manifest,
    OptionError,
    fingerprint,
    load_drafter,
    save_drafter,
)
from headstart.heads.artifacts.manifest import tokenizer_hash
from headstart.heads.core import cache
from headstart.heads.draft_model import DraftModel, DraftModelConfig, layers_of
from headstart.heads.parts import cached_layers as module
from headstart.heads.parts.cached_layers import CachedLayers
from headstart.infer import Speculator
from headstart.reports.description import describe, print_description
from tests.support.covering import covering
from tests.support.paths import SHARED
from tests.support.tiny import COMMON, CONFIGS, VOCAB, one_line, prompts, tiny

MODEL = SHARED / "models" / "stories260k"
NEW = 24
TREES: dict[str, Any] = {
    "chain": "chain:3",
    "cartesian": "cartesian:3,2,1",
    "sparse": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0, 0]],
    "best-first": "best-first:9,3,4,2",
    "beam": "beam:3,4",
}


def student(name: str = "llama", target: str = "llama", **options: Any) -> DraftModel:
    """Another random model of a family, bound to a target."""
    model = tiny(name, 4, **options) if options else tiny(name, 2)
    return DraftModel.of(model).eval().bind(tiny(target))


def settings(batch: int, new: int = NEW, eos: int | None = None) -> tuple[Tensor, dict[str, Any]]:
    ids, mask = prompts([11] if batch == 1 else [13, 7, 10, 3])
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": new, "do_sample": False}
    return ids, options | {"pad_token_id": 0, "eos_token_id": eos}


def generated(
    drafter: DraftModel, tree: Any, batch: int, stop: bool = False, new: int = NEW
) -> tuple[Tensor, Tensor, Speculator]:
    """What `generate` writes, what the speculator writes, and the speculator."""
    model: Any = drafter.target
    ids, options = settings(batch, new)
    expected = model.generate(ids, **options)
    if stop:
        first_row = expected[0, ids.shape[1] : ids.shape[1] + 15].tolist()
        options["eos_token_id"] = max(first_row, key=first_row.index)
        expected = model.generate(ids, **options)
    speculator = Speculator(model, drafter, tree=tree)
    return expected, speculator.generate(ids, **options), speculator


@torch.no_grad()
def fresh(model: Any, tokens: list[int]) -> Tensor:
    """Logits [V] after a text, without a cache."""
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]


@torch.no_grad()
def largest_difference(drafter: DraftModel, slack: int = 0, rounds: int = 14) -> float:
    """Between decode steps and fresh forwards over the same prefixes.

    Rows of different lengths, ragged commits, one row that ends, and trees whose nodes have any
    parent grown before.
    """
    rng = random.Random(3)
    model, width = drafter.model, drafter.config.vocab_size
    texts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (12, 3, 7)]
    count = torch.tensor([len(text) for text in texts])
    state = drafter.start(3, 256)
    padded = torch.tensor([text + [0] * (12 - len(text)) for text in texts])
    drafter.prefill(state, torch.empty(3, 12, 0), padded, count)
    differences = []
    for turn in range(rounds):
        added = 4 if turn else 1
        tokens = torch.randint(VOCAB, (3, added), generator=torch.Generator().manual_seed(turn))
        count = torch.tensor([rng.randint(1, added) for _ in texts])
        count[2] *= turn < 5
        for row, text in enumerate(texts):
            text += tokens[row, : count[row]].tolist()
        drafter.reserve(state, max(map(len, texts)) - 1 + slack, 4 + 3 * 3)
        step = drafter.begin(state, torch.empty(3, added, 0), tokens, count)
        paths: list[list[list[int]]] = [[[]] for _ in texts]
        asked = [[[]] for _ in texts]  # the paths that `step` answers for
        for level in range(4):
            assert step.logits is not None
            for row in range(3 if turn < 5 else 2):
                for place, path in enumerate(asked[row]):
                    expected = fresh(model, texts[row] + path)[:width]
                    differences.append((step.logits[row, place] - expected).abs().max())
            if level == 3:
                break
            grown = rng.choice([1, 3])
            nodes = torch.randint(VOCAB, (3, grown))
            parent = torch.tensor(
                [[rng.randrange(len(paths[row])) - 1 for _ in range(grown)] for row in range(3)]
            )
            asked = [
                [
                    paths[row][parent[row, i] + 1] + [int(nodes[row, i])]  # its own path
                    for i in range(grown)
                ]
                for row in range(3)
            ]
            for row in range(3):
                paths[row] += asked[row]
            step = drafter.extend(state, nodes, parent)
    return max(differences).item()


@pytest.mark.parametrize("slack", [0, 40], ids=["tight", "loose"])
@pytest.mark.parametrize("name", CONFIGS)
def test_cached_steps_equal_fresh_forwards(name: str, slack: int) -> None:
    """Through every family of tiny models; two have sliding windows, which the texts cross."""
    drafter = student(name)
    assert largest_difference(drafter, slack) < 1e-10


@pytest.mark.parametrize("slack", [0, 40], ids=["tight", "loose"])
def test_the_cache_grows(slack: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROOM", 4)
    monkeypatch.setattr(cache, "SLOT_STEP", 4)
    assert largest_difference(student(), slack) < 1e-10


def shifted_position(self: CachedLayers, state: Any, inputs: Any, depth: Tensor, *rest) -> Tensor:
    return RUN(self, state, inputs, depth + 1, *rest)


def shifted_slot(self: CachedLayers, state: Any, inputs: Any, depth: Tensor, *rest) -> Tensor:
    lengths, state.lengths = state.lengths, state.lengths + 1
    try:
        return RUN(self, state, inputs, depth - 1, *rest)
    finally:
        state.lengths = lengths


def without_siblings_apart(self: Any, state: Any, inputs: Any, depth: Tensor, seen, *rest: Any):
    return RUN(self, state, inputs, depth, torch.ones_like(seen), *rest)


RUN = CachedLayers._run
WRONG = {"position": shifted_position, "slot": shifted_slot, "ancestors": without_siblings_apart}


@pytest.mark.parametrize("wrong", WRONG)
def test_one_index_off_is_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CachedLayers, "_run", WRONG[wrong])
    assert largest_difference(student()) > 1e-2
    if wrong != "ancestors":  # in a chain all are ancestors but the padding
        drafter = DraftModel.of(tiny("llama")).bind(tiny("llama"))
        stats = generated(drafter, "chain:4", 4)[2].stats
        assert stats.acceptance_by_depth[-1] < 1 or stats.tau < 4


def test_a_dropped_window_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from headstart.heads.core import masks

    true = masks.tree_mask

    def wide(lengths, positions, ancestors, live, dtype, window=None) -> Tensor:
        return true(lengths, positions, ancestors, live, dtype, None)

    drafter = student("mistral")
    assert drafter._layers.forward_setup.windows.single == 9  # asked while it still works
    monkeypatch.setattr(masks, "tree_mask", wide)
    assert largest_difference(drafter) > 1e-2


@pytest.mark.parametrize(("name", "depth", "batch"), covering([*product(CONFIGS, (1, 4), (1, 4))]))
def test_the_target_itself_is_always_right(name: str, depth: int, batch: int) -> None:
    drafter = DraftModel.of(tiny(name)).bind(tiny(name))
    expected, out, speculator = generated(drafter, f"chain:{depth}", batch)
    assert torch.equal(out, expected)
    stats = speculator.stats
    assert stats.acceptance_by_depth == [1.0] * depth
    assert stats.rounds == -(-(NEW - 1) // (depth + 1)) * batch  # the last one is cut


@pytest.mark.parametrize(
    ("name", "tree", "batch", "stop"),
    covering([*product(CONFIGS, TREES, (1, 4), (False, True))]),
)
def test_equals_generate(name: str, tree: str, batch: int, stop: bool) -> None:
    """The student is of another family than the target, but for llama."""
    expected, out, _ = generated(student(name), TREES[tree], batch, stop)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("tree", ["chain:3", "cartesian:3,2"])
def test_sampling_with_shared_noise_is_plain_sampling(tree: str) -> None:
    ids, options = settings(4)
    options |= {"do_sample": True, "temperature": 0.8, "top_k": 20, "seed": 5}
    plain = Speculator(tiny("llama")).generate(ids, **options)
    speculator = Speculator(tiny("llama"), student(), tree=tree)
    assert torch.equal(speculator.generate(ids, **options), plain)


@pytest.mark.parametrize(("name", "options", "named"), [
    ("llama", {}, True), ("llama", {"vocab_size": VOCAB - 8}, True),
    ("llama", {"vocab_size": VOCAB + 8}, False),
    ("gemma3", {"final_logit_softcapping": 0.1}, False),
])  # fmt: skip
def test_a_loss_is_told_of_the_layer_that_makes_logits_alone(
    name: str, options: dict[str, Any], named: bool
) -> None:
    """Its gradient is then added up where it is kept; not where logits are cut or capped."""
    drafter = student(name, **options)
    output, layer = drafter.draft_output(1), drafter.model.get_output_embeddings()
    assert (output.weight is layer.weight) == named and (output.body is None) == named
    states = torch.randn(5, 32, dtype=torch.double)
    torch.testing.assert_close(output(states), drafter.draft_logits(1)(states))


@pytest.mark.parametrize("size", [VOCAB - 20, VOCAB + 20])
def test_a_padded_vocabulary(size: int) -> None:
    """Models of one family share a tokenizer and pad their tables differently."""
    drafter = student(vocab_size=size)
    expected, out, _ = generated(drafter, "cartesian:3,2", 4)
    assert torch.equal(out, expected)
    known = drafter.draft_vocabulary
    assert (known is None) if size > VOCAB else (known is not None and len(known) == size)


def test_past_the_student_s_positions() -> None:
    """A table of 30 positions; its proposals past them are of no use, and the text is right."""
    config = tf.GPT2Config(**{**CONFIGS["gpt2"]().to_dict(), "n_positions": 30})
    drafter = DraftModel.of(tf.GPT2LMHeadModel(config).double().eval()).bind(tiny("llama"))
    expected, out, _ = generated(drafter, "cartesian:2,2", 4, new=40)
    assert torch.equal(out, expected)
    with pytest.raises(OptionError, match="31 tokens and the draft model 30 positions") as caught:
        Speculator(tiny("llama"), drafter).generate(prompts([31])[0], max_new_tokens=4)
    one_line(caught.value)


@pytest.mark.parametrize("tree", ["chain:4", "cartesian:3,2,1"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_a_round_does_not_wait(name: str, tree: str) -> None:
    from tests.support.scripted import decoding_of
    from tests.support.syncs import run_rounds

    ids, mask = prompts([9, 4, 7])
    decoding = decoding_of(tiny("llama"), student(name), tree)
    with torch.no_grad():
        decoding.prefill(ids, mask, 16)
        assert run_rounds(decoding) > 2


def made(name: str = "llama", **options: Any) -> DraftModel:
    """A student made of the target's layers."""
    target = tiny(name)
    drafter = DraftModel(DraftModelConfig.for_target(target, **options)).double().bind(target)
    drafter.init_from_target()
    return drafter.eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_all_layers_make_the_target(name: str) -> None:
    drafter = made(name, layers=tiny(name).config.num_hidden_layers)
    _, _, speculator = generated(drafter, "chain:3", 1)
    assert speculator.stats.acceptance_by_depth == [1.0] * 3


def test_chosen_layers_are_the_target_s() -> None:
    """Of gemma3's three layers the first and the last, both sliding; nothing is shared."""
    drafter, target = made("gemma3", layers=[0, 2]), tiny("gemma3")
    config: Any = drafter.model.config
    assert config.layer_types == ["sliding_attention"] * 2 and config.num_hidden_layers == 2
    layers: Any = drafter.model.get_decoder().layers
    for mine, theirs in zip(layers, (0, 2), strict=True):
        for own, source in zip(
            mine.parameters(), target.model.layers[theirs].parameters(), strict=True
        ):
            assert torch.equal(own, source) and own.data_ptr() != source.data_ptr()
    assert torch.equal(drafter.model.lm_head.weight, target.lm_head.weight)  # type: ignore[union-attr]
    assert drafter.model.lm_head.weight.data_ptr() != target.lm_head.weight.data_ptr()  # type: ignore[union-attr]


def test_layers_are_spread_evenly() -> None:
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**{**COMMON, "num_hidden_layers": 12}))

    def chosen(layers: Any) -> list[int]:
        return DraftModelConfig.for_target(model, layers=layers).chosen(model)

    assert [chosen(count) for count in (1, 2, 4)] == [[0], [0, 11], [0, 4, 7, 11]]
    assert chosen(12) == list(range(12)) and chosen([0, 3, 8, 11]) == [0, 3, 8, 11]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "drafter.layers is None and drafter.model None"),
        ({"layers": 1, "model": "x"}, "expected one of them"),
        ({"layers": 3}, "the target has 2 layers"),
        ({"layers": 0}, "the target has 2 layers"),
        ({"layers": []}, "the target has 2 layers"),
        ({"layers": [0, 2]}, "0 … 1"),
        ({"heads": 2}, "drafter.heads is not an option of 'draft_model'"),
    ],
)
def test_bad_options_are_one_line(options: dict, named: str) -> None:
    with pytest.raises(OptionError) as caught:
        DraftModelConfig.for_target(tiny("llama"), **options)
    assert named in one_line(caught.value)


def test_more_than_a_language_model_gives_no_layers() -> None:
    config = tf.LlavaConfig()
    with pytest.raises(OptionError, match=r"give drafter\.model") as caught:
        layers_of(config, [0])
    one_line(caught.value)


TAILS = {
    **{n: lambda of=of: tf.AutoModelForCausalLM.from_config(of()) for n, of in CONFIGS.items()},
    "granite": lambda: tf.GraniteForCausalLM(tf.GraniteConfig(**COMMON, logits_scaling=3.0)),
    "cohere": lambda: tf.CohereForCausalLM(tf.CohereConfig(**COMMON, logit_scale=0.5)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(**COMMON, final_logit_softcapping=2.0, query_pre_attn_scalar=8)
    ),
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**COMMON, num_local_experts=2)),
    "opt": lambda: tf.OPTForCausalLM(
        tf.OPTConfig(
            vocab_size=VOCAB, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, pad_token_id=1,
            num_hidden_layers=2, num_attention_heads=4, bos_token_id=None, eos_token_id=None,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TAILS)
def test_states_and_readout_are_the_model(name: str) -> None:
    """Depth k at position t answers what the model says at t + k, gradients included."""
    model = TAILS[name]().eval()
    drafter = DraftModel.of(model)
    tokens = torch.randint(VOCAB, (2, 9))
    where = torch.zeros(2, 9, dtype=torch.bool)
    where[0, 1:6], where[1, 2:4] = True, True
    expected = model(input_ids=tokens, use_cache=False).logits
    states = drafter.draft_hidden_states(torch.empty(2, 9, 0), tokens, where, 3)
    assert states.shape[:2] == (3, 7) and drafter.train_depths == 1
    for depth in (1, 2, 3):
        logits = drafter.draft_logits(depth)(states[depth - 1])
        assert torch.allclose(logits, expected.roll(-depth, 1)[where], rtol=0, atol=1e-5)
        assert not torch.allclose(logits, expected[where], rtol=0, atol=1e-2)
    gradients = []
    for out in (drafter.draft_logits(1)(states[0]), expected.roll(-1, 1)[where]):
        model.zero_grad()
        out.square().sum().backward(retain_graph=True)
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for mine, theirs in zip(*gradients, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-4)


def tokenizer(words: str = "a b c d") -> tf.PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(words.split())}
    return tf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, "a")))


def saved(folder: Path, name: str = "llama") -> tuple[Path, DraftModel]:
    drafter = made(name, layers=1)
    manifest = Manifest(
        "draft_model", f"tiny-{name}", fingerprint(tiny(name)), tokenizer_hash(tokenizer())
    )
    return save_drafter(drafter, folder / "student", manifest, card="# card\n"), drafter


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_round_trip(name: str, tmp_path: Path) -> None:
    """The folder is an artifact of ours and an ordinary model; gpt2 ties its output layer."""
    folder, drafter = saved(tmp_path, name)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["README.md", "config.json", "headstart.json", "model.safetensors"]
    ordinary: Any = tf.AutoModelForCausalLM.from_pretrained(folder)
    assert ordinary.config.model_type == name and ordinary.config.num_hidden_layers == 1
    loaded = load_drafter(folder, tiny(name), tokenizer())
    assert isinstance(loaded, DraftModel) and not loaded.training and loaded.dtype == torch.float64
    for key, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key
    out = [generated(one, "cartesian:2,2", 4) for one in (drafter, loaded)]
    assert out[0][2].stats.tau == out[1][2].stats.tau
    assert torch.equal(out[1][1], out[1][0])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_checkpoint_is_loaded_as_it_was_saved(name: str, tmp_path: Path) -> None:
    folder, drafter = saved(tmp_path, name)
    other = DraftModel(DraftModelConfig.for_target(tiny(name), layers=1)).double()
    weights = load_file(folder / "model.safetensors")
    other.load_state_dict(weights)
    for key, tensor in drafter.state_dict().items():
        assert torch.equal(other.state_dict()[key], tensor), key
    del weights[next(iter(weights))]
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(weights)


def refused(folder: Path, **more: Any) -> str:
    with pytest.raises(ArtifactError) as caught:
        load_drafter(folder, tiny("llama"), **more)
    return one_line(caught.value)


def test_damage_is_refused(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path)
    assert "another tokenizer" in refused(folder, tokenizer=tokenizer("a c b d"))
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"llama"', '"headstart_medusa"'))
    assert "config.json" in refused(folder)
    (folder / "config.json").write_text(config.replace('"llama"', '"llama", "auto_map": {}'))
    assert "auto_map" in refused(folder)
    (folder / "config.json").write_text(config)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-9])
    assert "model.safetensors" in refused(folder)


def plain_folder(folder: Path, words: str | None = "a b c d", name: str = "llama") -> Path:
    """A model as transformers saves it, with its tokenizer."""
    tiny(name, 2).save_pretrained(folder)
    if words:
        tokenizer(words).save_pretrained(folder)
    return folder


def test_any_language_model_with_the_tokenizer_drafts(tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "small")
    speculator = headstart.load(tiny("llama"), folder, tokenizer=tokenizer())
    assert isinstance(speculator.drafter, DraftModel)
    ids, options = settings(4)
    expected = tiny("llama").generate(ids, **options)
    assert torch.equal(speculator.generate(ids, **options), expected)


def test_the_target_s_tokenizer_is_found_or_asked_for(tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "small")
    assert "pass tokenizer=" in refused(folder)
    target = tf.AutoModelForCausalLM.from_pretrained(plain_folder(tmp_path / "large"))
    assert isinstance(load_drafter(folder, target), DraftModel)


def test_a_model_that_names_other_code_or_files_is_refused(tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "small")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for setting in ("_attn_implementation", "transformers_weights", "kernel_config"):
        path.write_text(json.dumps({**config, "more": [{setting: "someone/kernel"}]}))
        assert setting in refused(folder, tokenizer=tokenizer())
    path.write_text(json.dumps({**config, "auto_map": {"AutoModel": "code.Model"}}))
    assert isinstance(load_drafter(folder, tiny("llama"), tokenizer()), DraftModel)
    (folder / "adapter_config.json").write_text("{}")
    assert "adapter_config.json" in refused(folder, tokenizer=tokenizer())


def test_settings_that_no_such_model_has_are_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "fetch_from": "someone/kernel"}
    small, (folder, _) = plain_folder(tmp_path / "small"), saved(tmp_path)
    for place in (small, folder):
        config = json.loads((place / "config.json").read_text())
        config.pop("rope_parameters")
        (place / "config.json").write_text(json.dumps(config | more))
        loaded = load_drafter(place, tiny("llama"), tokenizer())
        assert isinstance(loaded, DraftModel)
        own = loaded.model.config
        assert not hasattr(own, "fetch_from") and own.rope_parameters["factor"] == 2.0
    assert f"{small}: settings" in caplog.text and "left out: fetch_from." in caplog.text
    found = describe(folder)
    assert found["ignored"] == ["fetch_from"] and found["problem"] is None
    print_description(found, out := io.StringIO())
    assert re.search("settings left out +fetch_from", out.getvalue())
    assert "None" not in out.getvalue()


def test_a_model_without_a_tokenizer_or_weights_is_refused(tmp_path: Path) -> None:
    without = plain_folder(tmp_path / "without", None)
    assert "holds no tokenizer" in refused(without, tokenizer=tokenizer())
    broken = plain_folder(tmp_path / "broken")
    (broken / "model.safetensors").unlink()
    assert "cannot be loaded" in refused(broken, tokenizer=tokenizer())


def test_a_model_without_some_of_its_weights_is_refused(tmp_path: Path) -> None:
    """transformers would draw them at random."""
    folder = plain_folder(tmp_path / "small")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    said = refused(folder, tokenizer=tokenizer())
    assert "model.layers.0.mlp.up_proj.weight of llama is missing" in said


needs_model = pytest.mark.skipif(not MODEL.is_dir(), reason=f"{MODEL} is not on this machine")


@needs_model
@pytest.mark.parametrize("tree", ["chain:4", "cartesian:2,2"])
def test_stories260k_drafts_for_itself(tree: str) -> None:
    """Float64, or rounding decides between equals now and then."""
    speculator = headstart.load(MODEL, MODEL, tree=tree, dtype=torch.float64)
    text = speculator.tokenizer("Once upon a time", return_tensors="pt")  # type: ignore[misc]
    options: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False}
    out = speculator.generate(text.input_ids, **options)
    assert torch.equal(out, speculator.model.generate(text.input_ids, **options))  # type: ignore[operator]
    assert set(speculator.stats.acceptance_by_depth) == {1.0}


@needs_model
def test_two_layers_of_stories260k() -> None:
    target: Any = tf.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64).eval()
    drafter = DraftModel(DraftModelConfig.for_target(target, layers=2)).double().bind(target)
    drafter.init_from_target()
    ids = torch.tensor([[1, 403, 407, 261], [1, 305, 322, 265]])
    options: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False}
    options["attention_mask"] = torch.ones_like(ids)
    speculator = Speculator(target, drafter.eval(), tree="chain:3")
    assert torch.equal(speculator.generate(ids, **options), target.generate(ids, **options))
    assert 1 < speculator.stats.tau < 4
