"""The accuracy that a training tells: of all labels since its last line, by what heads say.

The heads know what comes after a token in a text that counts, so head k is right at position t
where x_t+k+1 is x_t + k + 1.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headstart.heads.medusa2 import Medusa2
from headstart.train.data.training_rows import Row, Rows
from headstart.train.fit.clock import Clock, Progress
from headstart.train.fit.joint import JointTarget
from headstart.train.fit.target_with_drafter import TargetWithDrafter
from headstart.train.losses.comparisons import IGNORED
from headstart.train.recipe import Train
from tests.support.counting import SIZE, counting_drafter, counting_target
from tests.support.packed import batches, module_of
from tests.support.tiny import tiny
from tests.support.training import IDLE, trainer_of

HEADS = 2
SPEC = Train(
    batch_size=3, gradient_accumulation=2, max_steps=6, eval_every=6, learning_rate=1e-9,
    packing=False,
)  # fmt: skip


def ragged_rows(count: int = 30) -> Rows:
    """Texts of 4 to 30 tokens; the longer one is, the more of its tokens are not what comes."""
    random, rows = np.random.default_rng(5), []
    for number, length in enumerate(random.integers(4, 31, count)):
        tokens = (5 * number + np.arange(length)) % SIZE
        wrong = random.random(length) < length / 60
        tokens = np.where(wrong, random.integers(0, SIZE, length), tokens)
        rows.append(Row(str(number), tokens, random.random(length) < 0.8))
    return Rows.of(rows)


def by_hand(tokens: Tensor, supervised: Tensor, ends: list[int] | None = None) -> Any:
    """Hits and labels of each head in rows [B, T], or where documents end in the only row."""
    found = np.zeros((2, HEADS), dtype=int)
    parts = zip(tokens, supervised, strict=True)
    if ends is not None:
        starts = [0, *ends[:-1]]
        parts = ((tokens[0, a:b], supervised[0, a:b]) for a, b in zip(starts, ends, strict=True))
    for row, mark in parts:
        for k in range(1, HEADS + 1):
            for t in range(len(row) - k - 1):
                if mark[t + k + 1]:
                    found[1, k - 1] += 1
                    found[0, k - 1] += int(row[t + k + 1] == (row[t] + k + 1) % SIZE)
    return found


def lines(folder: Path) -> list[dict[str, Any]]:
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if "loss" in line]


@pytest.mark.parametrize("loss", ["cross_entropy", "forward_kl"])
def test_it_is_of_all_labels_since_the_last_line(tmp_path: Path, loss: str) -> None:
    """Two lines of three steps of two micro-batches of three rows, of which each has its labels."""
    drafter = counting_drafter(counting_target(), HEADS)
    spec = Train(**{**SPEC.__dict__, "loss": loss})
    run = trainer_of(
        drafter, tmp_path / "run", spec, lambda _: IDLE, ragged_rows(), logging_steps=3
    )
    parts: list[Any] = []
    run.module.register_forward_pre_hook(
        lambda module, args, how: parts.append(by_hand(how["tokens"], how["supervised"])),
        with_kwargs=True,
    )
    run.fit()
    assert len(parts) == 12
    for line, first in zip(lines(tmp_path), (0, 6), strict=True):
        hits, labels = np.sum(parts[first : first + 6], axis=0)
        assert line["accuracy_by_depth"] == (hits / labels).tolist()
        of_batches = np.mean([hit / label for hit, label in parts[first : first + 6]], axis=0)
        last = parts[first + 5][0] / parts[first + 5][1]
        for other in (of_batches, last):
            assert (abs(hits / labels - other) > 1e-3).all(), "it could be the mean of batches"


def test_in_packed_rows_documents_are_apart() -> None:
    """The second one goes on where the first ends, so a head that looked beyond would be right."""
    target = counting_target()
    tokens = (torch.arange(20) % SIZE).unsqueeze(0)
    tokens[0, [4, 15]] = 30
    supervised = torch.ones_like(tokens, dtype=torch.bool)
    supervised[0, 6] = False
    ends = [9, 20]
    segments = (torch.arange(20) >= 9).int().unsqueeze(0)
    positions = torch.cat([torch.arange(9), torch.arange(11)]).unsqueeze(0)
    module = TargetWithDrafter(target, counting_drafter(target, HEADS), 0.8)
    found = module(None, tokens, supervised, segments=segments, positions=positions)["hits"]
    assert found.tolist() == by_hand(tokens, supervised, ends).tolist()
    assert found.tolist() != by_hand(tokens, supervised).tolist()


@pytest.mark.parametrize("weight", [None, 0.5])
def test_where_the_target_learns_too_it_is_of_what_the_heads_read(
    weight: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the base's features, then those with the adapter."""
    torch.manual_seed(2)
    module = module_of("medusa2", {}, tiny("llama"), "forward_kl")
    made, (given, _) = module.drafter, batches()
    assert isinstance(module, JointTarget) and isinstance(made, Medusa2)
    tokens, everywhere = given["tokens"], torch.ones_like(given["tokens"], dtype=torch.bool)

    def likely(features: Tensor) -> Tensor:
        read = features[..., : module.width]
        states = made.draft_hidden_states(read, tokens, everywhere, made.train_depths)
        best = [made.draft_logits(k + 1)(state).argmax(-1) for k, state in enumerate(states)]
        return torch.stack(best).view(-1, *tokens.shape)

    with torch.no_grad():
        base, adapted = likely(module.features(tokens)), likely(module.run_target(tokens))
    assert (base != adapted).any()
    expected = adapted if weight else base
    labels = expected.clone()
    labels[:, :, ::2] += 1
    labels[labels >= module.target.config.vocab_size] = IGNORED
    labels[:, 0, :5] = IGNORED
    monkeypatch.setattr(module, "labels", lambda *of: labels)
    hits, counts = module(**given, weight=weight)["hits"]
    assert counts.tolist() == (labels >= 0).flatten(1).sum(1).tolist()
    assert hits.tolist() == (labels == expected).flatten(1).sum(1).tolist()


def test_a_bar_shows_depth_1_within_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    bar: Any = Progress(Clock(100_000, None, 0.0), enabled=True)
    state: Any = type("State", (), {"global_step": 99_999, "is_world_process_zero": True})
    bar.on_train_begin(None, state, None)
    bar.bar.ncols = 79  # what is longer is cut off
    bar.bar.start_t -= 30 * 3600
    bar.clock.read(99_999, 0.0)
    bar.on_step_end(None, state, None)
    told = {"loss": 12.3456, "accuracy_by_depth_1": 0.4567, "accuracy_by_depth_2": 0.3}
    bar.on_log(None, state, None, logs=told)
    bar.on_log(None, state, None, logs={"eval_tau": 2.3456})
    bar.on_train_end(None, state, None)
    shown = capsys.readouterr().err.split("\r")[-1].strip()
    assert "step=99999, loss=12.346, top-1=0.457, τ=2.346" in shown and "0.3" not in shown
