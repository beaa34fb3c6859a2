"""Validation by real decoding: τ on held-out prompts, and the tree that suits a drafter.

Checkpoints are chosen by τ from the same loop that users decode with, not by a training proxy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from headstart.heads import Drafter
from headstart.heads.core import in_shards, row_seeds
from headstart.infer import RULES, Speculator, StaticTree, Stats, parse_static
from headstart.infer.generate_options import whole_distribution
from headstart.infer.measure.bench import SHOWN, SHOWN_BEFORE
from headstart.infer.measure.own_text import BATCH, Written, write_texts
from headstart.infer.measure.progress import progress_bar
from headstart.infer.measure.ranks import best_tree, measure_ranks, path_shares, replay
from headstart.infer.rules.registry import GREEDY, find_rule
from headstart.infer.trees.texts import sparse_nodes

from ..data.held_out import HeldOutPrompt
from ..processes.agreement import from_each, in_parallel, in_turn, own_share

Prompts = Sequence[HeldOutPrompt] | Sequence[Tensor]
"""Prompts of any lengths; tensors [P] count as prompts of different documents."""

AS_IT_IS = {"temperature": 1.0}
"""Sampling from the target's own distribution."""


def measure_tau(
    target: PreTrainedModel,
    drafter: Drafter,
    tree: StaticTree,
    rule: str,
    prompts: Prompts,
    new_tokens: int,
    seed: int = 0,
    divided: bool = False,
    sampling: Mapping[str, Any] = AS_IT_IS,
) -> dict[str, Any]:
    """Decode prompts: what `tau_of` says, and what `decode_prompts` tells."""
    given = _held_out(prompts)
    how = (new_tokens, seed, divided, sampling)
    counts, told = decode_prompts(target, drafter, tree, rule, given, *how)
    return tau_of(given, counts) | told


def decode_prompts(
    target: PreTrainedModel,
    drafter: Drafter,
    tree: StaticTree,
    rule: str,
    given: Sequence[HeldOutPrompt],
    new_tokens: int,
    seed: int = 0,
    divided: bool = False,
    sampling: Mapping[str, Any] = AS_IT_IS,
) -> tuple[np.ndarray, dict[str, Any]]:
    """Decode prompts in batches, padded on the left; any drafter gives an exact rule's one text.

    Args:
        divided: each process decodes its share of the prompts, and all return the same; else each
            decodes all of them.
        sampling: options of `generate` for rules that sample, from all tokens but for these.

    Returns:
        The tokens and rounds of each prompt, [n, 2]; and `acceptance_by_depth`, None where none
        came, and `samples`: of the first prompts of different documents their last tokens,
        `prompt`, what was written, `ids`, and of each round the tokens that it emitted and the
        nodes of its accepted path, `rounds`.
    """
    was_training = drafter.training
    drafter.eval()
    speculator = Speculator(target, drafter, tree=tree, rule=rule)
    speculator.remembers = False  # other trees decode the same prompts
    own_stats = Stats(tree.max_depth)
    how: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
    if RULES[rule].samples:
        how |= {"do_sample": True, **whole_distribution(target), **sampling}
    seeds = row_seeds(seed, len(given)).tolist()
    firsts = {prompt.document: number for number, prompt in reversed([*enumerate(given)])}
    shown: dict[int, dict[str, Any]] = {key: {} for key in sorted(firsts.values())[:SHOWN]}
    counts = np.zeros((len(given), 2), dtype=int)  # tokens and rounds of each prompt
    # Prompts of about the same length go together, so that little is padding.
    by_length = sorted(range(len(given)), key=lambda i: len(given[i].tokens))
    decoded = own_share(by_length) if divided else by_length
    for first in range(0, len(decoded), BATCH):
        own = decoded[first : first + BATCH]
        rows = [given[i].tokens for i in own]
        ids, mask = (
            pad_sequence(each, batch_first=True, padding_side="left").to(target.device)
            for each in (rows, [torch.ones_like(row) for row in rows])
        )
        sampled = {"seed": [seeds[i] for i in own]} if RULES[rule].samples else {}
        text = speculator.generate(ids, attention_mask=mask, **how, **sampled)
        emitted = speculator.stats.counts.reshape(-1, len(own))  # [rounds, B]
        counts[own] = np.stack([emitted.sum(0), (emitted > 0).sum(0)], 1)
        for row, number in enumerate(own):
            if number in shown:
                rounds = speculator.stats.rounds_of(row)
                new = text[row, ids.shape[1] :].tolist()[: 1 + sum(count for count, _ in rounds)]
                before = given[number].tokens[-SHOWN_BEFORE:].tolist()
                shown[number] = {
                    "source": given[number].source, "prompt": before, "ids": new, "rounds": rounds
                }  # fmt: skip
        own_stats.extend(speculator.stats)
    stats, found = Stats(tree.max_depth), (decoded, counts[decoded], own_stats, shown)
    for theirs, counted, rounds, texts in from_each(found) if divided else [found]:
        counts[theirs] = counted
        stats.extend(rounds)
        shown |= {number: text for number, text in texts.items() if text}
    if speculator.target.tap is not None:
        speculator.target.tap.close()
    drafter.train(was_training)
    shares = [None if math.isnan(share) else share for share in stats.acceptance_by_depth]
    return counts, {"acceptance_by_depth": shares, "samples": list(shown.values())}


def tau_table(
    target: PreTrainedModel,
    drafter: Drafter,
    tree: StaticTree,
    prompts: Prompts,
    new_tokens: int,
    chains: Sequence[int] = (1, 2, 4, 8),
) -> list[dict[str, Any]]:
    """τ with chains of several lengths and with a tree, at temperature 0 and 1.

    At temperature 0 the target's greedy text is written once, and each tree's rounds are counted
    along it (see `replay`), unless the drafter observes. Then each tree decodes, as it does at 1,
    by the rule `coupled`.

    Returns:
        For each `tree`, `nodes`, `temperature`, `tau`, `tau_se`, `tau_by_source` and `rounds` of
        `tau_of`, and `acceptance_by_depth`.
    """
    given, most = _held_out(prompts), drafter.max_depth or max(chains)
    lengths = [length for length in chains if length <= most] or [most]
    trees = [parse_static(f"chain:{length}") for length in lengths]
    if tree.nodes > 1 and str(tree) not in map(str, trees):
        trees.append(tree)
    found = []
    bar = progress_bar(2 * len(trees), "heads: τ by tree", unit="figure")
    greedily = _greedy_taus(target, drafter, trees, given, new_tokens)
    for each, measured in zip(trees, greedily, strict=True):
        found.append(_named(each, 0, measured))
        bar.update(1)
    for each in trees:
        measured = measure_tau(target, drafter, each, find_rule(None).name, given, new_tokens)
        found.append(_named(each, 1, measured))
        bar.update(1)
    bar.close()
    return found


def _greedy_taus(
    target: PreTrainedModel,
    drafter: Drafter,
    trees: Sequence[StaticTree],
    given: Sequence[HeldOutPrompt],
    new_tokens: int,
) -> Iterator[dict[str, Any]]:
    """What `tau_table` says of each tree at temperature 0."""
    if drafter.observes:  # what it proposes depends on the tree
        for tree in trees:
            yield measure_tau(target, drafter, tree, GREEDY.name, given, new_tokens)
        return
    texts = write_texts(target, drafter, [prompt.tokens for prompt in given], new_tokens)
    ranks = measure_ranks(drafter, texts, max(tree.max_depth for tree in trees))
    for tree in trees:
        done = replay(ranks, tree.paths)
        counts = np.array([done.tokens, done.rounds]).T
        shares = {"acceptance_by_depth": done.acceptance_by_depth(tree.max_depth)}
        yield tau_of(given, counts) | shares


_PUBLISHED = ("tau", "tau_se", "tau_by_source", "rounds", "acceptance_by_depth")
"""Of a measurement, what a manifest says of each tree: texts are not published."""


def _named(tree: StaticTree, temperature: int, measured: dict[str, Any]) -> dict[str, Any]:
    known = {name: measured[name] for name in _PUBLISHED if name in measured}
    return {"tree": tree.label, "nodes": tree.nodes, "temperature": temperature, **known}


def tau_of(prompts: Sequence[HeldOutPrompt], counts: np.ndarray) -> dict[str, Any]:
    """τ of decoded prompts, with its standard error, and by source.

    Args:
        counts: [n, 2], the tokens and the rounds of each prompt.

    Returns:
        `tau`, 1 where there was no round; `tau_se`, see `standard_error`; `tau_by_prompt`; how many
        `rounds` there were; and, where the prompts are of several sources, `tau_by_source`: for
        each `tau`, `tau_se` and `prompts`.
    """
    documents = [prompt.document for prompt in prompts]
    found = {"tau": ratio(counts), "tau_se": standard_error(counts, documents)}
    found["tau_by_prompt"] = [ratio(counts[i : i + 1]) for i in range(len(counts))]
    found["rounds"] = int(counts[:, 1].sum())
    sources = [prompt.source for prompt in prompts]
    if len(set(sources)) > 1:
        found["tau_by_source"] = {}
        for source in sorted(set(sources)):
            own = [i for i, name in enumerate(sources) if name == source]
            error = standard_error(counts[own], [documents[i] for i in own])
            found["tau_by_source"][source] = {
                "tau": ratio(counts[own]), "tau_se": error, "prompts": len(own),
            }  # fmt: skip
    return found


def ratio(counts: np.ndarray) -> float:
    """Tokens a round of [n, 2] tokens and rounds; 1 where there was no round."""
    tokens, rounds = counts.sum(0).tolist()
    return tokens / rounds if rounds else 1.0


def standard_error(counts: np.ndarray, documents: Sequence[str]) -> float | None:
    """The standard error of τ, a ratio estimate, over documents; None with fewer than two.

    The prompts of one document are one cluster, of t tokens in r rounds. To first order τ moves by
    the clusters' residuals t - τ r, so with m clusters its variance is m / (m - 1) · Σ (t - τ r)² /
    (Σ r)² (Cochran, Sampling Techniques, chapter 6).

    >>> standard_error(np.array([[30, 10], [20, 10]]), ["a", "b"])
    0.5
    """
    clusters: dict[str, np.ndarray] = {}
    for document, count in zip(documents, counts, strict=True):
        clusters[document] = clusters.get(document, 0) + count
    sums = np.array(list(clusters.values()), dtype=float)  # [m, 2]
    if len(sums) < 2 or not sums[:, 1].sum():
        return None
    residuals = sums[:, 0] - ratio(counts) * sums[:, 1]
    variance = len(sums) / (len(sums) - 1) * (residuals**2).sum() / sums[:, 1].sum() ** 2
    return float(math.sqrt(variance))


class Validation:
    """Measures a drafter during training, always on the same prompts.

    Args:
        prompts: see `Prompts`.
        tree: what `parse_static` reads, or `sparse:N`: the best tree of N nodes for each drafter
            that is measured, see `sparse_nodes`.
        rule: one that follows a static tree.
        sampling: see `decode_prompts`.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        prompts: Prompts,
        new_tokens: int,
        tree: str | Sequence[Sequence[int]],
        rule: str,
        sampling: Mapping[str, Any] = AS_IT_IS,
    ):
        self.target, self.new_tokens, self.rule = target, new_tokens, rule
        self.sampling = sampling
        self.prompts = _held_out(prompts)
        self.sparse = sparse_nodes(tree)
        self.tree = StaticTree([]) if self.sparse else parse_static(tree)
        self._texts: list[Written] | None = None  # of the prompts that fall to this process

    def __call__(self, drafter: Drafter) -> dict[str, Any]:
        """What `measure_tau` returns, and `tree`, the rank paths it was measured with.

        Where ranks are recorded there is also `tree_shares`, see `path_shares`; not of a drafter
        that observes, whose ranks only lead to a tree.

        Several processes divide the prompts, and return the same; but where they hold parts of the
        target, so that each forward needs all of them, all decode every prompt.

        Under a greedy rule there is also `simulated_tau`, what the tree would accept of the
        target's own text by the ranks of its tokens; see `replay`.
        """
        simulated: dict[str, Any] = {}
        divided = in_parallel() and not in_shards(self.target)
        if self.sparse or not RULES[self.rule].samples:
            own = own_share(self.prompts) if divided else self.prompts
            # A target that is trained with its drafter does not write what it wrote before.
            if self._texts is None or drafter.adapter is not None:
                self._texts = self._write(drafter, own) if own or not divided else []
            depth = None if self.sparse else max(self.tree.max_depth, 1)
            ranks = measure_ranks(drafter, self._texts, depth)
            if divided:
                ranks = in_turn(from_each(ranks))
            if self.sparse:
                self.tree = StaticTree(best_tree(ranks, self.sparse))
            if not drafter.observes:
                if not RULES[self.rule].samples:
                    simulated["simulated_tau"] = replay(ranks, self.tree.paths).tau
                simulated["tree_shares"] = path_shares(ranks, self.tree.paths)
        measured = measure_tau(
            self.target, drafter, self.tree, self.rule, self.prompts, self.new_tokens,
            divided=divided, sampling=self.sampling,
        )  # fmt: skip
        return measured | simulated | {"tree": [list(path) for path in self.tree.paths]}

    def _write(self, drafter: Drafter, prompts: Sequence[HeldOutPrompt]) -> list[Written]:
        """The target's texts, with their features in the memory of the CPU: training needs the
        device's."""
        found: list[Written] = []
        for first in range(0, max(len(prompts), 1), BATCH):
            tokens = [prompt.tokens for prompt in prompts[first : first + BATCH]]
            texts = write_texts(self.target, drafter, tokens, self.new_tokens)
            found += [replace(text, features=text.features.cpu()) for text in texts]
        return found


def _held_out(prompts: Prompts) -> list[HeldOutPrompt]:
    given = enumerate(prompts)
    return [HeldOutPrompt(p, str(i)) if isinstance(p, Tensor) else p for i, p in given]
