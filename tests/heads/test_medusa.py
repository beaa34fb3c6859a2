"""Medusa: three output layers, decoding equal to the training forward, and the artifact."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from headstart.heads import (
    ArtifactError,
    Manifest,
    OptionError,
    family,
    fingerprint,
    load_drafter,
    save_drafter,
)
from headstart.heads.artifacts.manifest import tokenizer_hash
from headstart.heads.medusa import Medusa, MedusaConfig
from tests.support.drafters import KEPT, started
from tests.support.tiny import VOCAB, one_line, tiny

OUTPUTS: dict[str, dict] = {
    "shared": {"output": "shared"},
    "own": {"output": "own"},
    "trimmed": {"output": "trimmed", "draft_vocab_size": 20},
}


def heads(output: str) -> Medusa:
    """Three random heads, bound and started from the target."""
    drafter = started("medusa", random=False, heads=3, layers=2, **OUTPUTS[output])
    torch.nn.init.normal_(drafter.weight, std=0.2)
    torch.nn.init.normal_(drafter.bias, std=0.2)
    return drafter.eval()


def by_hand(drafter: Medusa, head: int, feature: Tensor) -> Tensor:
    """Logits of one head over a feature [D], from the formula."""
    state = feature
    for layer in range(drafter.config.layers):
        weight, bias = drafter.weight[layer, head], drafter.bias[layer, head]
        state = state + F.silu(weight @ state + bias)
    if drafter.output is None:
        return tiny("llama").lm_head.weight @ state
    return drafter.output[head] @ state


@pytest.mark.parametrize("output", OUTPUTS)
def test_begin_is_the_training_forward_and_the_formula(output: str) -> None:
    drafter = heads(output)
    features = torch.randn(3, 5, 32, dtype=torch.float64)
    count = torch.tensor([5, 2, 0])  # a finished row is answered too, and ignored
    step = drafter.begin(None, features, torch.zeros(3, 5, dtype=torch.long), count)
    every = torch.ones(3, 5, dtype=torch.bool)
    states = drafter.draft_hidden_states(
        features, torch.zeros(3, 5).long(), every, 3
    )  # [K, B * A, D]
    assert states.shape == (3, 15, 32)
    trained = torch.stack([drafter.draft_logits(k)(states[k - 1]) for k in (1, 2, 3)])
    trained = trained.unflatten(1, (3, 5))  # [K, B, A, Vd]
    width = len(KEPT) if output == "trimmed" else VOCAB
    assert step.logits is not None and step.logits.shape == (3, 3, width)
    for row, last in ((0, 4), (1, 1)):
        assert torch.allclose(step.logits[row], trained[:, row, last], rtol=0, atol=1e-12)
        for head in range(3):
            expected = by_hand(drafter, head, features[row, last])
            assert torch.allclose(step.logits[row, head], expected, rtol=0, atol=1e-12)
    assert drafter.independent and drafter.max_depth == drafter.train_depths == 3


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_new_head_says_what_the_target_says(output: str) -> None:
    """Blocks start at x + SiLU(0) = x, so every head starts as the target's own output layer."""
    model = tiny("llama")
    drafter = Medusa(MedusaConfig.for_target(model, heads=3, **OUTPUTS[output])).double()
    drafter.bind(model)
    drafter.init_from_target(torch.arange(VOCAB))
    features = torch.randn(2, 1, 32, dtype=torch.float64)
    step = drafter.begin(None, features, torch.zeros(2, 1).long(), torch.ones(2).long())
    expected = model.get_output_embeddings()(features)  # [B, 1, V]
    if output == "trimmed":
        assert step.vocabulary is not None
        assert step.vocabulary.tolist() == list(range(VOCAB - 20, VOCAB))
        expected = expected[..., step.vocabulary]
    assert step.logits is not None
    assert torch.allclose(step.logits, expected.expand(-1, 3, -1), rtol=0, atol=1e-12)


def test_trimmed_proposals_are_target_ids() -> None:
    drafter = heads("trimmed")
    features = torch.randn(4, 1, 32, dtype=torch.float64)
    step = drafter.begin(None, features, torch.zeros(4, 1).long(), torch.ones(4).long())
    assert step.logits is not None and step.vocabulary is not None
    assert step.vocabulary.tolist() == KEPT.tolist()
    best = step.top(3)
    assert torch.equal(best, KEPT[step.logits.topk(3).indices])
    wide = step.top(25)
    assert (wide[..., 20:] == -1).all() and (wide[..., :20] >= 0).all()
    assert step.narrower_than(21) and not step.narrower_than(20)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"heads": 0}, "drafter.heads is 0"),
        ({"layers": 0}, "drafter.layers is 0"),
        ({"output": "trimmed"}, "draft_vocab_size is 0"),
        ({"output": "trimmed", "draft_vocab_size": 65}, "1 … 64"),
        ({"draft_vocab_size": 8}, "draft_vocab_size is 8 with output 'shared'"),
        ({"depth": 3}, "drafter.depth is not an option of 'medusa'"),
        ({"heads": "four"}, "heads"),
        ({"output": "both"}, "output"),
    ],
)
def test_bad_options_are_one_line(options: dict, named: str) -> None:
    with pytest.raises(OptionError) as caught:
        MedusaConfig.for_target(tiny("llama"), **options)
    assert named in one_line(caught.value)


def test_its_repr_has_its_options() -> None:
    said = "Medusa(heads=3, layers=2, output='trimmed', draft_vocab_size=20)"
    assert repr(heads("trimmed")) == said


def test_a_target_is_needed_and_must_fit() -> None:
    drafter = Medusa(MedusaConfig(hidden_size=32, vocab_size=65))
    with pytest.raises(OptionError, match=r"bind\(target\)"):
        _ = drafter.target
    with pytest.raises(OptionError, match="vocabulary 65, found 32 and 64") as caught:
        drafter.bind(tiny("llama"))
    one_line(caught.value)
    trimmed = Medusa(MedusaConfig.for_target(tiny("llama"), **OUTPUTS["trimmed"])).double()
    trimmed.bind(tiny("llama"))
    with pytest.raises(OptionError, match="token counts"):
        trimmed.init_from_target()


def test_unknown_family_is_named() -> None:
    assert family("medusa") is Medusa
    with pytest.raises(OptionError, match=r"'medussa'; expected one of: .*medusa") as caught:
        family("medussa")
    one_line(caught.value)


def manifest(target: str = "llama", **more) -> Manifest:
    return Manifest("medusa", f"tiny-{target}", fingerprint(tiny(target)), **more)


def saved(folder: Path, output: str = "trimmed", **more) -> tuple[Path, Medusa]:
    drafter = heads(output)
    return save_drafter(drafter, folder / "head", manifest(**more), card="# card\n"), drafter


@pytest.mark.parametrize("output", OUTPUTS)
def test_round_trip(output: str, tmp_path: Path) -> None:
    folder, drafter = saved(tmp_path, output, metrics={"tau": 2.5})
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["README.md", "config.json", "headstart.json", "model.safetensors"]
    loaded = load_drafter(folder, tiny("llama"))
    assert isinstance(loaded, Medusa) and not loaded.training
    assert loaded.dtype == torch.float64 and loaded.target is tiny("llama")
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    if output == "trimmed":
        kept = loaded.draft_vocabulary
        assert kept is not None and kept.dtype == torch.int64 and kept.tolist() == KEPT.tolist()
    features, one = torch.randn(2, 1, 32, dtype=torch.float64), torch.ones(2).long()
    before, after = (d.begin(None, features, one[:, None], one).logits for d in (drafter, loaded))
    assert before is not None and after is not None and torch.equal(before, after)
    assert json.loads((folder / "headstart.json").read_text())["metrics"] == {"tau": 2.5}


@pytest.mark.parametrize("output", OUTPUTS)
def test_no_weight_of_the_target_is_saved(output: str, tmp_path: Path) -> None:
    folder, _ = saved(tmp_path, output)
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
    extra = {"shared": set(), "own": {"output"}, "trimmed": {"output", "vocabulary"}}
    assert names == {"weight", "bias"} | extra[output]


def test_saving_again_replaces_the_whole_folder(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path)
    (folder / "stale.txt").write_text("old")
    (tmp_path / ".head.partial").mkdir()  # what a killed save leaves
    (tmp_path / ".head.partial" / "model.safetensors").write_bytes(b"half")
    saved(tmp_path, "shared")
    assert [path.name for path in tmp_path.iterdir()] == ["head"]
    assert not (folder / "stale.txt").exists()
    assert load_drafter(folder, tiny("llama")).config.output == "shared"


def test_the_fingerprint_names_the_target() -> None:
    model = tiny("llama")
    assert fingerprint(model) == fingerprint(model.float())
    model.double()
    assert fingerprint(model) != fingerprint(tiny("llama", seed=2))
    assert len({fingerprint(tiny(name)) for name in ("llama", "gemma3", "gpt2")}) == 3


def test_the_fingerprint_reads_the_norms() -> None:
    model = tiny("llama", seed=3)
    before = fingerprint(model)
    with torch.no_grad():
        model.model.layers[1].post_attention_layernorm.weight[5] += 0.1
    assert fingerprint(model) != before


def refused(folder: Path, target: str = "llama", seed: int = 1, **more) -> str:
    with pytest.raises(ArtifactError) as caught:
        load_drafter(folder, tiny(target, seed), **more)
    return one_line(caught.value)


def test_another_target_is_refused(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path)
    assert "another target" in refused(folder, seed=2)
    assert "tiny-llama" in refused(folder, "gpt2")


def tokenizer(words: str) -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(words.split())}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, "a")))


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """The same size, two words swapped."""
    mine, other = tokenizer("a b c d"), tokenizer("a c b d")
    folder, _ = saved(tmp_path, tokenizer_hash=tokenizer_hash(mine))
    load_drafter(folder, tiny("llama"), mine)
    load_drafter(folder, tiny("llama"))
    assert "another tokenizer" in refused(folder, tokenizer=other)


def damage(folder: Path, how: str) -> str:
    """Break a saved artifact; returns the file that the error must name."""
    weights, manifest = folder / "model.safetensors", folder / "headstart.json"
    data = weights.read_bytes()
    if how == "truncated":
        weights.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        weights.write_bytes(b"")
    elif how == "bit flipped in the header":
        weights.write_bytes(data[:8] + bytes([data[8] ^ 1]) + data[9:])
    elif how == "bit flipped in a tensor":
        weights.write_bytes(data[:-9] + bytes([data[-9] ^ 64]) + data[-8:])
    elif how == "no weights":
        weights.unlink()
    elif how == "a tensor missing":
        tensors = load_file(weights)
        del tensors["bias"]
        save_file(tensors, weights, metadata={"format": "pt"})
    elif how == "a tensor of another shape":
        tensors = load_file(weights)
        tensors["weight"] = tensors["weight"][:1].clone()
        save_file(tensors, weights, metadata={"format": "pt"})
    elif how == "no config":
        (folder / "config.json").unlink()
        return "config.json"
    elif how == "no manifest":
        manifest.unlink()
    elif how == "manifest cut":
        manifest.write_text(manifest.read_text()[:50])
    elif how == "manifest not of ours":
        manifest.write_text('{"hello": 1}')
    else:
        raise AssertionError(how)
    return "headstart.json" if "manifest" in how else "model.safetensors"


@pytest.mark.parametrize(
    "how",
    [
        "truncated",
        "empty",
        "bit flipped in the header",
        "bit flipped in a tensor",
        "no weights",
        "a tensor missing",
        "a tensor of another shape",
        "no config",
        "no manifest",
        "manifest cut",
        "manifest not of ours",
    ],
)
def test_damage_is_refused(how: str, tmp_path: Path) -> None:
    folder, _ = saved(tmp_path)
    load_drafter(folder, tiny("llama"))
    file = damage(folder, how)
    message = refused(folder)
    assert file in message and str(folder) in message


def test_a_missing_artifact_is_refused(tmp_path: Path) -> None:
    assert "no drafter at" in refused(tmp_path / "nowhere")
    assert "no drafter at 'someone/heads'" in refused(Path("someone/heads"))
