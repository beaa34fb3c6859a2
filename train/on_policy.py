"""On-policy text: the student writes, and learns what the target would have said there.

A drafter is asked about texts that it has partly written itself. Text of the target alone never
shows it its own mistakes; text of its own does, and the divergence from the target's distribution
there is what it is corrected by (GKD, Agarwal et al. 2023, arXiv 2306.13649; DistillSpec, Zhou et
al. 2023, arXiv 2310.08461). No gradient runs through the drawing of the text.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from headstart.heads import OptionError, TrainableDrafter, family
from headstart.heads.core import output_layer, row_seeds
from headstart.infer import Speculator

from .data.continuations import check_context, write_rows
from .data.training_rows import Rows
from .recipe import Distill, OnPolicy, Recipe


def check_on_policy(recipe: Recipe) -> None:
    """Refuse on-policy text where it cannot be written.

    Raises:
        OptionError: drafters of the recipe's family write no text, or their weights are sharded.
    """
    if recipe.train.on_policy is None:
        return
    name = recipe.drafter.family
    if not family(name).writes_text:
        raise OptionError(
            f"train.on_policy is set, but a {name} drafter writes no text without the target; "
            "leave it out, or take a drafter that is a language model (draft_model)."
        )
    if is_deepspeed_zero3_enabled():
        raise OptionError(
            "train.on_policy is set under DeepSpeed ZeRO-3, whose processes must run the sharded "
            "student in step, while each writes texts of its own lengths; use ZeRO-2 or DDP."
        )


class StudentText:
    """The student's text, for the steps that learn from it.

    Which steps these are, which prompts are continued and with what noise is drawn by (seed, step),
    for all processes together, so it depends neither on their number nor on what was trained
    before. The text for the steps up to the next multiple of `spec.every` is written at once, and
    used once. A resumed run has no text, so none from before a checkpoint is used after it.

    Args:
        drafter: bound; its `writer` writes, with the weights that it then has.
        rows: what the target wrote, whose prompts are continued.
        distill: how long rows are, and how many are written at once.
        args: see `training_arguments`.

    Raises:
        DistillError: the student's context is too short for the rows.
    """

    def __init__(
        self,
        spec: OnPolicy,
        drafter: TrainableDrafter,
        rows: Rows,
        distill: Distill,
        args: TrainingArguments,
    ):
        assert drafter.language_model is not None, "see check_on_policy"
        self.spec, self.rows, self.args = spec, rows, args
        self.distill = replace(distill, temperature=spec.temperature)
        self.count = args.train_batch_size * args.gradient_accumulation_steps  # rows a step, here
        self.student = drafter.language_model
        check_context(distill, self.student, "draft model")
        self.speculator = Speculator(self.student)
        # It ends where the target does, and says nothing that the target has no logit for.
        self.options: dict[str, Any] = {
            "eos_token_id": drafter.target.generation_config.eos_token_id  # type: ignore[union-attr]
        }
        known, own = drafter.config.vocab_size, output_layer(self.student).weight.shape[0]
        if own > known:
            self.options["suppress_tokens"] = list(range(known, own))
        self.written: dict[int, Rows] = {}  # by step

    def is_due(self, step: int) -> bool:
        """Whether the step after `step` steps learns from the student's text."""
        return self._draw(step).random() < self.spec.lmbda

    def at(self, step: int) -> Rows:
        """This process's rows for the step after `step` steps."""
        if step not in self.written:
            self.written = self._write(step)
        return self.written.pop(step)

    def in_place_of(self, batches: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
        """The micro-batches of a step: as they are, or as many rows of the student's."""
        if not self.is_due(step):
            return batches
        text, first, own = self.at(step), 0, []
        for batch in batches:
            part = slice(first, first := first + len(batch["tokens"]))
            tokens, supervised = text.tokens[part].long(), text.written[part]
            own.append({"rows": None, "tokens": tokens, "supervised": supervised})
        return own

    def _draw(self, step: int) -> random.Random:
        # Text is hashed, so that neighbours have nothing in common.
        return random.Random(f"{self.args.seed}:{step}")

    def _write(self, step: int) -> dict[int, Rows]:
        """Rows for the steps from `step` on that learn from the student."""
        periods = self.spec.every, int(self.args.save_steps)
        end = min(self.args.max_steps, *((step // period + 1) * period for period in periods))
        steps = [due for due in range(step, end) if self.is_due(due)]
        prefixes, seeds = [], []
        for due in steps:
            some, noise = self._prompts(due)
            prefixes += some
            seeds += noise
        was_training = self.student.training
        self.student.eval()
        parts = [
            write_rows(self.speculator, prefixes[at], seeds[at], self.distill, **self.options)
            for at in _slices(len(prefixes), self.distill.batch_size)
        ]
        self.student.train(was_training)
        columns = [torch.cat(column) for column in zip(*parts, strict=True)]
        each = zip(*(column.split(self.count) for column in columns), strict=True)
        return {due: Rows(*row) for due, row in zip(steps, each, strict=True)}

    def _prompts(self, step: int) -> tuple[list[Tensor], list[int]]:
        """What this process continues at a step, and its noise."""
        draw = self._draw(step)
        draw.random()  # whether the step is due
        total = self.args.world_size * self.count
        chosen = draw.choices(range(len(self.rows)), k=total)
        seeds = row_seeds(draw.getrandbits(62), total).tolist()
        first = self.args.process_index * self.count
        own = slice(first, first + self.count)
        embedding: Any = self.student.get_input_embeddings()
        last = embedding.weight.shape[0] - 1
        prompts = [self.rows.tokens[i, : self.rows.prompt_lengths[i]].long() for i in chosen[own]]
        return [prompt.clamp(max=last) for prompt in prompts], seeds[own]


def _slices(count: int, size: int) -> list[slice]:
    return [slice(first, first + size) for first in range(0, count, size)]
