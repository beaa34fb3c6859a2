"""Random verified trees, the sampling rules written plainly, and what both rules must pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from headstart.heads import Sampling, TokenTree, Topology
from headstart.heads.core import Stream, row_seeds
from headstart.infer.rules.rule_api import Accepted, Text, Verified
from tests.support.tiny import path_to, random_parents

VOCAB, TEXT = 7, 4
KINDS = ("points", "with", "without", "mixed", "narrow")

WARPERS = LogitsProcessorList([TemperatureLogitsWarper(0.9), TopPLogitsWarper(0.9)])
NAN = float("nan")

Rule = Callable[[Verified], Accepted]
Answer = tuple[list[int], list[int]]
"""A path, and the tokens that follow its nodes."""


def vectors(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def random_tree(kind: str, batch: int, nodes: int, generator: torch.Generator) -> TokenTree:
    """A random tree in each row, a few children invalid; siblings differ, but for `with`."""
    parents = [random_parents(nodes, generator) for _ in range(batch)]
    deepest = max(len(path_to(row, node)) for row in parents for node in range(nodes)) - 1
    shape = Topology.from_parents(torch.tensor(parents), deepest)
    known = torch.tensor([6, 0, 3, 2]) if kind == "narrow" else torch.arange(VOCAB)
    tokens, proposal_row = torch.zeros(batch, nodes).long(), torch.full((batch, nodes), -1)
    valid = torch.rand(batch, nodes, generator=generator) < 0.85
    valid[:, 0] = True
    for row in range(batch):
        for parent in range(nodes):
            kids = [node for node in range(nodes) if parents[row][node] == parent]
            if kind == "with":
                drawn = torch.randint(VOCAB, (len(kids),), generator=generator)
            else:
                drawn = known[torch.randperm(len(known), generator=generator)][: len(kids)]
                valid[row, kids[len(drawn) :]] = False  # nothing was left for them
            tokens[row, kids[: len(drawn)]] = drawn
            for kid in kids:
                point = kind == "points" or (kind == "mixed" and kid % 3 == 0)
                proposal_row[row, kid] = -1 if point else (parent * 5) % nodes
    logits = torch.randn(batch, nodes, len(known), generator=generator, dtype=torch.float64)
    given = None if kind == "points" else logits
    vocabulary = known if kind == "narrow" else None
    return TokenTree(
        tokens, shape, valid, proposal_row, given, vocabulary, replacement=kind == "with"
    )


def verified_of(
    tree: TokenTree,
    generator: torch.Generator,
    processors: LogitsProcessorList | None = None,
    ends: Tensor | None = None,
) -> Verified:
    """Random logits of the target, seeds, and texts of TEXT tokens that the root ends."""
    batch, nodes = tree.tokens.shape
    logits = 1.5 * torch.randn(batch, nodes, VOCAB, generator=generator, dtype=torch.float64)
    sampling = Sampling(row_seeds(int(logits[0, 0, 0] * 1e6), batch), processors, torch.float64)
    ids = torch.randint(VOCAB, (batch, 2 * TEXT + nodes), generator=generator)
    ids[:, TEXT - 1] = tree.tokens[:, 0]
    lengths = torch.arange(batch) + 3
    return Verified(tree, logits, sampling, lengths, Text(ids, TEXT, None, ends))


def row_of(verified: Verified, row: int) -> Verified:
    """One row by itself."""

    def cut(value: Tensor | None) -> Tensor | None:
        return None if value is None else value[row : row + 1].clone()

    tree, shape = verified.tree, verified.tree.topology
    alone = Topology.from_parents(shape.parents[row : row + 1], shape.max_depth)
    parts = {
        name: cut(getattr(tree, name)) for name in ("tokens", "valid", "proposal_row", "logits")
    }
    seeds = cut(verified.sampling.seeds)
    text = Text(verified.text.ids[row : row + 1].clone(), TEXT, None, verified.text.ends)
    return dataclasses.replace(
        verified,
        tree=dataclasses.replace(tree, topology=alone, **parts),
        logits=verified.logits[row : row + 1],
        sampling=dataclasses.replace(verified.sampling, seeds=seeds),
        lengths=verified.lengths[row : row + 1],
        text=text,
    )


def answers(accepted: Accepted) -> list[Answer]:
    """What each row accepted, without the padding, which must repeat the last node and token."""
    found = []
    for path, tokens, count in zip(
        accepted.path.tolist(), accepted.tokens.tolist(), accepted.count.tolist(), strict=True
    ):
        assert path[count:] == path[count - 1 : count] * (len(path) - count)
        assert tokens[count:] == tokens[count - 1 : count] * (len(path) - count)
        found.append((path[:count], tokens[:count]))
    return found


class Walker:
    """One row of a verified tree, in Python's floats."""

    def __init__(self, verified: Verified, row: int):
        tree, sampling = verified.tree, verified.sampling
        self.tree, self.sampling, self.row = tree, sampling, row
        self.logits = verified.logits[row]
        self.parents = tree.topology.parents[row].tolist()
        self.tokens = tree.tokens[row].tolist()
        self.valid = [True] * tree.nodes if tree.valid is None else tree.valid[row].tolist()
        self.prefix = verified.text.ids[row, :TEXT].tolist()
        position = verified.lengths[row : row + 1, None]
        assert sampling.seeds is not None
        mine = dataclasses.replace(sampling, seeds=sampling.seeds[row : row + 1])
        uniforms = mine.uniforms(position, tree.nodes + 1, Stream.VERDICTS)
        self.uniforms: list[float] = uniforms.flatten().tolist()

    def kids(self, node: int) -> list[int]:
        """The children that may be accepted, in the order drawn."""
        every = range(self.tree.nodes)
        return [kid for kid in every if self.parents[kid] == node and self.valid[kid]]

    def p(self, node: int) -> list[float]:
        """The target's distribution after a node."""
        path = path_to(self.parents, node)
        prefix = self.prefix + [self.tokens[step] for step in path[1:]]
        scores = self.logits[node : node + 1].clone()
        for processor in self.sampling.processors or ():
            scores = processor(torch.tensor([prefix]), scores)  # type: ignore[arg-type]
        return scores.softmax(-1)[0].tolist()

    def q(self, kid: int, earlier: list[int]) -> list[float]:
        """What a child was drawn from, after the `earlier` ones of its siblings."""
        number, tree = int(self.tree.proposal_row[self.row, kid]), self.tree
        found = [0.0] * VOCAB
        if number < 0:
            found[self.tokens[kid]] = 1.0
            return found
        assert tree.logits is not None
        warped = self.sampling.warp(tree.logits[self.row, number]).softmax(-1).tolist()
        ids = range(VOCAB) if tree.vocabulary is None else tree.vocabulary.tolist()
        for token, probability in zip(ids, warped, strict=True):
            found[token] = probability
        if not tree.replacement:
            for other in earlier:
                if tree.proposal_row[self.row, other] >= 0:
                    found[self.tokens[other]] = 0.0
        total = sum(found)
        return [value / total if total else 0.0 for value in found]

    def draw(self, p: list[float]) -> int:
        """The last token."""
        goal, so_far = self.uniforms[-1] * sum(p), 0.0
        for token, probability in enumerate(p):
            so_far += probability
            if goal < so_far:
                return token
        raise AssertionError("the uniform is below 1")

    def answer(self, node: int, p: list[float]) -> Answer:
        path = path_to(self.parents, node)
        return path, [*(self.tokens[step] for step in path[1:]), self.draw(p)]

    def rejection(self, ends: Callable[[int], bool] = lambda token: False) -> Answer:
        """Leviathan's rule at every child, from the root down."""
        node = 0
        while True:
            p, kids = self.p(node), self.kids(node)
            for number, kid in enumerate(kids):
                q, token = self.q(kid, kids[:number]), self.tokens[kid]
                if q[token] > 0 and self.uniforms[kid] < min(1, p[token] / q[token]):
                    node = kid
                    break
                excess = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
                mass = sum(excess)  # 0 only after a token that q never gives
                p = [value / mass for value in excess] if mass else p
            else:
                return self.answer(node, p)
            if ends(self.tokens[node]):
                path, tokens = self.answer(node, [1.0] + [0.0] * (VOCAB - 1))
                return path, tokens[:-1]

    def traversal(self) -> Answer:
        """From the leaves up, by recursion over the subtrees."""

        def visit(node: int, weight: float) -> Answer | None:
            p, kids = self.p(node), self.kids(node)
            for number, kid in enumerate(kids):
                q, token = self.q(kid, kids[:number]), self.tokens[kid]
                entry = min(1, weight * p[token] / q[token]) if q[token] > 0 else 0.0
                if found := visit(kid, entry):
                    return found
                excess = [max(weight * a - b, 0.0) for a, b in zip(p, q, strict=True)]
                mass = sum(excess)
                p = [value / mass for value in excess] if mass else p
                weight = mass / (mass + 1 - weight) if weight < 1 else 1.0
            if node == 0 or self.uniforms[node] < weight:
                return self.answer(node, p)
            return None

        found = visit(0, 1.0)
        assert found is not None
        return found


def agrees_with_the_walker(rule: Rule, kind: str, processors: LogitsProcessorList | None) -> None:
    """On trees of many sizes, 16 rows each, the rule answers as the method of its name does."""
    generator = torch.Generator().manual_seed(3)
    deep = 0
    for nodes in (1, 2, 5, 9, 14, 20) * 3:
        verified = verified_of(random_tree(kind, 16, nodes, generator), generator, processors)
        expected = [getattr(Walker(verified, row), rule.__name__)() for row in range(16)]
        assert answers(rule(verified)) == expected
        deep += sum(len(path) > 2 for path, _ in expected)
    assert deep >= 8


def judges_rows_as_if_alone(rule: Rule, kind: str) -> None:
    generator = torch.Generator().manual_seed(5)
    verified = verified_of(random_tree(kind, 6, 11, generator), generator, WARPERS)
    together = answers(rule(verified))
    for row in range(6):
        assert answers(rule(row_of(verified, row))) == together[row : row + 1]


def never_accepts_a_drafter_of_nan(rule: Rule) -> None:
    generator = torch.Generator().manual_seed(8)
    verified = verified_of(random_tree("with", 40, 9, generator), generator)
    assert verified.tree.logits is not None
    verified.tree.logits[:] = NAN
    for row, found in enumerate(answers(rule(verified))):
        walker = Walker(verified, row)
        assert found == ([0], [walker.draw(walker.p(0))])
