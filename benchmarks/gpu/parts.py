"""What each part of the suite measures. A part is given the job and its entries, and fills them."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.gpu import costs as cost_suite
from benchmarks.gpu.shapes import SHAPES, random_drafter, random_target
from benchmarks.gpu.suite import Entries, Job, read_part
from headstart.compare import quickstart_of
from headstart.heads import Drafter, family, load_drafter
from headstart.heads.artifacts.files import read_tree
from headstart.infer import Speculator, StaticTree
from headstart.infer.measure.baselines import Contender, generating, race, speculating
from headstart.infer.measure.costs import Costs
from headstart.infer.measure.lossless import compare_greedy
from headstart.infer.measure.planner import make_plan, rank_trees
from headstart.infer.measure.ranks import measure_ranks, replay, write_texts
from headstart.inputs import own_target
from headstart.reports.describe import describe
from headstart.train import pipeline
from headstart.train.data.corpus import load_documents
from headstart.train.data.held_out import held_out_prompts
from headstart.train.recipe import DrafterSpec, Recipe, load_recipe
from headstart.train.stages import RECORD

if TYPE_CHECKING:
    from headstart.infer.measure.planner import Candidate

_BASE = "gpu-suite"

_OPTIONS: dict[str, dict[str, Any]] = {
    "medusa": {"output": "shared"},
    "medusa2": {"output": "shared"},
    "draft_model": {"layers": 1},
}
"""Where a trained drafter differs from that of its family's quickstart, to be what is timed."""


def recipe_of(job: Job, name: str) -> Recipe:
    """The recipe that trains a family: the suite's, with the drafter of the family's quickstart."""
    text = [] if job.corpus is None else [f"corpus.source={job.corpus}"]
    base = load_recipe(_BASE, [*job.scale.recipe, *text])
    options = load_recipe(quickstart_of(name)).drafter.options | _OPTIONS.get(name, {})
    return dataclasses.replace(
        base,
        name=f"{_BASE}-{name}",
        output=str(job.trained),
        shares=_BASE,
        drafter=DrafterSpec(name, options),
    )


class Pair(NamedTuple):
    """A trained target and one of its drafters, and prompts [1, P] that neither was trained on.

    `id` is this very training's own.
    """

    target: PreTrainedModel
    drafter: Drafter
    tree: StaticTree
    prompts: list[Tensor]
    id: str


def trained_pair(job: Job, name: str, dtype: torch.dtype) -> Pair:
    """Load a family's drafter and its target; what is not trained yet is trained first."""
    recipe = recipe_of(job, name)
    folder = pipeline.train(recipe)
    target = Path(own_target(str(folder), name))
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype)
    model.to(job.on).eval()  # type: ignore[arg-type]
    tokenizer = AutoTokenizer.from_pretrained(target)
    # Beside a target that is shared stands its corpus; one with settings of its own may share it.
    runs = (target.parent, recipe.folder.with_name(_BASE))
    corpus = next(run / "corpus" for run in runs if (run / "corpus" / RECORD).is_file())
    prompts = held_out_prompts(
        tokenizer, load_documents(corpus, "held_out"), job.scale.prompts,
        recipe.decode.prefix_tokens, recipe.seed,
    )  # fmt: skip
    tree = StaticTree(read_tree(folder) or [[0]])
    drafter = load_drafter(folder, model, tokenizer)
    record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    prompts = [ids.view(1, -1).to(job.on) for ids in prompts]
    return Pair(model, drafter, tree, prompts, record["id"])


def bandwidth(job: Job, entries: Entries) -> None:
    """How fast the device copies."""
    copy = cost_suite.copy_bandwidth
    entries.measure("copy", lambda: copy(job.on, job.scale.copies, 2 * job.scale.repeats, 4))


def heads(job: Job, entries: Entries) -> None:
    """A drafter of every family; the first one waits for corpus, target and text as well."""

    def work(name: str) -> dict[str, Any]:
        folder = pipeline.train(recipe_of(job, name))
        found = describe(folder)
        metrics = Path(own_target(str(folder), name)) / "metrics.json"
        return {
            "parameters": found["parameters"],
            "metrics": found["metrics"],
            "target": json.loads(metrics.read_text(encoding="utf-8")),
        }

    for name in job.families:
        entries.measure(name, functools.partial(work, name))


def acceptance(job: Job, entries: Entries) -> None:
    """What each round of real decoding accepted, and the ranks that tell it for any tree."""

    def work(name: str) -> dict[str, Any]:
        pair = trained_pair(job, name, job.dtype)
        written, depth = job.scale.written, job.scale.depth
        texts = write_texts(pair.target, pair.drafter, pair.prompts, written)
        ranks = measure_ranks(pair.drafter, texts, depth)
        decoder = Speculator(pair.target, pair.drafter, tree=pair.tree)
        counts, grams = [], []
        for ids in pair.prompts:
            text = decoder.generate(ids, max_new_tokens=written, do_sample=False)
            counts.append(decoder.stats.counts.flatten().tolist())
            new = text[0, ids.shape[1] :].tolist()
            grams += [tuple(new[i : i + 4]) for i in range(len(new) - 3)]
        again = replay(ranks, pair.tree.paths)
        return {
            "trained": pair.id,
            "tree": pair.tree.label,
            "paths": [list(path) for path in pair.tree.paths],
            "tau": sum(map(sum, counts)) / max(sum(map(len, counts)), 1),
            "counts": counts,
            "replayed_tau": again.tau,
            "distinct_4grams": len(set(grams)) / max(len(grams), 1),
            "target_parameters": pair.target.num_parameters(),
            "independent": pair.drafter.independent,
            "ranks": [each.tolist() for each in ranks],
        }

    for name in job.families:
        entries.measure(name, functools.partial(work, name))


def identity(job: Job, entries: Entries) -> None:
    """Greedy text in float32 against that of `generate`."""

    def work(name: str) -> dict[str, Any]:
        pair = trained_pair(job, name, torch.float32)
        decoder = Speculator(pair.target, pair.drafter, tree=pair.tree)
        found = compare_greedy(decoder, pair.prompts, job.scale.written, progress=True)
        ties = sum(divergence.near_tie for divergence in found.divergences)
        return {
            "trained": pair.id,
            "prompts": found.prompts,
            "tokens": found.tokens,
            "divergences": len(found.divergences),
            "near_ties": ties,
            "tree": pair.tree.label,
        }

    for name in job.families:
        entries.measure(name, functools.partial(work, name))


def contenders(job: Job, entries: Entries) -> None:
    """Real decoding of the trained target, one prompt at a time, all in turns."""
    for name in job.families:
        entries.measure(name, functools.partial(_race, job, name))


def _race(job: Job, name: str) -> dict[str, Any]:
    pair = trained_pair(job, name, job.dtype)
    options: dict[str, Any] = {"max_new_tokens": job.scale.written, "do_sample": False}
    # The first prompts choose the trees, the others are decoded: no tree is judged by its own text.
    half = max(len(pair.prompts) // 2, 1)
    plan = make_plan(
        pair.target, pair.drafter, pair.prompts[:half],
        max_nodes=job.scale.nodes, new_tokens=job.scale.written,
    )  # fmt: skip
    best = {"tree": plan.candidates[0]}
    best["chain"] = next(c for c in plan.candidates if c["name"].startswith("chain:"))
    racing: dict[str, Contender] = {
        "plain": speculating(Speculator(pair.target), **options),
        "generate": generating(pair.target, **options),
    }
    for kind, candidate in best.items():
        decoder = Speculator(pair.target, pair.drafter, tree=candidate["tree"])
        racing[kind] = speculating(decoder, **options)
    racing |= _rivals(pair, best["chain"]["depth"], options)
    raced = list(race(racing, pair.prompts[half:], job.on, job.scale.turns, name))
    per_token = {who: [runs[who].per_token for _, runs in raced] for who in racing}
    tokens = {who: [runs[who].tokens for _, runs in raced] for who in racing}
    return {
        "trained": pair.id,
        "trees": {kind: {k: c[k] for k in ("name", "nodes", "tree")} for kind, c in best.items()},
        "prompts": len(raced),
        "ms_per_token": per_token,
        "tokens": sum(map(len, tokens["plain"])),
        "same_text": {who: each == tokens["generate"] for who, each in tokens.items()},
    }


def _rivals(pair: Pair, length: int, options: dict[str, Any]) -> dict[str, Contender]:
    """What `generate` of transformers has itself, for the drafters that it knows.

    The assistant is the very same model, once with the same chain in every round, and once with the
    settings that transformers gives it.
    """
    if type(pair.drafter) is family("lookup"):
        looking = {"prompt_lookup_num_tokens": length}
        return {"prompt_lookup": generating(pair.target, **options, **looking)}
    if type(pair.drafter) is not family("draft_model"):
        return {}
    student: Any = pair.drafter.model
    settings = student.generation_config
    fixed = {
        "num_assistant_tokens": length,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    usual = {key: getattr(settings, key, None) for key in fixed}

    def assisted(given: Mapping[str, Any]) -> Contender:
        decode = generating(pair.target, **options, assistant_model=student)

        def run(ids: Tensor) -> Any:
            for key, value in given.items():
                setattr(settings, key, value)
            return decode(ids)

        return run

    return {"assistant": assisted(fixed), "assistant_default": assisted(usual)}


def batches(job: Job, entries: Entries) -> None:
    """The planner's tree for each batch, against plain decoding of the same batch."""

    @functools.lru_cache(maxsize=1)
    def pair_of(name: str) -> Pair:
        return trained_pair(job, name, job.dtype)

    def work(name: str, batch: int) -> dict[str, Any]:
        pair = pair_of(name)
        plan = make_plan(
            pair.target, pair.drafter, pair.prompts,
            batch_size=batch, max_nodes=job.scale.nodes, new_tokens=job.scale.written, measure=2,
        )  # fmt: skip
        best = plan.candidates[0]
        return {
            "trained": pair.id,
            "family": name,
            "batch": batch,
            "policy": plan.policy,
            "speedup": plan.speedup,
            "best": {key: best[key] for key in ("name", "nodes", "measured_speedup")},
            "plain_ms": plan.costs["plain"],
        }

    for name in job.families:
        for batch in job.scale.batches:
            entries.measure(f"{name} batch {batch}", functools.partial(work, name, batch))


def costs(part: str, job: Job, entries: Entries) -> None:
    """What decoding costs at the part's shape."""
    scale, model = job.scale, _target_of(job, part)
    given = (scale.context, scale.tokens, scale.repeats, max(scale.copies))
    entries.measure("plain", lambda: cost_suite.plain_costs(model(), *given))
    entries.measure("compiled", lambda: cost_suite.compiled_costs(model(), *given))
    for length, nodes in ((scale.context, scale.trees), (scale.long_context, scale.long_trees)):
        entries.measure(
            f"trees at {length}",
            lambda length=length, nodes=nodes: {
                "context": length,
                "verify_ms": cost_suite.tree_costs(model(), length, nodes),
            },
        )

    def work(name: str) -> dict[str, Any]:
        drafter = random_drafter(name, model())
        depth = min(scale.depth, drafter.max_depth or scale.depth)
        choose = _chooser(job, name, depth)
        return cost_suite.round_costs(
            model(), drafter, choose, scale.context, scale.tokens, scale.repeats,
            scale.nodes, depth,
        )  # fmt: skip

    for name in job.families:
        entries.measure(name, functools.partial(work, name))


def _chooser(job: Job, name: str, depth: int) -> Callable[[Costs], dict[str, Any]]:
    """The trees to time: those that the acceptance part's ranks call best here, or usual ones."""
    ranks, independent = recorded(job.folder, name)

    def choose(costs: Costs) -> dict[str, Any]:
        if not ranks:
            usual = cost_suite.usual_tree(job.scale.nodes, depth)
            return {"tree": usual, "chain": [[0] * depth]}
        found = rank_trees(ranks, costs, independent, job.scale.nodes)
        chains = [c for c in found if c.name.startswith("chain:")]
        trees = [c for c in found if not c.name.startswith("chain:")]
        best: dict[str, Candidate] = {"tree": trees[0], "chain": chains[0]}
        return {kind: candidate.tree for kind, candidate in best.items()}

    return choose


def recorded(folder: Path, name: str) -> tuple[list[Tensor], bool]:
    """The ranks of a family that the acceptance part recorded, and whether its heads are such."""
    found = read_part(folder / "acceptance.json") or {"entries": {}}
    entry = found["entries"].get(name, {})
    return [torch.tensor(rows) for rows in entry.get("ranks", ())], entry.get("independent", False)


def batch_costs(part: str, job: Job, entries: Entries) -> None:
    """The planner's costs by batch; what they are worth is said with the recorded acceptance."""
    scale, model = job.scale, _target_of(job, part)

    def work(name: str, batch: int) -> dict[str, Any]:
        drafter = random_drafter(name, model())
        depth = min(scale.depth, drafter.max_depth or scale.depth)
        ids = cost_suite.random_prompt(model(), scale.context - scale.tokens // 2)
        costs = cost_suite.planner_costs(
            model(), drafter, ids.expand(batch, -1), scale.tokens, scale.nodes, depth
        )
        return {"family": name, "batch": batch, "costs": dataclasses.asdict(costs)}

    for name in job.families:
        for batch in scale.batches:
            entries.measure(f"{name} batch {batch}", functools.partial(work, name, batch))


def _target_of(job: Job, part: str) -> Callable[[], PreTrainedModel]:
    """The part's random target, made when it is first asked for."""

    @functools.cache
    def model() -> PreTrainedModel:
        return random_target(SHAPES[job.scale.shapes[part]], job.on, job.dtype)

    return model


MEASURE: dict[str, Callable[[Job, Entries], None]] = {
    "bandwidth": bandwidth,
    "heads": heads,
    "acceptance": acceptance,
    "identity": identity,
    "contenders": contenders,
    "batches": batches,
    "costs-1b": functools.partial(costs, "costs-1b"),
    "costs-8b": functools.partial(costs, "costs-8b"),
    "batches-8b": functools.partial(batch_costs, "batches-8b"),
}
"""The function of each part, but of `report`, which measures nothing."""
