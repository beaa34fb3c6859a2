"""The planner: picks the tree that decodes fastest on this machine, or none where nothing pays.

Cost model (Sequoia, arXiv 2402.12374): speedup = G / (t(n) + d · c), with everything measured. G,
the tokens per round, comes from the drafter's ranks recorded on held-out prompts and replayed round
by round; t(n), c and the loop's own cost from timed forwards and timed rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from headstart.heads import Drafter, OptionError
from headstart.heads.artifacts.plan import Plan, dtype_name, machine
from headstart.heads.core import device_of, offloaded
from headstart.heads.group import members

from ..speculator import Speculator
from ..trees.optimal import OptimalTrees, expected_tokens
from ..trees.static import StaticTree
from .costs import SECONDS, STEPS, Costs, decode_times, measure_costs, sizes
from .ranks import BATCH, RANKS, Replayed, acceptance, best_tree, measure_ranks, replay, write_texts

WORTH = 1.02
"""A smaller expected speedup is not worth a drafter."""

_FOLDS = 4
_RUNS = 5  # at least so often each measured tree decodes
_CARTESIAN = (
    (2, 1), (3, 1), (2, 2), (2, 1, 1), (3, 2, 1), (2, 2, 2), (4, 2, 1, 1), (3, 2, 1, 1, 1),
    (4, 3, 2, 1), (6, 3, 2),
)  # fmt: skip
_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # limits tried where every level costs a forward
_SMALL = 64  # trees of more nodes reach deeper, and to ranks that are less likely
_HUGE = 768  # Sequoia's for a target in CPU memory


@dataclass(frozen=True)
class Candidate:
    """One tree that was considered.

    Attributes:
        name: the policy and its size; nodes, the root counted; depth.
        tau: expected tokens per round, from replayed ranks.
        positional_tau: the same by the acceptance vector alone, which takes ranks for independent.
        round_ms: expected milliseconds of a round.
        speedup: expected, against plain decoding in the same runtime.
        measured_tau, measured_speedup: of real decoding; None where it was not measured.
    """

    name: str
    nodes: int
    depth: int
    tau: float
    positional_tau: float
    round_ms: float
    speedup: float
    measured_tau: float | None = None
    measured_speedup: float | None = None
    tree: list[list[int]] = field(default_factory=list, repr=False)

    @property
    def best_known(self) -> float:
        """The measured speedup where there is one, else the expected one."""
        return self.speedup if self.measured_speedup is None else self.measured_speedup


def make_plan(
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[Tensor],
    *,
    batch_size: int = 1,
    max_nodes: int | None = None,
    new_tokens: int = 128,
    measure: int = 0,
    progress: bool = False,
) -> Plan:
    """Measure target and drafter on prompts that neither was trained on, and choose a tree.

    Trees that are fitted to recorded ranks are judged on prompts that they were not fitted to, by
    cross-validation; the one that is returned is fitted to all.

    Args:
        drafter: bound to the target.
        prompts: token ids, each [P] or [1, P].
        max_nodes: the largest tree considered, the root counted; None takes 64, or 768 for a target
            whose weights are streamed in, where a node costs next to nothing.
        measure: decode with the best so many candidates, and let that decide among them.
        progress: show a bar on stderr.

    Raises:
        OptionError: too few prompts, nodes or new tokens, or prompts that the target ends at once.
    """
    if max_nodes is None:
        max_nodes = _HUGE if offloaded(target) else _SMALL
    if batch_size < 1 or max_nodes < 2 or measure < 0 or len(prompts) < batch_size:
        raise OptionError(
            f"found {len(prompts)} prompts, batch size {batch_size}, {max_nodes} nodes and "
            f"{measure} trees to measure; planning needs a prompt for each row of a batch, and at "
            "least 2 nodes."
        )
    if (several := len(members(drafter))) > 1:
        raise OptionError(
            f"found {several} drafters, and a plan is one drafter's; plan them one by one: "
            "together they decode with their own trees."
        )
    prompts = [prompt.flatten().to(device_of(target)) for prompt in prompts]
    batches = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
    trials = batches * -(-_RUNS // len(batches)) if measure else []
    parts = 2 * -(-len(prompts) // BATCH) + STEPS + len(trials)
    with tqdm(total=parts, desc="plan", unit="part", disable=not progress) as bar:
        texts = write_texts(target, drafter, prompts, new_tokens, bar.update)
        ranks = measure_ranks(drafter, texts, min(max_nodes - 1, _reach(max_nodes)[0]), bar.update)
        if not sum(map(len, ranks)):
            raise OptionError(
                "the target ends every text after its first token, so there is no round to plan; "
                "give other prompts."
            )
        depth = ranks[0].shape[1]
        costs = measure_costs(target, drafter, texts[:batch_size], max_nodes, depth, bar.update)
        found = rank_trees(ranks, costs, drafter.independent, max_nodes, batch_size)
        if measure:
            found = _measure(found, measure, target, drafter, trials, new_tokens, bar)
    best = found[0]
    pays = best.best_known >= WORTH
    return Plan(
        device=machine(target),
        dtype=dtype_name(target),
        batch_size=batch_size,
        policy=best.name if pays else "plain",
        tree=best.tree if pays else [],
        tau=best.tau if pays else 1.0,
        speedup=best.best_known if pays else 1.0,
        acceptance=acceptance(ranks)[0].tolist(),
        costs=asdict(costs),
        candidates=[asdict(candidate) for candidate in found],
        prompts=len(prompts),
        new_tokens=new_tokens,
    )


def rank_trees(
    ranks: Sequence[Tensor], costs: Costs, independent: bool, max_nodes: int, batch_size: int = 1
) -> list[Candidate]:
    """Every tree that is considered, by its expected speedup, the best first.

    Args:
        ranks: [M, K] for each text, see `measure_ranks`; the texts may be another model's than the
            costs, which then says what such acceptance would be worth there.
        independent: see `Drafter`.
    """
    return _judge(_shapes(ranks, max_nodes, independent), ranks, costs, batch_size)


@dataclass(frozen=True)
class _Shape:
    """A tree for a candidate: as fitted to all texts, and what it did on texts left out."""

    name: str
    paths: list[list[int]]
    done: Replayed


def _shapes(ranks: Sequence[Tensor], max_nodes: int, independent: bool) -> Iterator[_Shape]:
    depth = ranks[0].shape[1]
    fixed = {f"chain:{n}": StaticTree.chain(n) for n in range(1, min(depth, max_nodes - 1) + 1)}
    for widths in _CARTESIAN:
        if len(widths) <= depth:
            name = f"cartesian:{','.join(map(str, widths))}"
            fixed[name] = StaticTree.cartesian(widths)
    for name, tree in fixed.items():
        if tree.nodes <= max_nodes:
            paths = [list(path) for path in tree.paths]
            yield _Shape(name, paths, replay(ranks, paths))

    folds = min(_FOLDS, len(ranks))
    rest = [[r for i, r in enumerate(ranks) if i % folds != f] for f in range(folds)]
    rest = rest if folds > 1 else [list(ranks)]  # a single text has to judge its own trees
    fitted = [_fitted(part, max_nodes, independent) for part in rest]
    for name, paths in _fitted(ranks, max_nodes, independent).items():
        done = [replay(ranks[f::folds], trees[name]) for f, trees in enumerate(fitted)]
        tokens, rounds = [0] * len(ranks), [0] * len(ranks)
        for fold, each in enumerate(done):
            tokens[fold::folds], rounds[fold::folds] = each.tokens, each.rounds
        yield _Shape(name, paths, Replayed(tokens, rounds))


def _reach(max_nodes: int) -> tuple[int, int]:
    """How deep trees of at most so many nodes go, and how many ranks they tell apart."""
    return (16, RANKS) if max_nodes <= _SMALL else (_DEPTHS[-1], 32)


def _fitted(
    ranks: Sequence[Tensor], max_nodes: int, independent: bool
) -> dict[str, list[list[int]]]:
    """Trees made for these ranks, by name: sparse measured ones and optimal static ones."""
    depth, trees = ranks[0].shape[1], {}
    width = _reach(max_nodes)[1]
    accept = acceptance(ranks, width)[0]  # [K, W]
    counts = sizes(max_nodes)[2:] or [max_nodes]
    for count in counts:
        trees[f"sparse:{count}"] = best_tree(ranks, count, width=width)
    # Heads that answer at once make a shallow tree no cheaper.
    limits = [depth] if independent else [d for d in _DEPTHS if d < depth] + [depth]
    for limit in limits:
        best = OptimalTrees(accept, max_nodes, limit)
        for count in counts:
            suffix = f" depth {limit}" if limit < depth else ""
            trees[f"optimal:{count}{suffix}"] = best.paths(count)
    return trees


def _judge(
    shapes: Iterator[_Shape], ranks: Sequence[Tensor], costs: Costs, batch_size: int
) -> list[Candidate]:
    """Expected speedups, the best first, each tree once."""
    accept = acceptance(ranks, width=64)[0]
    plain = _loops([len(each) for each in ranks], batch_size) * costs.plain
    found: dict[tuple[tuple[int, ...], ...], Candidate] = {}
    for shape in shapes:
        tree = StaticTree(shape.paths)
        if tree.nodes == 1:  # no rank was ever right
            continue
        round_ms = costs.round(tree)
        candidate = Candidate(
            name=shape.name,
            nodes=tree.nodes,
            depth=tree.max_depth,
            tau=shape.done.tau,
            positional_tau=expected_tokens(accept, shape.paths),
            round_ms=round_ms,
            speedup=plain / (_loops(shape.done.rounds, batch_size) * round_ms),
            tree=shape.paths,
        )
        found.setdefault(tree.paths, candidate)
    return sorted(found.values(), key=lambda candidate: -candidate.speedup)


def _loops(rounds: Sequence[int], batch_size: int) -> int:
    """Rounds of the loop for all batches: each runs until its last row has ended."""
    starts = range(0, len(rounds), batch_size)
    return sum(max(rounds[start : start + batch_size]) for start in starts)


def _measure(
    found: list[Candidate],
    count: int,
    target: PreTrainedModel,
    drafter: Drafter,
    batches: Sequence[Sequence[Tensor]],
    new_tokens: int,
    bar: tqdm,
) -> list[Candidate]:
    """The first `count` candidates with real decoding, the best of them first, then the others."""
    speculators = {"plain": Speculator(target)}
    for candidate in found[:count]:
        speculators[candidate.name] = Speculator(target, drafter, tree=candidate.tree)
    done = decode_times(speculators, batches, new_tokens, bar.update, SECONDS)

    def measured(candidate: Candidate) -> Candidate:
        # The median round of all runs, since a machine that stalls does so in a few of them.
        pairs = zip(done.per_round["plain"], done.per_round[candidate.name], strict=True)
        faster = statistics.median(plain / mine for plain, mine in pairs)
        return replace(
            candidate,
            measured_tau=done.tokens[candidate.name] / max(done.rounds[candidate.name], 1),
            measured_speedup=faster * done.loops["plain"] / max(done.loops[candidate.name], 1),
        )

    known = sorted(map(measured, found[:count]), key=lambda candidate: -candidate.best_known)
    return known + found[count:]
