"""One round of a request, looked at: what was drafted, and why each node was accepted or not.

The round is the decode loop's own: the same policy, drafter, target and rule. What the drafters
propose is noted as they say it, so that the probability of each drafted token is known also where
no rule asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from headstart.heads import OptionError, Sampling, Step, TokenTree
from headstart.heads.core import current
from headstart.heads.group import proposer

from .decoding_method import DecodingMethod, Given
from .loop import Decoding
from .request import Request
from .round import within_forms
from .rules.reasons import reasons
from .rules.rule_api import Verified
from .speculator import Speculator
from .trees.by_request import heat_of


@dataclass(frozen=True)
class ReplayedNode:
    """A node of the round's tree.

    Attributes:
        number: in the tree; parent: the number of its parent, -1 at the root.
        token: its id; depth: 0 at the root; rank: how many siblings come before it.
        drafter: the number of the one that drafted it; -1 at the root.
        drafted: the probability that its drafter gave it after its parent, with the request's
            temperature, top-k, top-p and min-p; None at the root, and where a drafter names
            candidates without probabilities.
        wanted: the target's probability of it after its parent, processed; None at the root.
        accepted: whether it is on the accepted path.
        why: the rule's reason, in words; empty at the root.
    """

    number: int
    parent: int
    token: int
    depth: int
    rank: int
    drafter: int
    drafted: float | None
    wanted: float | None
    accepted: bool
    why: str


@dataclass(frozen=True)
class ReplayedRound:
    """A round that was replayed.

    Attributes:
        rule: the name of the rule.
        text: the ids before the round, the root last.
        nodes: of the tree, the root first; invalid ones are left out.
        emitted: ids that the round adds, the target's own last, cut where the text ends; `last` is
            the target's probability of that token there, before what rejected drafts took off.
    """

    rule: str
    text: list[int]
    nodes: list[ReplayedNode]
    emitted: list[int]
    last: float


def replay_round(
    speculator: Speculator, input_ids: Tensor, number: int = 1, **options: Any
) -> ReplayedRound:
    """Decode a prompt [1, P] up to a round, and look at that one.

    Args:
        number: of the round, from 1; the first one follows the token that the prefill gives.
        options: as for `speculator.generate`, such as `do_sample`, `temperature` and `seed`.

    Raises:
        OptionError: several prompts, or a text that ends before that round.
    """
    replay = _Replay(speculator, number)
    heat = heat_of(options.get("do_sample"), options.get("temperature"))
    steps = speculator.tree_of(1, heat).max_depth + 1
    options.setdefault("max_new_tokens", 1 + number * steps)
    replay.generate(input_ids, **options)
    return replay.found


class _Replay(DecodingMethod):
    """Decodes a prompt up to a round.

    Attributes:
        found: what that round was, once it was decoded.
    """

    found: ReplayedRound

    def __init__(self, speculator: Speculator, number: int):
        self._alone, self._number = speculator._spare(), number
        self.tokenizer = speculator.tokenizer

    @property
    def model(self) -> PreTrainedModel:
        return self._alone.model

    def _write_nothing(self, rows: int) -> None:
        raise OptionError("max_new_tokens is 0, which no round writes; ask for more tokens.")

    @torch.inference_mode(False)
    @torch.no_grad()
    def _decode(self, given: Given, streamer: BaseStreamer | None) -> Tensor:
        input_ids, number = given.input_ids, self._number
        if input_ids.shape[0] != 1 or number < 1:
            raise OptionError(
                f"found {input_ids.shape[0]} prompts and round {number}; expected one prompt, and "
                "a round from 1."
            )
        request, ending, mask = self._alone.request_of(*given)
        request.times = None  # an adaptive tree is grown whole: rounds must not depend on the clock
        decoding = Decoding(request)
        width, text = input_ids.shape[1], input_ids[0].tolist()
        emitted = decoding.prefill(input_ids, mask, ending.limit - width)
        for done in range(number):
            text += emitted.tokens[0, : emitted.count[0]].tolist()
            if decoding.finished:
                raise OptionError(
                    f"the text ends after {len(text) - width} new tokens, before round {number}; "
                    "ask for an earlier round, or for more tokens."
                )
            if done < number - 1:
                emitted = decoding.round()
        with current(request.device):
            self.found = _look(request, text, self._name)
        return input_ids

    def _name(self, token: int) -> str:
        tokenizer = self.tokenizer
        return f"token {token}" if tokenizer is None else repr(str(tokenizer.decode([token])))


class _Noting:
    """A group's drafters, whose proposals are kept under the tokens that they follow."""

    def __init__(self, group: Any):
        self.members = [_NotingMember(member) for member in group.members]


class _NotingMember:
    def __init__(self, member: Any):
        self.member, self.config, self.independent = member, member.config, member.independent
        self._steps: dict[tuple[int, ...], tuple[Step, int]] = {}
        self._paths: list[tuple[int, ...]] = []  # of the nodes that were grown, in their order

    def begin(self, *given: Any) -> Step:
        step = self.member.begin(*given)
        self._steps[()] = step, 0
        return step

    def extend(self, states: Any, tokens: Tensor, parent: Tensor) -> Step:
        step = self.member.extend(states, tokens, parent)
        for column, (token, above) in enumerate(
            zip(tokens[0].tolist(), parent[0].tolist(), strict=True)
        ):
            self._paths.append((*(self._paths[above] if above >= 0 else ()), token))
            self._steps.setdefault(self._paths[-1], (step, column))
        return step

    def probability(self, path: tuple[int, ...], sampling: Sampling) -> float | None:
        """Of the last token of a path below the root, after those before it."""
        if self.independent:
            step, row = self._steps[()][0], len(path) - 1
        else:
            step, row = self._steps[path[:-1]]
        if step.logits is None:
            return None
        q = sampling.warp(step.logits[:, row : row + 1]).softmax(-1).flatten()
        if step.vocabulary is None:
            return float(q[path[-1]])
        return float(q[(step.vocabulary == path[-1]).nonzero()].sum())


def _look(request: Request, text: list[int], name: Callable[[int], str]) -> ReplayedRound:
    noting = _Noting(within_forms(request, request.drafters))
    longest = request.rows.longest
    request.make_space(longest)
    request.drafters.reserve(request.states, longest, request.capacity.behind)
    tree = request.policy.grow(
        proposer(noting), request.states, request.committed, request.children
    )
    logits, _ = request.target.verify(tree, request.lengths, longest, request.rows.even)
    kept: list[Tensor] = []
    verified = request.verified(tree, logits, kept)
    accepted = request.rule.accept(verified)
    verified.kept = None
    scores = [_scores(verified, node, kept) for node in range(tree.nodes)]
    path = accepted.path[0, : int(accepted.count[0])].tolist()
    why = reasons(request.rule.name, verified, accepted, scores, name)
    nodes = _nodes(request, tree, noting, scores, path, why)
    emitted = accepted.tokens[0, : len(path)].tolist()
    last = float(scores[path[-1]].softmax(-1)[emitted[-1]])
    return ReplayedRound(request.rule.name, text, nodes, _cut(request, text, emitted), last)


def _scores(verified: Verified, node: int, kept: list[Tensor]) -> Tensor:
    """Processed scores [V] after a node; where processors read the text, true on the path alone."""
    if verified.sampling.on_host:
        return kept[0][0, node]
    return verified.scores_after(torch.full_like(verified.tree.tokens[:, :1], node))[0]


def _nodes(
    request: Request,
    tree: TokenTree,
    noting: _Noting,
    scores: list[Tensor],
    path: list[int],
    why: list[str],
) -> list[ReplayedNode]:
    shape = tree.topology
    parents, depths, ranks = (each[0].tolist() for each in (shape.parents, shape.depth, shape.rank))
    tokens = tree.tokens[0].tolist()
    valid = [True] * tree.nodes if tree.valid is None else tree.valid[0].tolist()
    starts, found = request.policy.first_nodes, list[ReplayedNode]()
    paths: list[tuple[int, ...]] = [()]
    for number in range(tree.nodes):
        above, drafter, drafted, wanted = parents[number], -1, None, None
        if number:
            paths.append((*paths[above], tokens[number]))
            drafter = sum(number >= start for start in starts) - 1
            if valid[number]:
                own = noting.members[drafter]
                drafted = own.probability(paths[number], request.sampling)
                wanted = float(scores[above].softmax(-1)[tokens[number]])
        if valid[number]:
            place = (number, above, tokens[number], depths[number], ranks[number], drafter)
            on_path = number in path
            found.append(ReplayedNode(*place, drafted, wanted, on_path, why[number]))
    return found


def _cut(request: Request, text: list[int], emitted: list[int]) -> list[int]:
    """Up to an end token, the bound on new tokens, or where a stopping criterion holds."""
    most = int(request.rows.remaining[0])
    for count, token in enumerate(emitted, start=1):
        written = torch.tensor([text + emitted[:count]], device=request.device)
        met = request.criteria and bool(request.criteria(written, None))  # type: ignore[arg-type]
        if token in request.eos or count == most or met:
            return emitted[:count]
    return emitted
