"""How many labels are a drafter's most likely token, against all its logits at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.heads import FAMILIES, FINAL, TrainableDrafter, family
from headstart.heads.core import capture
from headstart.train.losses import LOSSES, fused
from headstart.train.losses.comparisons import IGNORED, most_likely
from headstart.train.losses.draft_loss import DraftLoss, label_counts
from tests.support.families import drafter as shared_drafter
from tests.support.families import moved, target
from tests.support.tiny import VOCAB

TRAINED = [name for name in FAMILIES if family(name).trainable]
TRIMMED = {"output": "trimmed", "draft_vocab_size": 40}
BEST = 12
CHOOSES = {"layers": 1, "depths": 4, "selector_rank": 6, "selector_top_k": BEST}
SUM = {"cross_entropy": 0.1, "total_variation": 1.8}
Batch = tuple[Tensor, Tensor, Tensor, Tensor]


def drafter(name: str, **options: Any) -> TrainableDrafter:
    if not options:
        return shared_drafter(name, "tiny").train()
    torch.manual_seed(4)
    made = moved(name, "tiny", 0.2, **options)
    assert isinstance(made, TrainableDrafter)
    return made.train()


@torch.no_grad()
def said(made: Any, features: Tensor, tokens: Tensor, best: int = 0) -> Tensor:
    """The most likely token at every depth and position, of the `best` ones if any.  # [K, M]"""
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    states = made.draft_hidden_states(features, tokens, everywhere, made.train_depths)
    found = []
    for k in range(made.train_depths):
        logits = made.draft_logits(k + 1)(states[k])
        if best:
            alone = made._output(states[k][:, : made.config.hidden_size])
            among = torch.zeros_like(logits).scatter(1, alone.topk(best).indices, 1.0)
            assert logits.argmax(-1).ne(alone.argmax(-1)).any(), "the choice changes nothing"
            logits = logits.masked_fill(among == 0, -torch.inf)
        found.append(logits.argmax(-1))
    return torch.stack(found)


def batch(made: Any, best: int = 0) -> tuple[Batch, list[list[int]]]:
    """Features, tokens, labels and final features; and the hits, a plain count.

    A third of the labels are the drafter's most likely token, and some are ignored.
    """
    torch.manual_seed(6)
    tokens = torch.randint(VOCAB, (3, 14))
    features = capture(target("tiny"), list(made.config.feature_layers), tokens).detach()
    final = capture(target("tiny"), [FINAL], tokens).detach()
    likely = said(made, features, tokens, best).view(-1, 3, 14)
    known = VOCAB if made.draft_vocabulary is None else len(made.draft_vocabulary)
    labels = torch.randint(known, likely.shape)
    labels = torch.where(torch.rand(labels.shape) < 1 / 3, likely, labels)
    labels[torch.rand(labels.shape) < 0.2] = IGNORED
    labels[:, 1] = IGNORED
    hits = (likely == labels).flatten(1).sum(1).tolist()
    counts = (labels >= 0).flatten(1).sum(1).tolist()
    assert all(0 < hit < count < 42 for hit, count in zip(hits, counts, strict=True))
    return (features, tokens, labels, final), [hits, counts]


def counted(made: Any, given: Batch, loss: Any, **how: Any) -> list[list[int]]:
    features, tokens, labels, final = given
    run = DraftLoss(made, 0.8, loss, **how)
    run(features, tokens, labels, label_counts(labels), final)
    assert run.hits.dtype == torch.int64
    return run.hits.tolist()


@pytest.mark.parametrize("loss", ["cross_entropy", "forward_kl"])
@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in TRAINED), ("medusa", TRIMMED), ("eagle3", TRIMMED)],
    ids=lambda value: str(value) if value else "",
)
def test_they_are_those_of_a_plain_count(name: str, options: dict[str, Any], loss: str) -> None:
    made = drafter(name, **options)
    given, expected = batch(made)
    for size in (None, 5, 1):
        assert counted(made, given, loss, size=size) == expected


@pytest.mark.parametrize("loss", [*LOSSES, SUM], ids=str)
def test_all_losses_count_the_same(loss: Any) -> None:
    made = drafter("medusa", heads=3)
    given, expected = batch(made)
    for weights in ("none", "acceptance", "confidence"):
        assert counted(made, given, loss, size=5, weights=weights) == expected


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("loss", ["cross_entropy", "forward_kl"])
def test_of_a_choice_it_is_the_token_that_is_chosen(loss: str, trimmed: bool) -> None:
    made = drafter("dflash", **CHOOSES, **(TRIMMED if trimmed else {}))
    given, expected = batch(made, BEST)
    for size in (None, 5):
        assert counted(made, given, loss, size=size) == expected


def only_the_last_chunk(hits: Tensor, wanted: Tensor, compare: Any) -> Any:
    def told(logits: Tensor, over: bool) -> Any:
        hits.copy_(most_likely(logits, wanted).sum())
        return compare(logits, over)

    return told


def after_the_gradient(hits: Tensor, wanted: Tensor, compare: Any) -> Any:
    def told(logits: Tensor, over: bool) -> Any:
        found = compare(logits, over)
        hits.add_(most_likely(logits, wanted).sum())
        return found

    return told


def second_best(logits: Tensor, wanted: Tensor) -> Tensor:
    return logits.topk(2).indices[:, 1] == wanted


def next_position(logits: Tensor, wanted: Tensor) -> Tensor:
    return most_likely(logits, wanted.roll(1))


@pytest.mark.parametrize(
    ("name", "mistake"),
    [("_counting", only_the_last_chunk), ("_counting", after_the_gradient),
     ("most_likely", second_best), ("most_likely", next_position)],
)  # fmt: skip
def test_a_mistake_would_be_seen(
    name: str, mistake: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = drafter("medusa", heads=3)
    given, expected = batch(made)
    monkeypatch.setattr(fused, name, mistake)
    assert counted(made, given, "forward_kl", size=5) != expected


def test_without_a_label_there_is_none() -> None:
    made = drafter("medusa", heads=3)
    (features, tokens, labels, final), _ = batch(made)
    nothing = torch.full_like(labels, IGNORED)
    given = features, tokens, nothing, final
    assert counted(made, given, "cross_entropy") == [[0, 0, 0], [0, 0, 0]]


def test_of_equal_logits_in_half_precision_the_first_counts() -> None:
    logits = torch.tensor([[0.0, 9.0, 9.0, 1.0]] * 4)
    wanted = torch.tensor([0, 1, 2, 3])
    for dtype in (torch.bfloat16, torch.float16):
        assert most_likely(logits.to(dtype), wanted).tolist() == [False, True, False, False]
    assert not most_likely(torch.full((4, 4), torch.nan), wanted).any()


@pytest.mark.parametrize("loss", [*LOSSES, SUM], ids=str)
@pytest.mark.parametrize("name", ["medusa", "eagle3"])
def test_loss_and_gradients_are_bit_for_bit_as_without_a_count(
    name: str, loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = drafter(name, **TRIMMED)
    (features, tokens, labels, final), _ = batch(made)
    trained = [p for p in made.parameters() if p.requires_grad]
    found = []
    for counts in (True, False):
        if not counts:
            monkeypatch.setattr(fused, "_counting", lambda hits, wanted, compare: compare)
        run = DraftLoss(made, 0.8, loss, size=5)
        value = run(features, tokens, labels, label_counts(labels), final)
        slopes = torch.autograd.grad(value, trained, allow_unused=True)
        found.append([value, run.by_depth, *(s for s in slopes if s is not None)])
        assert bool(run.hits[0].any()) == counts
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
