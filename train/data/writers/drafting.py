"""Which speculator writes: the target alone, or sped up by a drafter where that is faster.

The text is the target's own either way: greedily, or by the noise that `coupled` shares. Only where
two tokens score alike up to rounding may the other one be taken; such near-ties are counted.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headstart.heads import Sampling
from headstart.heads.artifacts.source import DrafterSource, SourceKind
from headstart.heads.core import Before, gumbel
from headstart.heads.core.files import write_atomically
from headstart.infer import Speculator, load
from headstart.infer.rules.rule_api import seen_in
from headstart.infer.stream import stream_processors

from ...processes.agreement import from_process_0, is_process_0
from ...recipe import Distill
from ..prefixes import DistillError
from ..training_rows import Row, write_rows
from .units import Counts, Written

logger = logging.getLogger(__name__)

CHOICE = "drafting.json"
_TRIAL_TOKENS = 32  # new tokens of each row in a trial
_NUMBERS = 1 << 24  # random ones that are drawn at once


def drafter_source(name: str) -> DrafterSource:
    """The drafter `distill.drafter`. Raises as `Drafting` does, for what its files show."""
    source = DrafterSource(name)
    if source.kind is SourceKind.ARTIFACT and source.manifest.adapter_sha256:
        raise DistillError(
            f"distill.drafter {name} changes the target by an adapter, and rows "
            "are the text of the target as it is; take another drafter, or null."
        )
    return source


class Drafting:
    """The speculator that writes, chosen once for all processes and for every resumed run.

    Args:
        folder: the stage's; the choice is kept in its `drafting.json`.

    Raises:
        ArtifactError: the drafter is damaged, or was trained for another target.
        DistillError: it comes with an adapter of the target.
    """

    def __init__(
        self,
        spec: Distill,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        folder: Path,
    ):
        self.spec, self.model, self.choice = spec, model, folder / CHOICE
        self.speculator = Speculator(model)
        self.used = False
        self._drafted = None
        if spec.drafter is not None:
            self._drafted = load(model, drafter_source(spec.drafter), tokenizer=tokenizer)

    def choose(self, prompts: Sequence[Tensor]) -> None:
        """Decide by a trial on these prompts [P], or as it was decided; all processes must call.

        What was decided of another drafter, or by a trial that is no longer asked for, is decided
        anew.
        """
        if self._drafted is None:
            return
        if is_process_0() and not self._decided():
            trial: dict[str, Any] = {"drafter": self.spec.drafter, "used": True}
            if self.spec.use_drafter == "where_faster":
                trial |= self._trial(prompts)
            write_atomically(self.choice, json.dumps(trial, indent=2) + "\n")
            logger.info("distill: %s", json.dumps(trial))
        self.used = from_process_0(
            json.loads(self.choice.read_text())["used"] if is_process_0() else None
        )
        if self.used:
            self.speculator = self._drafted

    def _decided(self) -> bool:
        if not self.choice.exists():
            return False
        known = json.loads(self.choice.read_text())
        tried = self.spec.use_drafter == "where_faster"
        return known["drafter"] == self.spec.drafter and (tried or known["used"])

    def _trial(self, prompts: Sequence[Tensor]) -> dict[str, Any]:
        """Tokens a second with the drafter and without, the better of two runs each, in turns."""
        assert self._drafted is not None
        prompts = prompts[: self.spec.batch_size]
        new = min(self.spec.new_tokens, _TRIAL_TOKENS)
        shape = self.spec_for(prompts, new)
        speeds = {"plain": 0.0, "drafted": 0.0}
        each = {"plain": self.speculator, "drafted": self._drafted}
        for speculator in each.values():
            write_rows(speculator, prompts, list(range(len(prompts))), self.spec_for(prompts, 4))
        for name in [*each, *each]:
            begun = time.perf_counter()
            _, lengths, counts = write_rows(each[name], prompts, list(range(len(prompts))), shape)
            speed = int((lengths - counts).sum()) / (time.perf_counter() - begun)
            speeds[name] = max(speeds[name], round(speed, 1))
        return {
            "used": speeds["drafted"] > speeds["plain"],
            "batch": len(prompts),
            "tokens_per_second": speeds,
        }

    def spec_for(self, prompts: Sequence[Tensor], new_tokens: int) -> Distill:
        """The spec for prompts of these lengths and so many new tokens."""
        longest = max(len(prompt) for prompt in prompts)
        return dataclasses.replace(self.spec, prefix_tokens=longest, new_tokens=new_tokens)

    def checked(self, written: Written, seeds: Sequence[np.ndarray]) -> Written:
        """The same, with the near-ties counted where the rows were written with the drafter.

        They are the tokens that one plain forward puts second, see `second_best`. A warning is
        logged where one of them is no near-tie.

        Args:
            seeds: of each row, the seed of each of its tokens' noise [L], where text is sampled.
        """
        if not self.used:
            return written
        found = 0
        for row, noise in zip(written.rows, seeds, strict=True):
            gaps, rounding = second_best(self.model, row, self.spec.temperature, noise)
            found += len(gaps)
            far = int((gaps > 2 * rounding).sum())
            if far:
                logger.warning(
                    "distill: %d tokens of row %s are not what the target writes (by %.2g in a "
                    "logit, where its own forwards differ by %.2g)",
                    far, row.id, float(gaps.max()), rounding,
                )  # fmt: skip
        return Written(written.rows, written.counts + Counts(near_ties=found))


@torch.no_grad()
def second_best(
    model: PreTrainedModel, row: Row, temperature: float = 0.0, seeds: np.ndarray | None = None
) -> tuple[Tensor, float]:
    """How far each supervised token lies below the best one, where another one is best.

    Scores are processed as they were when the row was written, see `stream_processors`.

    Args:
        seeds: [L], see `Drafting.checked`; read where the temperature is not 0.

    Returns:
        Differences of scores [n], over the temperature if there is one, and the noise: how much
        those of this row differ between a forward of the row alone and one in a batch of two, or by
        one rounding if that is more.
    """
    tokens = torch.tensor(row.tokens, dtype=torch.long, device=model.device)
    places = torch.tensor(row.supervised, device=model.device).nonzero().flatten()
    places = places[places > 0]
    logits = model(tokens.unsqueeze(0), use_cache=False).logits[0, places - 1].float()
    processors = stream_processors(model, temperature, tokens.device)
    sampling = Sampling(None, processors)
    vocabulary, gaps = logits.shape[1], []
    for part in torch.arange(len(places)).split(max(_NUMBERS // vocabulary, 1)):
        at, before = places[part].unsqueeze(1), Before()  # [n, 1]
        if not sampling.rowwise:
            texts = tokens.expand(len(at), -1)
            later = torch.arange(len(tokens), device=model.device) >= at
            seen = seen_in(texts.masked_fill(later, vocabulary), vocabulary)
            before = Before(seen[:, :vocabulary], texts, at)
        scores = sampling.process_each(logits[part], before)  # [n, V]
        if temperature:
            keys = torch.as_tensor(seeds, device=model.device)[at[:, 0]]
            names = torch.arange(vocabulary, device=model.device)
            scores = scores.double() + gumbel(keys, at, names)[:, 0]
        gaps.append(_below_best(scores, tokens[at[:, 0]]))
    below = torch.cat(gaps)
    wrong = below > 0
    if not bool(wrong.any()):
        return below[wrong], 0.0
    other = model(tokens.expand(2, -1), use_cache=False).logits[0, places - 1].float()
    rounding = float(logits.abs().max()) * torch.finfo(model.dtype).eps
    found = max(float((logits - other).abs().max()), rounding) / (temperature or 1.0)
    penalty: float = getattr(model.generation_config, "repetition_penalty", None) or 1.0
    return below[wrong], found * max(penalty, 1 / penalty)


def _below_best(scores: Tensor, tokens: Tensor) -> Tensor:
    """How far tokens [n] lie below the best of scores [n, V]: [n]."""
    return scores.max(-1).values - scores.gather(1, tokens.unsqueeze(1))[:, 0]
