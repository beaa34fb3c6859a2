"""Validation by real decoding: τ on held-out prompts, and the tree that suits a drafter.

Checkpoints are chosen by τ from the same loop that users decode with, not by a training proxy.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headstart.heads import Drafter
from headstart.infer import RULES, Speculator, StaticTree, Stats, parse_static
from headstart.infer.measure.ranks import Written, best_tree, measure_ranks, write_texts
from headstart.infer.trees.parse import sparse_nodes

from .data.corpus import Document
from .data.prefixes import Windows

_BATCH = 32  # prompts decoded at once


class ValidationError(ValueError):
    """Prompts or a tree that cannot be made as asked."""


def held_out_prompts(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    count: int,
    prefix_tokens: int,
    seed: int = 0,
    part: Literal["bench", "validation"] = "bench",
) -> list[Tensor]:
    """`count` prompts of `prefix_tokens` tokens each, [P] int64, from held-out documents.

    Deterministic in (seed, documents). Every third document, in the order of a hash, serves
    validation and the others the benchmark, so what chooses a checkpoint or a tree is not what
    judges it. A document gives windows that do not overlap, the documents take turns.

    Raises:
        ValidationError: the documents are too few or too short.
    """
    prompts = _windows(tokenizer, documents, prefix_tokens, seed, part)
    if len(prompts) < count:
        raise ValidationError(
            f"the held-out documents give {len(prompts)} {part} prompts of {prefix_tokens} tokens, "
            f"expected {count}; raise corpus.held_out or corpus.max_bytes, or use shorter prompts."
        )
    return prompts[:count]


def held_out_texts(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    tokens: int,
    seed: int = 0,
    most: int = 512,
) -> list[Tensor]:
    """At most `most` texts of `tokens` tokens each, [P] int64, which chose no checkpoint.

    They are those that `held_out_prompts` gives the benchmark, and more.
    """
    return _windows(tokenizer, documents, tokens, seed, "bench")[:most]


def _windows(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    prefix_tokens: int,
    seed: int,
    part: str,
) -> list[Tensor]:
    """See `held_out_prompts`: all that there are."""

    def order(name: str) -> bytes:
        return hashlib.sha256(f"{seed}:{name}".encode("utf-8", "surrogateescape")).digest()

    usable = []
    for document in sorted(documents, key=lambda document: order(document.id)):
        windows = Windows(tokenizer, [document], prefix_tokens)
        starts = range(0, len(windows), prefix_tokens)
        if starts:
            names = {start: order(f"{document.id}:{start}") for start in starts}
            usable.append([windows[start] for start in sorted(starts, key=names.__getitem__)])
    mine = usable[::3] if part == "validation" else [d for i, d in enumerate(usable) if i % 3]
    turns = itertools.zip_longest(*mine)
    return [prompt for turn in turns for prompt in turn if prompt is not None]


def measure_tau(
    target: PreTrainedModel,
    drafter: Drafter,
    tree: StaticTree,
    rule: str,
    prompts: Sequence[Tensor],
    new_tokens: int,
    seed: int = 0,
) -> dict[str, Any]:
    """Decode prompts of equal length with the real loop: `tau` and `acceptance_by_depth`.

    The rule `greedy` decodes greedily, the others sample at temperature 1, seeded. A depth that was
    never reached has no acceptance: None.
    """
    was_training = drafter.training
    drafter.eval()
    speculator = Speculator(target, drafter, tree=tree, rule=rule)
    stats = Stats(tree.max_depth)
    for batch in torch.stack(list(prompts)).to(target.device).split(_BATCH):
        sampling: dict[str, Any] = {"do_sample": False}
        if RULES[rule].samples:  # plain sampling: generate's default top-k of 50 is not asked for
            sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": seed}
        speculator.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=new_tokens,
            **sampling,
        )
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
        new_tokens: tokens written after each.
        tree: what `parse_static` reads, or `sparse:N` for the drafter at hand on these prompts, see
            `sparse_nodes`.
        rule: `greedy`, `match` or `coupled`.
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
            self.tree = StaticTree(best_tree(self.ranks(drafter), self.sparse))
        measured = measure_tau(
            self.target, drafter, self.tree, self.rule, self.prompts, self.new_tokens
        )
        return measured | {"tree": [list(path) for path in self.tree.paths]}

    def ranks(self, drafter: Drafter) -> list[Tensor]:
        """See `measure_ranks`; the text of a target that stays as it is is written once."""
        if self._texts is None or drafter.adapter is not None:
            self._texts = write_texts(self.target, drafter, self.prompts, self.new_tokens)
        return measure_ranks(drafter, self._texts)
