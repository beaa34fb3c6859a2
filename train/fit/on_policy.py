"""On-policy text: the drafter's language model, the student, is trained on text that it writes.

Its loss there is the divergence from the target's distribution, so it also learns what to do after
its own mistakes, which the target's text does not contain (GKD, Agarwal et al. 2023, arXiv
2306.13649; DistillSpec, Zhou et al. 2023, arXiv 2310.08461). No gradient flows through sampling.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from headstart.heads import OptionError, TrainableDrafter, family
from headstart.heads.core import output_layer, row_seeds
from headstart.heads.families import with_article
from headstart.infer import Speculator

from ..data.batches import Batches, collate_texts
from ..data.training_rows import Row, Rows, check_context, ragged, write_rows
from ..recipe import Distill, OnPolicy, Recipe


def check_on_policy(recipe: Recipe) -> None:
    """Raise OptionError where a family writes no text, or the student's weights are sharded."""
    if recipe.train.on_policy is None:
        return
    if not family(recipe.drafter.family).writes_text:
        raise OptionError(
            "train.on_policy is set, but "
            f"{with_article(recipe.drafter.family)} drafter writes no text without "
            "the target; leave it out, or take a drafter that is a language model (draft_model)."
        )
    if is_deepspeed_zero3_enabled():
        raise OptionError(
            "train.on_policy is set under DeepSpeed ZeRO-3, whose processes must run the sharded "
            "student in step, while each writes texts of its own lengths; use ZeRO-2 or DDP."
        )


class StudentText:
    """The student's text, for the steps that are trained on it.

    Which steps these are, which prompts are continued and the sampling noise are drawn by (seed,
    step) for all processes together, so they depend neither on the number of processes nor on
    earlier steps. A step has as many texts as it would have rows. The text for the steps up to the
    next multiple of `spec.every`, or to the next checkpoint, is written at once. It is not saved,
    so a resumed run writes the same again.

    Args:
        drafter: bound; its `language_model` writes with its current weights.
        rows: the target's texts, whose prompts are continued.
        distill: how long rows are, and how many are written at once. DistillError is raised where
            the student's context is too short for them.
        batches: of this process, whose places its texts take.
    """

    def __init__(
        self,
        spec: OnPolicy,
        drafter: TrainableDrafter,
        rows: Rows,
        distill: Distill,
        args: TrainingArguments,
        batches: Batches,
    ):
        assert drafter.language_model is not None, "see check_on_policy"
        self.spec, self.rows, self.args, self.batches = spec, rows, args, batches
        limit = distill.row_tokens
        new = min(distill.new_tokens, limit - 1)
        # For a prompt; given ones may be longer, and their ends are continued.
        given = distill.writer == "given"
        self.room = limit - new if given else min(distill.prefix_tokens, limit - 1)
        new = min(new, limit - self.room)
        self.distill = replace(
            distill, temperature=spec.temperature, prefix_tokens=self.room, new_tokens=new,
            max_length=None,
        )  # fmt: skip
        self.student = drafter.language_model
        check_context(distill, self.student, "draft model")
        self.speculator = Speculator(self.student)
        # It ends where the target does, and uses no token that the target lacks.
        self.options: dict[str, Any] = {
            "eos_token_id": drafter.target.generation_config.eos_token_id  # type: ignore[union-attr]
        }
        known, own = drafter.config.vocab_size, output_layer(self.student).weight.shape[0]
        if own > known:
            self.options["suppress_tokens"] = list(range(known, own))
        self.written: dict[int, list[Row]] = {}  # by step

    def is_due(self, step: int) -> bool:
        """Whether the step after `step` steps is trained on the student's text."""
        return self._draw(step).random() < self.spec.lmbda

    def at(self, step: int) -> list[Row]:
        """This process's rows for the step after `step` steps."""
        if step not in self.written:
            self.written = self._write(step)
        return self.written.pop(step)

    def in_place_of(self, batches: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
        """The micro-batches of a step: as they are, or as many rows of the student's text."""
        if not self.is_due(step):
            return batches
        text, first, own = self.at(step), 0, []
        for batch in batches:
            part = slice(first, first := first + len(batch["tokens"]))
            own.append(collate_texts(text[part]))
        return own

    def _draw(self, step: int) -> random.Random:
        # A string seed is hashed, so that neighbouring steps draw independently.
        return random.Random(f"{self.args.seed}:{step}")

    def _write(self, step: int) -> dict[int, list[Row]]:
        """Rows of the due steps from `step` on, up to the next period or checkpoint."""
        periods = self.spec.every, int(self.args.save_steps)
        end = min(self.args.max_steps, *((step // period + 1) * period for period in periods))
        places = {due: self._places(due) for due in range(step, end) if self.is_due(due)}
        prompts = [prompt for due, own in places.items() for prompt in self._prompts(due, own)]
        was_training = self.student.training
        self.student.eval()
        spec, written = self.distill, []
        for first in range(0, len(prompts), spec.batch_size):
            prefixes, seeds = zip(*prompts[first : first + spec.batch_size], strict=True)
            text = write_rows(self.speculator, prefixes, list(seeds), spec, **self.options)
            written += ragged(*text, map(str, seeds))
        self.student.train(was_training)
        rows = iter(written)
        return {
            due: [_untaught(next(rows)) if place < 0 else next(rows) for place in own]
            for due, own in places.items()
        }

    def _places(self, step: int) -> list[int]:
        return self.batches.places(step % self.batches.steps).tolist()

    def _prompts(self, step: int, places: list[int]) -> list[tuple[Tensor, int]]:
        """The prompts [P] that are continued at places of a step, each with its noise's seed."""
        draw, total = self._draw(step), self.batches.step_size
        draw.random()  # whether the step is due
        rows = draw.choices(range(len(self.rows)), k=total)
        noise = row_seeds(draw.getrandbits(62), total).tolist()
        own = [max(place, ~place) for place in places]
        chosen, seeds = [rows[place] for place in own], [noise[place] for place in own]
        embedding: Any = self.student.get_input_embeddings()
        last = embedding.weight.shape[0] - 1
        texts = (self.rows.row(i).prompt()[-self.room :] for i in chosen)
        prompts = [torch.from_numpy(text.astype(np.int64)) for text in texts]
        return [(p.clamp(max=last), seed) for p, seed in zip(prompts, seeds, strict=True)]


def _untaught(row: Row) -> Row:
    return replace(row, supervised=np.zeros_like(row.supervised))
