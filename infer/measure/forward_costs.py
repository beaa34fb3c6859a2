"""Times the forwards of a round on this machine: the target's over a tree, and the drafter's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headstart.heads import Drafter, Step, TokenTree
from headstart.heads.core import current
from headstart.heads.group import fused_layers
from headstart.heads.parts.vocabulary import TrimmedVocabulary

from ..graphs import as_now, captures_rounds, repeated
from ..tensor_parallel import runner_of
from ..trees.static import StaticTree
from .own_text import Tick, Written
from .timing import Call, interleaved, medians

SECONDS = 300.0  # no timing goes on for longer, but everything that is timed has a turn
TURNS = 8  # that each forward is timed in
_CALLS = 5  # timed calls in a turn


@torch.no_grad()
def verify_costs(
    model: PreTrainedModel,
    feature_layers: Sequence[int],
    context: Tensor,
    counts: Sequence[int],
    tick: Tick = lambda: None,
    compile: bool | str = False,
) -> dict[int, float]:
    """t(n): milliseconds of the target's forward over a tree of n nodes, medians, by n.

    Args:
        context: [B, L] int64, the tokens that are cached before the tree.
        tick: called after each of `TURNS` turns.
        compile: how forwards run, see `Speculator`.
    """
    target = runner_of(model, tuple(feature_layers), compile=compile)
    batch, length = context.shape
    target.prefill(context, [length] * batch, length + max(counts))
    lengths = torch.full_like(context[:, 0], length)
    captured = captures_rounds(model)
    work: dict[int, Call] = {}
    for count in counts:
        siblings = StaticTree([[rank] for rank in range(count - 1)])
        topology, proposal_row = siblings.shape(batch, context.device)
        tokens = context[:, :1].repeat(1, count)
        tree = TokenTree(tokens, topology, None, proposal_row)
        # A captured round reads the rows' lengths from the device, so they may differ.
        work[count] = lambda tree=tree: target.verify(tree, lengths, length, not captured)
    times = _medians(work, context.device, captured, tick)
    if target.tap is not None:
        target.tap.close()
    return times


@torch.no_grad()
def draft_costs(
    drafter: Drafter,
    texts: Sequence[Written],
    counts: Sequence[int],
    depth: int,
    tick: Tick = lambda: None,
) -> tuple[float, dict[int, float]]:
    """Milliseconds of the drafter's `begin`, and of its `extend` by the nodes of the level.

    Args:
        texts: one for each row of the batch; counts: level sizes to time.
        depth: the deepest level that trees will have; a drafter with independent heads, or with a
            single level, has no `extend` to time.
        tick: called after each of `TURNS` turns.
    """
    context = context_of(texts)  # [B, L]
    batch, length = context.shape
    features = _cut([text.features for text in texts], length)  # [B, L, F]
    state = drafter.start(batch, length + max(counts) + depth + 1)
    count = torch.full_like(context[:, 0], length)
    drafter.prefill(state, features, context, count)
    # A round hands over as many columns as a path can be long.
    columns = [v[:, -1:].expand(-1, depth + 1, *v.shape[2:]) for v in (features, context)]
    # A count of 0, as for rows that have ended: the work is the same, and the text does not grow.
    none = torch.zeros_like(count)
    drafter.reserve(state, length, depth + 1 + max(counts))
    restore, fused = as_now(state), fused_layers(drafter)

    def begin(*level: Tensor) -> Step:
        restore()  # a graph reads what was there when it was captured, not what another one left
        drafter.reserve(state, length, depth + 1 + max(counts))
        with fused:
            step = drafter.begin(state, columns[0], columns[1], none)
            return drafter.extend(state, *level) if level else step

    levels = [] if drafter.independent or depth < 2 else list(counts)
    work: dict[int, Call] = {0: begin}
    for width in levels:
        nodes = context[:, -1:].expand(-1, width)
        work[width] = partial(begin, nodes, torch.full_like(nodes, -1))
    times = _medians(work, context.device, captures_rounds(drafter.target), tick)
    return times[0], {width: max(times[width] - times[0], 0.0) for width in levels}


@torch.no_grad()
def output_cost(drafter: Drafter, batch: int) -> float:
    """Milliseconds that independent heads spend in an output layer that could be trimmed.

    0 for drafters of other kinds, for trimmed vocabularies, for heads that share a layer of no more
    rows than they would have each for a quarter, and where rounds are captured whole.
    """
    if not (drafter.independent and isinstance(drafter, TrimmedVocabulary)):
        return 0.0
    config = drafter.config
    if config.draft_vocab_size or captures_rounds(drafter.target):
        return 0.0
    device, shared = drafter.target.device, config.output == "shared"
    if shared and drafter.own_rows(config.vocab_size // 4) >= config.vocab_size:
        return 0.0
    size = drafter.max_depth or 1, batch, config.hidden_size
    states = torch.randn(size, device=device).to(drafter.dtype)  # [K, B, D]

    def run() -> None:
        for head in range(1 if shared else len(states)):
            drafter.draft_logits(head + 1)(states if shared else states[head])

    return medians(interleaved({0: run}, device, TURNS, _CALLS))[0]


def context_of(texts: Sequence[Written]) -> Tensor:
    """[B, L]: each text up to the middle of what was written, all cut to one length."""
    middle = sorted((text.prompt + len(text.tokens)) // 2 for text in texts)
    return _cut([text.tokens for text in texts], middle[len(middle) // 2])


def _medians(
    work: dict[int, Call], device: torch.device, captured: bool, tick: Tick
) -> dict[int, float]:
    """Median milliseconds of each call, timed in turns; replayed as a graph where `captured`."""
    with current(device):
        calls = repeated(device, work) if captured else work
        return medians(interleaved(calls, device, TURNS, _CALLS, tick, SECONDS))


def _cut(rows: Sequence[Tensor], length: int) -> Tensor:
    """[B, L, …]: rows cut to `length`, or repeated up to it."""
    long = [row.repeat(-(-length // len(row)), *[1] * (row.dim() - 1)) for row in rows]
    return torch.stack([row[:length] for row in long])
