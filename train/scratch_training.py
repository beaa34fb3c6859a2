"""Trains a scratch target within a budget of time or tokens, with Muon and AdamW.

The learning rate follows the share of the budget that is used, so a slower machine sees fewer
tokens and still ends at a learning rate of zero.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm
from transformers import LlamaForCausalLM

from .recipe import Scratch

_BAR = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


class TargetError(ValueError):
    """A scratch target that cannot be trained as asked."""


def fit(
    model: LlamaForCausalLM, tokens: Tensor, spec: Scratch, seed: int, progress: bool
) -> dict[str, Any]:
    """Train in place on a corpus `tokens` [T]; returns tokens, steps, seconds and train_loss.

    Stops at whichever comes first of `max_seconds` and `max_tokens`. Where there is a GPU, products
    are computed in bfloat16; weights and the optimizers' state stay float32. Raises TargetError.
    """
    length = spec.sequence_length
    if len(tokens) <= length:
        raise TargetError(
            f"the corpus has {len(tokens)} tokens, expected more than "
            f"target.scratch.sequence_length, {length}; use more text or a shorter sequence"
        )
    optimizers = _optimizers(model, spec)
    rows = Rows(tokens, length, seed)
    clock = Clock(spec.max_seconds, spec.max_tokens, spec.batch_size * length, time.perf_counter())
    losses: list[float] = []
    model.train()
    bar = tqdm(total=1.0, desc="target", disable=not progress, bar_format=_BAR)
    # At least one step, then none that would end past the budget.
    while not losses or clock.share(steps_ahead=1.0) <= 1.0:
        batch = rows.take(spec.batch_size).to(model.device)  # [B, T + 1]
        scale = schedule(clock.share(steps_ahead=0.5), spec.warmup_ratio)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * scale
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
            logits = model(batch[:, :-1], use_cache=False).logits  # [B, T, V]
            loss = next_token_loss(logits, batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        clock.steps += 1
        losses.append(loss.item())
        bar.set_postfix_str(f"loss {sum(losses[-20:]) / len(losses[-20:]):.3f}", refresh=False)
        bar.update(min(clock.share(), 1.0) - bar.n)
    bar.close()
    return {
        "tokens": clock.steps * clock.step_tokens,
        "steps": clock.steps,
        "seconds": time.perf_counter() - clock.started,
        "train_loss": sum(losses[-20:]) / len(losses[-20:]),
    }


@dataclass
class Clock:
    """How far training is, in time and tokens; a step counts as done once it has ended."""

    max_seconds: float | None
    max_tokens: int | None
    step_tokens: int
    started: float
    steps: int = 0

    def share(self, steps_ahead: float = 0.0) -> float:
        """Elapsed share of the budget, `steps_ahead` steps of average length from now."""
        shares = [0.0]
        if self.max_seconds is not None:
            elapsed = time.perf_counter() - self.started
            ahead = steps_ahead * elapsed / max(self.steps, 1)
            shares.append((elapsed + ahead) / self.max_seconds)
        if self.max_tokens is not None:
            shares.append((self.steps + steps_ahead) * self.step_tokens / self.max_tokens)
        return max(shares)


def _optimizers(model: LlamaForCausalLM, spec: Scratch) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between the layers, AdamW for embedding, norms and output layer.

    Muon (Jordan et al. 2024) orthogonalises each matrix's momentum; it is not meant for the
    embedding and the output layer, whose rows are tokens.
    """
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    inside = {id(p) for p in hidden}
    others = [p for p in model.parameters() if id(p) not in inside]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(hidden, lr=spec.muon_lr, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(others, lr=spec.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def schedule(share: float, warmup: float) -> float:
    """Learning-rate factor after `share` of the budget: a linear rise, then linearly to zero."""
    if share < warmup:
        return share / warmup
    return max(0.0, (1.0 - share) / (1.0 - warmup))


class Rows:
    """Rows of `length + 1` tokens without overlap of inputs, shuffled anew in every epoch."""

    def __init__(self, tokens: Tensor, length: int, seed: int) -> None:
        self.tokens, self.length = tokens, length
        self.generator = torch.Generator().manual_seed(seed)
        self.starts: list[int] = []

    def take(self, count: int) -> Tensor:
        """The next rows.  # [B, T + 1]"""
        rows = []
        for _ in range(count):
            if not self.starts:
                self._shuffle()
            start = self.starts.pop()
            rows.append(self.tokens[start : start + self.length + 1])
        return torch.stack(rows)

    def _shuffle(self) -> None:
        # A random offset, so that the rows of the next epoch are cut at other places.
        spare = (len(self.tokens) - 1) % self.length
        offset = int(torch.randint(spare + 1, (), generator=self.generator))
        count = (len(self.tokens) - 1 - offset) // self.length
        order = torch.randperm(count, generator=self.generator)
        self.starts = [offset + int(i) * self.length for i in order]


def next_token_loss(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    #  inputs  x0 x1 x2 …
    #  labels  x1 x2 x3 …      the row has one token more than the inputs
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)
