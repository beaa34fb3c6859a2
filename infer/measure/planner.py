"""The planner: picks the tree that decodes fastest on this machine, or none where nothing pays."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace

from torch import Tensor
from transformers import PreTrainedModel

from headstart.heads import Drafter, DrafterGroup, OptionError
from headstart.heads.artifacts.plan import Plan, dtype_name, machine
from headstart.heads.core import counted, device_of, offloaded

from ..speculator import Speculator
from ..target import AUTO, way_to_run
from ..trees.limits import check_size
from .candidates import SMALL, Candidate, rank_trees, reach
from .costs import STEPS, DecodeTimes, decode_times, measure_costs
from .forward_costs import SECONDS
from .own_text import BATCH, write_texts
from .progress import progress_bar
from .ranks import acceptance, measure_ranks

MIN_SPEEDUP = 1.02
"""Where no tree is expected to gain more, plain decoding is the plan."""

_RUNS = 5  # at least so often each measured tree decodes
_HUGE = 768  # nodes; Sequoia's largest tree, for a target in CPU memory


def make_plan(
    target: PreTrainedModel,
    drafter: Drafter | DrafterGroup,
    prompts: Sequence[Tensor],
    *,
    batch_size: int = 1,
    temperature: float = 0.0,
    max_nodes: int | None = None,
    new_tokens: int = 128,
    measure: int = 0,
    compile: bool | str = False,
    progress: bool = False,
) -> Plan:
    """Measure target and drafter on prompts that neither was trained on, and choose a tree.

    Args:
        drafter: bound to the target.
        prompts: token ids, each [P] or [1, P].
        batch_size, temperature: of the requests that the plan is for. Sampled ones are decoded by
            the rule `coupled`; 0 is greedily.
        max_nodes: the largest tree considered, the root counted; None takes 64, or 768 for a target
            whose weights are streamed in, where a node costs next to nothing.
        measure: decode with this many of the best candidates, and choose among them by that; with
            the best one of each size for a drafter that observes, since the larger the tree, the
            more it gains beyond what is expected.
        compile: how forwards run, see `Speculator`; the plan is for those that run so.
        progress: show a bar on stderr.

    Raises:
        OptionError: too few prompts, nodes or new tokens, or prompts that the target ends at once.
    """
    if max_nodes is None:
        max_nodes = _HUGE if offloaded(target) else SMALL
    check_size("of --max-nodes", max_nodes)
    if batch_size < 1 or max_nodes < 2 or measure < 0 or len(prompts) < batch_size:
        raise OptionError(
            f"found {counted(len(prompts), 'prompt')}, batch size {batch_size}, "
            f"{counted(max_nodes, 'node')} and {counted(measure, 'tree')} to measure; planning "
            "needs a prompt for each row of a batch, and at least 2 nodes."
        )
    if isinstance(drafter, DrafterGroup):
        raise OptionError(
            f"found {len(drafter.drafters)} drafters, and a plan is for one; plan each alone: "
            "together they decode with their own trees."
        )
    if compile == AUTO:
        compile = way_to_run(target, compile) or False
    prompts = [prompt.flatten().to(device_of(target)) for prompt in prompts]
    batches = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
    trials = batches * -(-_RUNS // len(batches)) if measure else []
    parts = 2 * -(-len(prompts) // BATCH) + STEPS + len(trials)
    with closing(progress_bar(parts, "plan", "part", disable=not progress)) as bar:
        texts = write_texts(target, drafter, prompts, new_tokens, bar.update, temperature)
        most = min(max_nodes - 1, reach(max_nodes)[0])
        ranks = measure_ranks(drafter, texts, most, bar.update, temperature)
        if not sum(map(len, ranks)):
            raise OptionError(
                "the target ends every text after its first token, so there is no round to plan; "
                "give other prompts."
            )
        depth = ranks[0].shape[1]
        given = texts[:batch_size], max_nodes, depth, bar.update, compile, temperature
        costs = measure_costs(target, drafter, *given)
        found = rank_trees(ranks, costs, drafter.independent, max_nodes, batch_size)
        plain = Speculator(target, compile=compile)
        if measure:
            speculators = {"plain": plain}
            for each in _best_of_each_size(found) if drafter.observes else found[:measure]:
                made = Speculator(target, drafter, tree=each.tree, compile=compile)
                speculators[each.name] = made
            done = decode_times(
                speculators, trials, new_tokens, bar.update, SECONDS, temperature
            )  # fmt: skip
            found = _measured(found, done)
    best = found[0]
    policy, tree, tau, speedup = best.name, best.tree, best.tau, best.best_known
    if speedup < MIN_SPEEDUP:
        policy, tree, tau, speedup = "plain", [], 1.0, 1.0
    return Plan(
        machine(target), dtype_name(target), batch_size, policy, tree, tau, speedup,
        acceptance=acceptance(ranks).tolist(),
        costs=asdict(costs),
        candidates=[asdict(candidate) for candidate in found],
        prompts=len(prompts),
        new_tokens=new_tokens,
        compiled=bool(compile),
        forwards=plain.target.forwards,
        temperature=temperature,
    )  # fmt: skip


def _best_of_each_size(found: list[Candidate]) -> list[Candidate]:
    """The first of every number of nodes."""
    first: dict[int, Candidate] = {}
    for each in found:
        first.setdefault(each.nodes, each)
    return list(first.values())


def _measured(found: list[Candidate], done: DecodeTimes) -> list[Candidate]:
    """The candidates that have decoded, with measured figures, best first; then the others."""

    def measured(candidate: Candidate) -> Candidate:
        # The median over the runs, since a machine that stalls does so in a few of them.
        pairs = zip(done.per_round["plain"], done.per_round[candidate.name], strict=True)
        faster = statistics.median(plain / drafted for plain, drafted in pairs)
        return replace(
            candidate,
            measured_tau=done.tokens[candidate.name] / max(done.rounds[candidate.name], 1),
            measured_speedup=faster * done.loops["plain"] / max(done.loops[candidate.name], 1),
        )

    known = [measured(each) for each in found if each.name in done.per_round]
    others = [each for each in found if each.name not in done.per_round]
    return sorted(known, key=lambda each: -each.best_known) + others
