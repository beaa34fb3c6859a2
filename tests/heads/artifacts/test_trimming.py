"""A trimmed drafter has the whole one's logits for some tokens, and its text stays the target's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from headstart.heads import ArtifactError, OptionError, load_drafter
from headstart.heads.artifacts.export import export_drafter
from headstart.heads.artifacts.manifest import Manifest, fingerprint, read_manifest
from headstart.heads.artifacts.saving import save_drafter
from headstart.heads.artifacts.source import DrafterSource
from headstart.heads.artifacts.trimming import save_trimmed, trimmed
from headstart.heads.parts.vocabulary import most_frequent
from headstart.infer import Speculator
from tests.support.bytewise import save_target
from tests.support.drafters import made
from tests.support.tiny import VOCAB, one_line, prompts, tiny

IDS = torch.arange(3, VOCAB, 5)
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("medusa", {}), ("medusa", {"output": "own"}), ("hydra", {}), ("hydra", {"output": "own"}),
    ("hydra", {"prefix": True, "layers": 2}), ("redrafter", {}), ("redrafter", {"rnn": False}),
    ("eagle", {}), ("eagle", {"output": "own"}), ("eagle3", {}), ("mtp", {}),
    ("mlp_speculator", {"inner_dim": 24}), ("dflash", {"layers": 1}),
    ("dflash", {"layers": 1, "domino_rank": 4}), ("dflash", {"layers": 1, "markov_rank": 4}),
    ("dflash", {"layers": 1, "selector_rank": 4}),
    ("eagle3", {"output": "trimmed", "draft_vocab_size": VOCAB - 1}),
    ("early_exit", {}), ("draft_model", {"layers": 1}), ("pard", {"layers": 1, "depths": 3}),
    ("pard", {"layers": 1, "depths": 3, "feature_layers": [1]}),
]  # fmt: skip


def proposed(drafter: Any) -> Any:
    """What `begin` proposes after a prompt, and `extend` after that where there is one."""
    torch.manual_seed(5)
    ids = torch.randint(1, VOCAB, (1, 9))
    width = len(drafter.config.feature_layers) or 1
    features = torch.randn(1, 9, drafter.config.hidden_size * width).to(drafter.dtype)
    state = drafter.start(1, 20)
    drafter.prefill(state, features, ids, torch.tensor([9]))
    drafter.reserve(state, 9, 4)
    steps = [drafter.begin(state, features[:, -1:], ids[:, :1], torch.tensor([1]))]
    if not drafter.independent:
        steps.append(drafter.extend(state, torch.tensor([[4, 6]]), torch.tensor([[-1, -1]])))
    return steps


@pytest.mark.parametrize(("name", "options"), KINDS)
@torch.no_grad()
def test_logits_are_the_whole_ones(name: str, options: dict[str, Any]) -> None:
    whole = made(name, **options).double()
    known = whole.draft_vocabulary
    ids = IDS if known is None else IDS[torch.isin(IDS, known)]
    before = {key: tensor.clone() for key, tensor in whole.state_dict().items()}
    few = trimmed(whole, ids)
    assert torch.equal(few.draft_vocabulary, ids) and few.dtype == torch.float64
    columns = ids if known is None else torch.searchsorted(known, ids)
    for one, all_of_them in zip(proposed(few), proposed(whole), strict=True):
        assert torch.equal(one.vocabulary, ids)
        expected = all_of_them.logits[..., columns]
        there = expected.isfinite()  # all but what a selector leaves out, which then takes others
        assert there.all() if "selector_rank" not in options else there.any()
        torch.testing.assert_close(one.logits[there], expected[there])
    after = whole.state_dict()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    now = whole.draft_vocabulary
    assert now is None if known is None else torch.equal(now, known)


@pytest.mark.parametrize("name", ["medusa", "eagle", "draft_model", "pard"])
def test_the_text_is_the_targets(name: str) -> None:
    whole = made(name, **({"layers": 1} if name in ("draft_model", "pard") else {}))
    few = trimmed(whole, IDS)
    plain = Speculator(whole.target).generate(prompts([7])[0], max_new_tokens=14)
    text = Speculator(whole.target, few, tree="chain:3").generate(
        prompts([7])[0], max_new_tokens=14
    )
    assert torch.equal(text, plain)


def test_the_most_frequent() -> None:
    counts = torch.tensor([4, 0, 9, 0, 4, 1])
    assert [most_frequent(counts, size).tolist() for size in (1, 2, 4, 5)] == [
        [2], [0, 2], [0, 2, 4, 5], [0, 1, 2, 4, 5]
    ]  # fmt: skip


def test_a_trimmed_drafter_starts_with_the_same_ones() -> None:
    counts = torch.arange(VOCAB) % 3  # `topk` takes any of equals
    drafter = made("medusa", output="trimmed", draft_vocab_size=30)
    drafter.init_from_target(counts)
    assert torch.equal(drafter.vocabulary, most_frequent(counts, 30))


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (IDS[:0], "expected 1 … 63"),
        (torch.arange(VOCAB), "expected 1 … 63"),
        (torch.tensor([2, VOCAB]), f"the token {VOCAB} for a drafter"),
    ],
)
def test_a_vocabulary_that_is_none(ids: torch.Tensor, said: str) -> None:
    with pytest.raises(OptionError) as caught:
        trimmed(made("eagle3"), ids)
    assert said in one_line(caught.value)


def test_shared_heads_would_have_more_rows() -> None:
    """Three heads compute one product with the 64 rows that they share."""
    with pytest.raises(OptionError) as caught:
        trimmed(made("medusa", heads=3), torch.arange(22))
    assert "expected fewer than 22 tokens" in one_line(caught.value)
    assert trimmed(made("medusa", heads=3), torch.arange(21)).output.shape[:2] == (3, 21)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("medusa2", {"heads": 1, "rank": 1}, "headstart merge"),
    ],
)
def test_what_cannot_be_trimmed(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        trimmed(made(name, **options), IDS)
    assert said in one_line(caught.value)


def test_a_bias_of_the_target() -> None:
    """Heads that have room for it take it; others are refused."""
    target = tiny("llama", 9)
    layer = target.lm_head
    layer.bias = nn.Parameter(torch.randn(VOCAB, dtype=layer.weight.dtype))
    try:
        whole, few = made("hydra", target).double(), trimmed(made("hydra", target).double(), IDS)
        for one, every in zip(proposed(few), proposed(whole), strict=True):
            torch.testing.assert_close(one.logits, every.logits[..., IDS])
        with pytest.raises(ArtifactError) as caught:
            trimmed(made("medusa", target), IDS)
        assert "the target's output layer has a bias" in one_line(caught.value)
    finally:
        layer.bias = None


def test_the_artifact(tmp_path: Path) -> None:
    """It loads, names its origin, keeps the dtype, and claims no figure of the whole one."""
    _, tokenizer = save_target(tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    vocabulary = model.config.vocab_size
    ids = torch.arange(0, vocabulary, 4)
    whole = made("eagle", model).bfloat16()
    manifest = Manifest(
        "eagle", str(tmp_path / "target"), fingerprint(model), metrics={"tau": 3.0},
        trained={"drafter": {"vocabulary_sha256": ""}, "chat": {}},
    )  # fmt: skip
    save_drafter(whole, tmp_path / "whole", manifest)
    source = DrafterSource(tmp_path / "whole")
    folder = save_trimmed(whole, source, tokenizer, ids, tmp_path / "few")
    found = read_manifest(folder)
    assert found.metrics == {} and found.origin == str(tmp_path / "whole")
    assert found.trained["drafter"]["vocabulary_sha256"] and found.trained["chat"] == {}
    card = (folder / "README.md").read_text()
    plain = " ".join(card.split())
    told = f"It has the weights of the drafter `{tmp_path}/whole`, and proposes {len(ids):,} of "
    assert f"{told}{vocabulary:,} tokens" in plain and "Nothing was measured" in card
    assert "| trained with | |" in card and "| chats | none |" in card
    assert not [line for line in card.splitlines() if line != line.rstrip()]
    loaded: Any = load_drafter(folder, model, tokenizer, dtype="auto")
    assert loaded.dtype == torch.bfloat16 and torch.equal(loaded.vocabulary, ids)
    assert json.loads((folder / "config.json").read_text())["output"] == "trimmed"
    with pytest.raises(ArtifactError, match="not empty"):
        save_trimmed(whole, source, tokenizer, ids, folder)
    path = tmp_path / "whole" / "headstart.json"
    noted = json.loads(path.read_text())
    noted["trained"]["data"] = {"sources": []}
    path.write_text(json.dumps(noted))
    with pytest.raises(ArtifactError, match=r"headstart.json cannot be read .`trained` is malf"):
        save_trimmed(whole, DrafterSource(path.parent), tokenizer, ids, tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
    # Once more, to fewer.
    few = DrafterSource(folder)
    fewer = save_trimmed(loaded, few, tokenizer, ids[::2], tmp_path / "fewer")
    again: Any = load_drafter(fewer, model, tokenizer, dtype="auto")
    assert torch.equal(again.lm_head.weight, loaded.lm_head.weight[::2])


def test_a_checkpoint_has_no_table(tmp_path: Path) -> None:
    """Nobody noted what it was trained with."""
    _, tokenizer = save_target(tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    export_drafter(made("eagle", model), "original", tmp_path / "theirs")
    theirs = DrafterSource(tmp_path / "theirs")
    drafter: Any = load_drafter(theirs, model, tokenizer, dtype="auto")
    few = save_trimmed(drafter, theirs, tokenizer, torch.arange(9), tmp_path / "few")
    card = (few / "README.md").read_text()
    assert f"the drafter `{tmp_path}/theirs`" in card and "trained with" not in card
