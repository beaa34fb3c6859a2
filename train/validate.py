"""Validation by real decoding: τ on held-out prompts, and the tree that suits a drafter.

Checkpoints are chosen by τ from the same loop that users decode with, not by a training proxy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headstart.heads import Drafter
from headstart.infer import RULES, Speculator, StaticTree, Stats, parse_static
from headstart.infer.measure.greedy_text import BATCH, Written, write_texts
from headstart.infer.measure.ranks import best_tree, measure_ranks
from headstart.infer.trees.parse import sparse_nodes


def measure_tau(
    target: PreTrainedModel,
    drafter: Drafter,
    tree: StaticTree,
    rule: str,
    prompts: Sequence[Tensor],
    new_tokens: int,
    seed: int = 0,
) -> dict[str, Any]:
    """Decode prompts of equal length: `tau`, and `acceptance_by_depth`, None where none came.

    Rules that sample do so at temperature 1.
    """
    was_training = drafter.training
    drafter.eval()
    speculator = Speculator(target, drafter, tree=tree, rule=rule)
    stats = Stats(tree.max_depth)
    how: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
    if RULES[rule].samples:  # without the top-k of 50 that `generate` defaults to
        how |= {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": seed}
    for batch in torch.stack(list(prompts)).to(target.device).split(BATCH):
        speculator.generate(batch, attention_mask=torch.ones_like(batch), **how)
        stats.extend(speculator.stats)
    if speculator.target.tap is not None:
        speculator.target.tap.close()
    drafter.train(was_training)
    shares = [None if math.isnan(share) else share for share in stats.acceptance_by_depth]
    return {"tau": stats.tau if stats.rounds else 1.0, "acceptance_by_depth": shares}


class Validation:
    """Measures a drafter during training, always on the same prompts.

    Args:
        prompts: [P] each, of equal length.
        tree: what `parse_static` reads, or `sparse:N`: the best tree of N nodes for each drafter
            that is measured, see `sparse_nodes`.
        rule: one that follows a static tree.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        prompts: Sequence[Tensor],
        new_tokens: int,
        tree: str | Sequence[Sequence[int]],
        rule: str,
    ):
        self.target, self.prompts, self.new_tokens, self.rule = target, prompts, new_tokens, rule
        self.sparse = sparse_nodes(tree)
        self.tree = StaticTree([]) if self.sparse else parse_static(tree)
        self._texts: list[Written] | None = None

    def __call__(self, drafter: Drafter) -> dict[str, Any]:
        """`tau`, `acceptance_by_depth`, and `tree`, the rank paths it was measured with."""
        if self.sparse:
            # A target that is trained with its drafter does not write what it wrote before.
            if self._texts is None or drafter.adapter is not None:
                self._texts = write_texts(self.target, drafter, self.prompts, self.new_tokens)
            self.tree = StaticTree(best_tree(measure_ranks(drafter, self._texts), self.sparse))
        measured = measure_tau(
            self.target, drafter, self.tree, self.rule, self.prompts, self.new_tokens
        )
        return measured | {"tree": [list(path) for path in self.tree.paths]}
