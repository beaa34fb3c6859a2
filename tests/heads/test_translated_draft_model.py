"""Draft models with tokenizers of their own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import headstart
from headstart.heads import HeadstartError, OptionError, Sampling
from headstart.heads.artifacts.conversion import convert
from headstart.heads.artifacts.export import export_drafter
from headstart.heads.artifacts.source import DrafterSource
from headstart.heads.artifacts.trimming import trimmed
from headstart.heads.core import row_seeds
from headstart.heads.parts.translation import Translation
from headstart.heads.translated_draft_model import TranslatedDraftModel
from headstart.infer import Batcher, Speculator
from headstart.infer.rules.registry import RULES
from headstart.reports.description import describe
from headstart.train.adapt.composition import check_adaptable
from headstart.train.adapt.traffic import AdaptError
from tests.support.families import TREES
from tests.support.scripted import decoding_of
from tests.support.syncs import run_rounds
from tests.support.tiny import one_line
from tests.support.together import decode_together

PAIRS = [
    ("h", "e"),
    ("t", "he"),
    ("i", "n"),
    ("in", "g"),
    ("Ġ", "a"),
    ("the", "Ġa"),
    ("theĠa", "ing"),
]


def tokenizer(
    pairs: Sequence[tuple[str, str]] = PAIRS,
    turn: int = 0,
    special: Sequence[str] = ("<s>", "</s>"),
    begins: bool = False,
) -> PreTrainedTokenizerFast:
    """A byte-level one with some longer tokens, whose ids are moved on by `turn`.

    Args:
        special: what a text begins and ends with; begins: whether its texts do.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *(left + right for left, right in pairs), *special]
    ids = {token: (number + turn) % len(tokens) for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=ids, merges=[*pairs]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*special])
    if begins:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], ids[special[0]])]
        )
    names = {"bos_token": special[0], "eos_token": special[1], "pad_token": special[1]}
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **names)


def llama(vocabulary: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=512, initializer_range=0.4,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


def moved(model: Any, old: Any, new: Any) -> Any:
    """The same model for a tokenizer of the same tokens with other ids."""
    other, names = llama(len(new)), new.get_vocab()
    other.load_state_dict(model.state_dict())
    order = torch.tensor([names[t] for t in old.convert_ids_to_tokens([*range(len(old))])])
    for layer, theirs in (
        (model.model.embed_tokens, other.model.embed_tokens), (model.lm_head, other.lm_head),
    ):  # fmt: skip
        theirs.weight.data[order] = layer.weight.data
    return other


def saved(folder: Path, model: Any, own: Any) -> Path:
    model.save_pretrained(folder)
    own.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and the same model with the same tokens by other ids."""
    folder, own, other = tmp_path_factory.mktemp("models"), tokenizer(), tokenizer(turn=77)
    model = llama(len(own))
    moved_on = saved(folder / "moved", moved(model, own, other), other)
    return saved(folder / "target", model, own), moved_on


def loaded(places: tuple[Path, Path], **options: Any) -> Any:
    made = headstart.load(places[0], places[1], dtype="float64", compile=False, **options)
    assert isinstance(made.drafter, TranslatedDraftModel)
    return made


def asked(made: Any, *texts: str) -> dict[str, Any]:
    return {**made.tokenizer([*texts], return_tensors="pt", padding=True), "max_new_tokens": 40}


def test_what_is_read_of_the_targets_tokens() -> None:
    theirs: Any = tokenizer(special=("<s>", "<end>"))
    own = tokenizer([*PAIRS[:2], *PAIRS[4:5]], 5, ("<bos>", "</s>"))
    found = Translation.between(theirs, own, len(theirs) + 3, len(own))
    for name, token in zip(found.names.tolist(), found.ids.tolist(), strict=True):
        text = theirs.convert_ids_to_tokens(name)
        assert own.convert_ids_to_tokens(token) == {"<s>": "<bos>", "<end>": "</s>"}.get(text, text)
    assert found.names.diff().min() > 0 and len(found.names) == len(own) and not len(found.first)
    text = "theing the aing x"
    ids = torch.tensor([[*theirs.encode(text), theirs.bos_token_id]])
    pieces, count = found.read(ids, torch.tensor([ids.shape[1]]), 30)
    read = own.convert_ids_to_tokens(pieces[0, : int(count)].tolist())
    # The token of `the aing` is five of the draft model's, of which the last four are read.
    assert (
        read == ["the", "i", "n", "g", "Ġ", "Ġa", "i", "n", "g", "Ġ", "x", "<bos>"]
        and not pieces[0, int(count) :].any()
    )
    cut, count = found.read(ids, torch.tensor([2]), 3)  # two tokens of four pieces
    assert cut.tolist() == pieces[:, :3].tolist() and count.tolist() == [3]
    other = Translation.between(tokenizer(special=("<a>", "<b>", "<c>")[:2]), own, 300, 100)
    assert set(other.ids.tolist()) <= set(range(100))


def test_a_prompt_begins_as_the_draft_models_texts_do() -> None:
    theirs, own = tokenizer(), tokenizer(turn=5, begins=True)
    found = Translation.between(theirs, own, len(theirs), len(own))
    ids = torch.tensor([theirs.encode("abc"), [theirs.bos_token_id, *theirs.encode("ab")]])
    read, count = found.read_prompt(ids, torch.tensor([2, 3]), 9)
    assert own.batch_decode(read) == ["<s>ab", "<s>ab"] and count.tolist() == [3, 3]
    read, count = found.read_prompt(ids, torch.tensor([3, 2]), 2)  # without its beginning
    assert own.batch_decode(read) == ["bc", "<s>a"] and count.tolist() == [2, 2]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("tree", TREES)
def test_the_same_model_by_other_ids_drafts_all(
    places: tuple[Path, Path], tree: str, graphs: bool
) -> None:
    made = loaded(places, tree=tree, graphs=graphs)
    inputs = asked(made, "the aing", "x", "</s>in<s>")
    found = made.generate(**inputs, do_sample=False)
    assert torch.equal(found, made.model.generate(**inputs, do_sample=False))
    # A search keeps what is likely as a whole, which the most likely next token need not be.
    least = 2.9 if tree.startswith("b") else 39 / 10
    assert made.stats.tau >= least
    sampled = made.generate(**inputs, do_sample=True, seed=4)
    plain = Speculator(made.model).generate(**inputs, do_sample=True, seed=4)
    assert torch.equal(sampled, plain) and made.stats.tau >= least


def spelt_out(places: tuple[Path, Path], folder: Path) -> Path:
    """A draft model that knows letters alone."""
    own = tokenizer([], 9)
    return saved(folder, llama(len(own)), own)


@pytest.mark.parametrize("rule", ["coupled", "match", "rejection", "traversal", "block"])
def test_a_target_of_longer_tokens(
    places: tuple[Path, Path], tmp_path: Path, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most tokens are several to the draft model, more than its cache has slots for."""
    monkeypatch.setattr("headstart.heads.translated_draft_model._MORE", 2)
    small = spelt_out(places, tmp_path / "small")
    tree = "chain:3" if rule == "block" else "cartesian:2,2"
    made = loaded((places[0], small), tree=tree, rule=rule)
    bias = {(n,): 9.0 for n in range(256, 263)}  # the longer ones
    inputs: Any = asked(made, "the aing the aingthe aing", "x") | {"sequence_bias": bias}
    found = made.generate(**inputs, do_sample=False)
    expected = made.model.generate(**inputs, do_sample=False)
    assert torch.equal(found, expected) and (found[:, -40:] > 255).float().mean() > 0.8
    sampled = made.generate(**inputs, do_sample=True, seed=2)
    if RULES[rule].same_text:
        plain = Speculator(made.model).generate(**inputs, do_sample=True, seed=2)
        assert torch.equal(sampled, plain)


def test_a_batcher_decodes_them_together(places: tuple[Path, Path]) -> None:
    made = loaded(places, tree="cartesian:2,1,1")
    requests = [asked(made, text) for text in ("the aing" * 9, "x", "in</s>", "thethethe", "a")]
    for number, request in enumerate(requests):
        request |= {"max_new_tokens": 20 + 7 * number, "do_sample": False}
    expected = [made.generate(**request) for request in requests]
    found = decode_together(Batcher(made, rows=2), requests)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_round_does_not_wait(places: tuple[Path, Path], rule: str) -> None:
    made = loaded(places)
    how: dict[str, Any] = {"rule": RULES[rule], "expansion": RULES[rule].children}
    inputs = asked(made, "the aing", "x")
    sampling = Sampling(row_seeds(3, 2))
    decoding = decoding_of(made.model, made.drafter, "cartesian:3,2", sampling, **how)
    with torch.no_grad():
        decoding.prefill(inputs["input_ids"], inputs["attention_mask"], 16)
        assert run_rounds(decoding) > 2


def test_several_draft_together(places: tuple[Path, Path]) -> None:
    made = headstart.load(
        places[0], [places[1], "lookup"], tree="chain:2+chain:5", dtype="float64", compile=False
    )
    inputs: Any = asked(made, "the aing the aing")
    model: Any = made.model
    found = made.generate(**inputs, do_sample=False)
    assert torch.equal(found, model.generate(**inputs, do_sample=False))
    assert made.stats.tau > 2.5


def test_it_is_said_what_is_drafted(
    places: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    loaded(places)
    (said,) = (each.getMessage() for each in caplog.records if each.name.startswith("headstart"))
    assert "it drafts the 265 of the target's 265 tokens that both have" in said


@pytest.fixture(scope="module")
def artifact(places: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, folder = loaded(places), tmp_path_factory.mktemp("artifact") / "made"
    return convert(places[1], made.model, made.tokenizer, folder)


def test_an_artifact_of_it_needs_no_tokenizer(places: tuple[Path, Path], artifact: Path) -> None:
    names = {path.name for path in artifact.iterdir()}
    assert names == {"README.md", "config.json", "headstart.json", "model.safetensors"}
    made, again = loaded(places, tree="chain:3"), loaded((places[0], artifact), tree="chain:3")
    for name, table in made.drafter.translation.named_buffers():
        assert torch.equal(table, getattr(again.drafter.translation, name))
    inputs = asked(made, "the aing", "x")
    text = made.generate(**inputs, do_sample=False)
    assert torch.equal(again.generate(**inputs, do_sample=False), text)
    assert again.stats.tau == made.stats.tau > 3
    assert describe(artifact)["problem"] is None


def test_what_is_not_done_with_it(
    places: tuple[Path, Path], artifact: Path, tmp_path: Path
) -> None:
    made = loaded((places[0], artifact))
    assert made.drafter.language_model is None
    for act, said in (
        (lambda: export_drafter(made.drafter, "vllm", tmp_path / "vllm"), "tokenizer of its own"),
        (lambda: trimmed(made.drafter, torch.arange(9)), "is not trimmed further"),
        (lambda: check_adaptable(DrafterSource(artifact)), "no such draft model is trained"),
    ):
        with pytest.raises((HeadstartError, AdaptError), match=said) as caught:
            act()
        one_line(caught.value)
    assert not [*tmp_path.rglob("*.safetensors")]


def test_tokenizers_that_share_nothing_are_refused() -> None:
    own = tokenizer(turn=3)
    drafter = TranslatedDraftModel.of(llama(len(own)))
    with pytest.raises(OptionError, match="no token in common") as caught:
        drafter.translate(Translation.between(tokenizer(), own, 265, 0))
    one_line(caught.value)
