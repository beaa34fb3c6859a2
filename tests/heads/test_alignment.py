"""Training forward = decode forward, for every family: logits, and the token they are for.

The decode calls are driven over a known text exactly as the loop drives them: the prompt, then
rounds that commit one or two tokens, each of which grows the true continuation as a chain.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.heads import FAMILIES, FINAL, TrainableDrafter, family
from headstart.heads.core import capture
from headstart.train.fit.joint import training_classes
from tests.support.tiny import VOCAB, tiny

DEPTHS, PROMPT, LENGTH, BATCH = 3, 4, 14, 2

ROWS: list[tuple[str, dict[str, Any]]] = [
    ("medusa", {"heads": DEPTHS, "output": "own"}),
    ("medusa", {"heads": DEPTHS, "layers": 2}),
    ("medusa", {"heads": DEPTHS, "output": "trimmed", "draft_vocab_size": 40}),
    ("medusa2", {"heads": DEPTHS, "output": "own", "rank": 4, "modules": ["q_proj", "up_proj"]}),
    ("medusa2", {"heads": DEPTHS, "output": "shared", "rank": 4, "modules": ["v_proj", "lm_head"]}),
    ("redrafter", {"depths": DEPTHS}),
    ("redrafter", {"depths": DEPTHS, "exit_dim": 24, "layers": 1}),
    ("redrafter", {"depths": DEPTHS, "output": "trimmed", "draft_vocab_size": 40}),
    ("hydra", {"heads": DEPTHS, "layers": 2, "output": "own"}),
    ("hydra", {"heads": DEPTHS, "output": "shared", "prefix": True}),
    ("hydra", {"heads": DEPTHS, "output": "trimmed", "draft_vocab_size": 40, "prefix": True}),
    ("eagle", {"depths": DEPTHS}),
    ("eagle3", {"depths": DEPTHS}),
    ("eagle3", {"depths": DEPTHS, "output": "trimmed", "draft_vocab_size": 40}),
    ("eagle3", {"depths": DEPTHS, "feature_layers": [1, 0], "norm_before_residual": True}),
    ("eagle3", {"depths": DEPTHS, "mask_token_id": 5, "kept": 1.0}),
    ("eagle3", {"depths": DEPTHS, "mask_token_id": 5, "kept": 1.0, "layers": 2}),
    ("eagle3", {"depths": DEPTHS, "layers": 2}),
    ("dflash", {"depths": DEPTHS, "layers": 2}),
    ("dflash", {"depths": DEPTHS, "layers": 2, "causal": True, "feature_layers": [2, 0]}),
    ("dflash", {"depths": DEPTHS, "layers": 3, "window": 3}),
    ("dflash", {"depths": DEPTHS, "layers": 2, "window": 2, "causal_windows": False}),
    (
        "dflash",
        {
            "depths": DEPTHS,
            "layers": 2,
            "selector_rank": 4,
            "selector_top_k": 0,
            "conv_kernel_size": 2,
            "conv_group_size": 8,
        },
    ),
    ("dflash", {"depths": DEPTHS, "layers": 1, "sample_from_anchor": True, "markov_rank": 5}),
    ("dflash", {"depths": DEPTHS, "layers": 1, "markov_rank": 5, "markov_head_type": "gated"}),
    ("dflash", {"depths": DEPTHS, "layers": 1, "markov_rank": 5, "markov_head_type": "rnn"}),
    ("dflash", {"depths": DEPTHS, "layers": 1, "domino_rank": 5, "gru_hidden_dim": 9}),
    ("dflash", {"depths": DEPTHS, "layers": 1, "output": "trimmed", "draft_vocab_size": 40}),
    (
        "dflash",
        {
            "depths": DEPTHS,
            "layers": 1,
            "output": "trimmed",
            "draft_vocab_size": 40,
            "markov_rank": 5,
        },
    ),
    ("mlp_speculator", {"heads": DEPTHS}),
    ("mlp_speculator", {"heads": DEPTHS, "tied": False, "inner_dim": 24, "scale_input": False}),
    (
        "mlp_speculator",
        {"heads": DEPTHS, "cell": "lstm", "output": "trimmed", "draft_vocab_size": 40},
    ),
    ("mtp", {"depths": DEPTHS}),
    ("mtp", {"depths": DEPTHS, "output": "trimmed", "draft_vocab_size": 40}),
    ("draft_model", {"layers": 1}),
    ("early_exit", {}),
    ("early_exit", {"layers": 2, "output": "trimmed", "draft_vocab_size": 40}),
    ("pard", {"layers": 2, "depths": DEPTHS, "kept": 1.0}),
    (
        "pard",
        {
            "layers": 1,
            "depths": DEPTHS,
            "kept": 1.0,
            "feature_layers": [FINAL, 1],
            "feature_scale": 1.0,
        },
    ),
]
"""A family's options; every family that is trained has a row."""

IDS = [
    f"{name}-{'-'.join(str(v) for v in options.values() if not isinstance(v, list))}"
    for name, options in ROWS
]


def target() -> Any:
    return tiny("llama")


@pytest.fixture
def adapted() -> Iterator[Callable[[TrainableDrafter], None]]:
    """Gives a drafter's adapter, if it has one, random weights in the target, until the test ends.

    All that is captured of the target is then of the adapted one.
    """
    adapters = []

    def adapt(drafter: TrainableDrafter) -> None:
        if (adapter := drafter.adapter) is None:
            return
        adapters.append(adapter)
        if not adapter.attached:
            adapter.attach(target())
        before = captured(text(), [FINAL])
        with torch.no_grad():
            for parameter in adapter.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.3)
        assert (captured(text(), [FINAL]) - before).abs().max() > 0.1

    yield adapt
    for adapter in adapters:
        adapter.detach()


def random_drafter(name: str, options: dict[str, Any]) -> TrainableDrafter:
    """No weight at its start's zero, where many a mistake would not show."""
    config: Any = family(name).config_class
    drafter: Any = family(name)(config.for_target(target(), **options)).double().bind(target())
    drafter.init_from_target(torch.arange(VOCAB))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1))
    return drafter.eval()


@torch.no_grad()
def captured(tokens: Tensor, layers: list[int]) -> Tensor:
    return capture(target(), layers, tokens)


@torch.no_grad()
def decoded(drafter: TrainableDrafter, features: Tensor, tokens: Tensor, late: int = 0) -> Tensor:
    """Logits [K, B, T, Vd] of every start from PROMPT - 1 on, NaN at the others.

    Args:
        late: how many positions after the right one each feature is taken from.
    """
    features = features.roll(-late, 1)
    state = drafter.start(BATCH, LENGTH + DEPTHS + 1)
    count = torch.full((BATCH,), PROMPT)
    drafter.prefill(state, features[:, :PROMPT], tokens[:, :PROMPT], count)
    found: list[Tensor] = []
    at = PROMPT - 1  # the feature that the round's root was emitted from
    for turn in range(LENGTH):
        committed = 1 + turn % 2  # the first is the prefill's token; later rounds take one or two
        first, at = at, at + committed - 1
        if at + DEPTHS >= LENGTH:
            break
        part = slice(first, at + 1)
        # As in a batch whose other rows accepted more, there is padding.
        feed = F.pad(features[:, part], (0, 0, 0, 1), value=9.0)
        drafter.reserve(state, at + 1, DEPTHS + 2)
        step = drafter.begin(
            state, feed, F.pad(tokens[:, first + 1 : at + 2], (0, 1)), count * 0 + committed
        )
        levels = [] if step.logits is None else list(step.logits.unbind(1))
        for depth in range(2, DEPTHS + 1):
            if not drafter.independent:
                parent = torch.full((BATCH, 1), depth - 3)
                step = drafter.extend(state, tokens[:, at + depth, None], parent)
                assert step.logits is not None
                levels.append(step.logits[:, 0])
        found += [torch.full_like(torch.stack(levels), torch.nan)] * (at - len(found))
        found.append(torch.stack(levels))  # [K, B, Vd]
        at += 1
    assert len(found) > PROMPT + 3
    return torch.stack(found, 2)


@torch.no_grad()
def trained(drafter: TrainableDrafter, features: Tensor, tokens: Tensor) -> Tensor:
    """Logits [K, B, T, Vd] of the training forward at every position."""
    where = torch.ones_like(tokens, dtype=torch.bool)
    states = drafter.draft_hidden_states(features, tokens, where, DEPTHS)
    each = [drafter.draft_logits(k)(states[k - 1]) for k in range(1, DEPTHS + 1)]
    return torch.stack(each).unflatten(1, tokens.shape)


def difference(decode: Tensor, train: Tensor) -> float:
    """The largest difference at the positions that were decoded."""
    apart = (decode - train[:, :, : decode.shape[2]]).abs()
    return apart[~decode.isnan()].max().item()


def text() -> Tensor:
    return torch.randint(1, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(5))


def test_every_trained_family_has_a_row() -> None:
    without = set(FAMILIES) - {name for name, _ in ROWS}
    for name in without:
        assert not family(name).trainable, f"{name} has no row"


@pytest.mark.parametrize(("name", "options"), ROWS, ids=IDS)
def test_training_forward_is_decode_forward(
    name: str, options: dict[str, Any], adapted: Callable[[TrainableDrafter], None]
) -> None:
    drafter, tokens = random_drafter(name, options), text()
    adapted(drafter)
    layers = list(drafter.config.feature_layers)
    features = captured(tokens, layers)
    decode, train = decoded(drafter, features, tokens), trained(drafter, features, tokens)
    assert difference(decode, train) <= 1e-10
    # One index off, and nothing agrees: another depth, a neighbouring position, another layer.
    assert difference(decode, train.roll(-1, 0)) > 1e-2
    assert difference(decode, train.roll(-1, 2)) > 1e-2
    if layers:
        assert difference(decoded(drafter, features, tokens, late=1), train) > 1e-2
        earlier = captured(tokens, [1 if layer == FINAL else layer - 1 for layer in layers])
        assert difference(decode, trained(drafter, earlier, tokens)) > 1e-2
    if name == "early_exit":  # what it reads in training are features alone
        assert difference(decode, trained(drafter, features.roll(1, 1), tokens)) > 1e-2
    elif not drafter.independent:
        assert difference(decode, trained(drafter, features, tokens.roll(1, 1))) > 1e-2


def loss_while_decoding(
    drafter: TrainableDrafter, decode: Tensor, tokens: Tensor, shift: int = 0
) -> float:
    """The loss of the decode calls' own proposals.

    The root of a round that starts from position t is token t + 1, so a proposal at depth k is for
    token t + 1 + k.
    """
    known, total = drafter.draft_vocabulary, 0.0
    for depth in range(1, drafter.train_depths + 1):
        losses = []
        for at in range(PROMPT - 1, decode.shape[2]):
            for row in range(BATCH):
                word, logits = int(tokens[row, at + 1 + depth + shift]), decode[depth - 1, row, at]
                if logits.isnan().any() or (known is not None and word not in known):
                    continue
                column = word if known is None else known.tolist().index(word)
                losses.append(-logits.log_softmax(-1)[column])
        total += 0.8**depth * torch.stack(losses).mean().item()
    return total


@pytest.mark.parametrize(("name", "options"), ROWS, ids=IDS)
def test_the_loss_is_that_of_the_decode_forward(
    name: str, options: dict[str, Any], adapted: Callable[[TrainableDrafter], None]
) -> None:
    """Labels too: the trainer's loss on a text is the one of what decoding proposes for it."""
    drafter, tokens = random_drafter(name, options), text()
    module = training_classes(drafter)[0](target(), drafter, 0.8)
    adapted(drafter)
    decode = decoded(drafter, captured(tokens, list(drafter.config.feature_layers)), tokens)
    # Decoding answered for some starts alone, so the labels of the others are left out.
    answered = ~decode[0, 0].isnan().any(-1)  # [T]
    labels = module.labels(tokens, torch.ones_like(tokens, dtype=torch.bool))
    labels[:, :, : len(answered)][:, :, ~answered] = -100
    labels[:, :, len(answered) :] = -100
    module.labels = lambda *_: labels  # type: ignore[method-assign]
    batch = torch.arange(BATCH), tokens, torch.ones_like(tokens, dtype=torch.bool)
    if drafter.adapter is None:
        loss = module(*batch)["loss"]
    else:  # the target's own part drops out
        loss = module(*batch, weight=3.0)["loss"] - module(*batch, weight=2.0)["loss"]
    module.release()
    assert loss.item() == pytest.approx(loss_while_decoding(drafter, decode, tokens), rel=1e-5)
    for shift in (-1, 1):
        if decode.shape[2] + DEPTHS + shift < LENGTH:
            wrong = loss_while_decoding(drafter, decode, tokens, shift)
            assert abs(wrong - loss.item()) > 1e-3
