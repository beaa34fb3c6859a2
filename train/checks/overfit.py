"""The overfit gate: a drafter that cannot learn one text by heart has a fault in its training."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.heads.core import capture
from headstart.infer.measure.own_text import Written
from headstart.infer.measure.ranks import MISSED, measure_ranks, replay

from ..data.training_rows import Row, Rows
from ..fit.target_with_drafter import TargetWithDrafter
from .alignment import batch_of
from .findings import Finding

_STEPS = 150
_RATES = (1e-2, 2e-3, 3e-4)  # tried in turn: what suits a head is too much for a whole model
_ENOUGH = 0.8  # of the tokens a round that are possible on the text


@dataclass(frozen=True)
class Sample:
    """The text to be learnt, as the rows that a drafter's first weights may depend on."""

    tokens: Tensor  # [T]

    def token_counts(self, vocab_size: int) -> Tensor:
        """[V]"""
        return torch.bincount(self.tokens.cpu(), minlength=vocab_size)


def learns_by_heart(module: TargetWithDrafter, text: Written) -> Finding:
    """Train the module's drafter on one text, with hard labels, until it drafts nearly all of it.

    The drafts are judged by the calls that decoding makes, so a drafter that was trained for other
    positions than it is asked for fails too. Hard labels, since a soft loss on text that surprises
    the target itself has no such bound. Its weights are then those that were learnt.

    Args:
        module: with the loss `cross_entropy`.
    """
    tokens, supervised = batch_of([text])
    # The features are the same in each step.
    rows = Rows.of([Row("", tokens[0].int().cpu().numpy(), supervised[0].cpu().numpy())])
    module.fill_cache(rows, math.inf)
    number = torch.zeros(1, dtype=torch.int64, device=tokens.device)
    drafter, started = module.drafter, time.perf_counter()
    first = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    best = 0.0, 0.0
    for rate in _RATES:
        drafter.load_state_dict(first)
        parameters = [p for p in drafter.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, rate, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=_STEPS)
        module.train()
        for _ in range(_STEPS):
            loss = module(number, tokens, supervised)["loss"]
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
        module.eval()
        best = max(best, _drafted(module, text))
        if best[0] >= _ENOUGH * best[1]:
            break
    seconds = time.perf_counter() - started
    said = (
        f"{best[0]:.2f} of {best[1]:.2f} tokens per round on one text, after {_STEPS} steps in "
        f"{seconds:.0f} s"
    )
    fine = best[0] >= _ENOUGH * best[1]
    return Finding("learns one text", fine, said if fine else f"{said}: it does not learn the text")


@torch.no_grad()
def _drafted(module: TargetWithDrafter, text: Written) -> tuple[float, float]:
    """Tokens a round of a chain on its own text, and with a drafter that is always right."""
    drafter = module.drafter
    features = capture(module.target, drafter.config.feature_layers, text.tokens[None])[0]
    depth = drafter.train_depths if drafter.max_depth else 4
    (ranks,) = measure_ranks(drafter, [Written(text.tokens, features, text.prompt)], depth)
    rounds, columns = map(torch.arange, ranks.shape)
    late = rounds.unsqueeze(1) + columns >= len(rounds)
    right = torch.zeros_like(ranks).masked_fill(late, MISSED)
    paths = [[0] * k for k in range(1, depth + 1)]
    return replay([ranks], paths).tau, replay([right], paths).tau
