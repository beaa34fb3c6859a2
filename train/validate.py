"""Validation by real decoding: τ on held-out prompts, and the tree that suits a drafter.

Checkpoints are chosen by τ from the same loop that users decode with, not by a training proxy.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headstart.heads import Drafter
from headstart.heads.core import FeatureTap
from headstart.infer import Speculator, StaticTree, Stats

from .corpus import Document
from .distill import Windows, true_lengths
from .losses import IGNORED, IndependentHeads, head_labels

_BATCH = 32  # prompts decoded at once
_RANKS = 10  # deeper ranks are never worth a node, and few prompts would overrate them


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
    prompts = [prompt for turn in turns for prompt in turn if prompt is not None]
    if len(prompts) < count:
        raise ValidationError(
            f"the held-out documents give {len(prompts)} {part} prompts of {prefix_tokens} tokens, "
            f"expected {count}; raise corpus.held_out or corpus.max_bytes, or use shorter prompts."
        )
    return prompts[:count]


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
        if rule != "greedy":  # plain sampling: generate's default top-k of 50 is not asked for
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
        tree: what `StaticTree.parse` reads, or `sparse:N`: the best tree of N nodes, the root
            counted, for the drafter at hand on these prompts (see `best_tree`).
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
        self.sparse = _sparse_nodes(tree)
        self.tree = StaticTree([]) if self.sparse else StaticTree.parse(tree)
        self._text: list[tuple[Tensor, Tensor]] | None = None

    def __call__(self, drafter: Drafter) -> dict[str, Any]:
        """`tau`, `acceptance_by_depth`, and `tree`, the rank paths it was measured with."""
        if self.sparse:
            self.tree = StaticTree(best_tree(self.ranks(drafter), self.sparse))
        measured = measure_tau(
            self.target, drafter, self.tree, self.rule, self.prompts, self.new_tokens
        )
        return measured | {"tree": [list(path) for path in self.tree.paths]}

    def ranks(self, drafter: Drafter) -> list[Tensor]:
        """See `measure_ranks`; the target's text is written once and kept."""
        if self._text is None:
            self._text = write_text(self.target, drafter, self.prompts, self.new_tokens)
        prefix = self.prompts[0].shape[0]
        assert drafter.independent
        heads = cast(IndependentHeads, drafter)
        return [measure_ranks(heads, *row, prefix) for row in self._text]


@torch.no_grad()
def write_text(
    target: PreTrainedModel, drafter: Drafter, prompts: Sequence[Tensor], new_tokens: int
) -> list[tuple[Tensor, Tensor]]:
    """The target's greedy continuations and what the drafter reads of them.

    Returns:
        For each prompt, tokens [T] int64, the prompt included, and features [T, F].
    """
    plain = Speculator(target)
    tap = FeatureTap(target, drafter.config.feature_layers)
    rows = []
    for batch in torch.stack(list(prompts)).to(target.device).split(_BATCH):
        text = plain.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=new_tokens,
            do_sample=False,
        )
        target.get_decoder()(input_ids=text, use_cache=False)
        lengths = true_lengths(text, target, batch.shape[1]).tolist()
        each = zip(text, tap.take(), lengths, strict=True)
        rows += [(tokens[:length], features[:length]) for tokens, features, length in each]
    tap.close()
    return rows


@torch.no_grad()
def measure_ranks(
    drafter: IndependentHeads, tokens: Tensor, features: Tensor, prefix: int
) -> Tensor:
    """At which rank each head's list holds the token that the target went on to write.

    Args:
        tokens: [T]; features: [T, F]; see `write_text`.
        prefix: tokens that are prompt; ranks start at the position before the last of them, whose
            own next token is the first written one.

    Returns:
        [M, K] int64; entry (i, k - 1) belongs to position prefix - 1 + i, and is Vd where a
        trimmed vocabulary lacks the token.
    """
    heads = drafter.max_depth
    first, last = prefix - 1, len(tokens) - heads - 1
    if last <= first:
        return torch.empty(0, heads, dtype=torch.long)
    everything = torch.ones_like(tokens, dtype=torch.bool)[None]
    labels = head_labels(tokens[None], everything, heads, drafter.draft_vocabulary)  # [K, 1, T]
    ranks = []
    for head, state in enumerate(drafter.states(features[first:last])):
        logits = drafter.logits(state, head=head).float()  # [M, Vd]
        wanted = labels[head, 0, first:last].unsqueeze(1)  # [M, 1]
        better = (logits > logits.gather(1, wanted.clamp(min=0))).sum(1)
        ranks.append(better.masked_fill(wanted.squeeze(1) == IGNORED, logits.shape[1]))
    return torch.stack(ranks, 1).cpu()  # [M, K]


def best_tree(ranks: Sequence[Tensor], nodes: int, passes: int = 4) -> list[list[int]]:
    """The static tree of `nodes` nodes, the root counted, that accepts most (Medusa's sparse tree).

    A position accepts the node of rank path (r1 … rd) when the true tokens stand at just those
    ranks, so the tokens that a tree accepts are a sum over its nodes of how often each path occurs,
    and the most frequent paths make the best tree; a path is never more frequent than its prefix.
    Medusa multiplies the heads' accuracies instead, as if the heads erred independently. Only
    positions at which a round starts count, and these depend on the tree: it is found by walking
    the rows with the previous tree, from the tree for all positions on, and the best one is kept.

    Args:
        ranks: [M, K] for each text, see `measure_ranks`.

    Returns:
        Rank paths, most frequent first.

    >>> best_tree([torch.tensor([[0, 0], [0, 1], [0, 0], [1, 0]])], nodes=3, passes=1)
    [[0], [0, 0]]
    """
    rows = [[tuple(position) for position in row.tolist()] for row in ranks]
    starts = [position for row in rows for position in row]
    best: tuple[float, list[list[int]]] = (0.0, [])
    for _ in range(passes):
        counts: Counter[tuple[int, ...]] = Counter()
        for position in starts:
            likely = itertools.takewhile(lambda rank: rank < _RANKS, position)
            counts.update(itertools.accumulate((rank,) for rank in likely))
        # Shorter first among equals, so that every path comes after its prefixes.
        order = sorted(counts, key=lambda path: (-counts[path], len(path), path))
        paths = {path for path in order[: nodes - 1]}
        starts, emitted = [], 0
        for row in rows:
            at = 0
            while at < len(row):
                starts.append(row[at])
                depth = 0
                while depth < len(row[at]) and row[at][: depth + 1] in paths:
                    depth += 1
                at += depth + 1
                emitted += depth + 1
        if starts and emitted / len(starts) > best[0]:
            best = emitted / len(starts), [list(path) for path in order[: nodes - 1]]
    return best[1]


def _sparse_nodes(tree: str | Sequence[Sequence[int]]) -> int | None:
    """N of `sparse:N`, None for any other tree."""
    if not isinstance(tree, str) or not tree.startswith("sparse:"):
        return None
    argument = tree.partition(":")[2]
    if not argument.isdigit() or int(argument) < 2:
        raise ValidationError(
            f"decode.tree is {tree!r}; expected sparse:N with N nodes, at least 2 with the root."
        )
    return int(argument)
