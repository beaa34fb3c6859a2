"""What decoding costs at a model's shape: plain tokens, trees, rounds, memory.

Everything here runs with random weights (see `shapes`), so nothing of it is a speedup.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headstart.heads import Drafter
from headstart.infer.measure.baselines import (
    decode_in_turns,
    timed_bare_loop,
    timed_generate,
    timed_speculator,
)
from headstart.infer.measure.costs import Costs, decode_times, measure_costs
from headstart.infer.measure.forward_costs import verify_costs
from headstart.infer.measure.own_text import decode_texts, write_texts
from headstart.infer.speculator import Speculator
from headstart.infer.trees.optimal import OptimalTrees
from headstart.infer.trees.static import StaticTree

from .bandwidth import copy_bandwidth
from .round_profile import profile_rounds
from .shapes import read_bytes, weight_bytes
from .static_generate import static_generate

Paths = Sequence[Sequence[int]]

_USUAL = [0.6, 0.15, 0.07, 0.04, 0.03, 0.02, 0.02, 0.01]
"""An acceptance vector like those of trained heads; it shapes trees that nothing better shapes."""


def usual_tree(nodes: int, depth: int) -> list[list[int]]:
    """The rank paths of a tree to time where no acceptance is known."""
    return OptimalTrees([_USUAL] * depth, nodes, depth).paths(nodes)


def plain_costs(
    model: PreTrainedModel, context: int, new_tokens: int, repeats: int, megabytes: int
) -> dict[str, Any]:
    """Plain decoding at batch 1, our loop, `generate` and a bare loop in turns.

    Args:
        context: tokens in the cache, on the mean over the new tokens.
        megabytes: what is copied to know the device's bandwidth in this same run.

    Returns:
        Milliseconds a token of each, `bytes_per_token`: the weights that a token reads, and the
        keys and values that are live; the bandwidth of a copy; and the `peak_bytes` of our loop,
        see `peak`.
    """
    ids = random_prompt(model, context - new_tokens // 2)
    most = peak(model, None, None, ids, new_tokens)  # before anything else holds a cache
    options = {"max_new_tokens": new_tokens, "do_sample": False}
    plain = Speculator(model)
    decoders = {
        "plain": timed_speculator(plain, **options),
        "generate": timed_generate(model, **options),
        "bare": timed_bare_loop(model, new_tokens),
    }
    ((_, runs),) = decode_in_turns(decoders, [ids], model.device, repeats, f"plain at {context}")
    return {
        "context": context,
        "new_tokens": new_tokens,
        **{f"{name}_ms_per_token": each.per_token for name, each in runs.items()},
        **_reading(plain, context, repeats, megabytes),
        "peak_bytes": most,
    }


def compiled_costs(
    model: PreTrainedModel, context: int, new_tokens: int, repeats: int, megabytes: int
) -> dict[str, Any]:
    """Plain decoding at batch 1 with compiled forwards, as it is, and without fused layers, and
    `generate` with a static cache, which compiles too, in turns; see `plain_costs`.

    Returns:
        Milliseconds a token of each, what a token reads, and `compile_seconds`, the first round's;
        `left_out`, why `generate_static` is, where it could not be run.
    """
    ids = random_prompt(model, context - new_tokens // 2)
    options = {"max_new_tokens": new_tokens, "do_sample": False}
    compiled = Speculator(model, compile="default")
    decode_texts(compiled, list(ids), 2)
    seconds = compiled.stats.decode_seconds
    decoders = {
        "compiled": timed_speculator(compiled, **options),
        "plain": timed_speculator(Speculator(model), **options),
        "unfused": timed_speculator(Speculator(model, fused=False), **options),
    }
    fastest, missing = static_generate(model, ids, options)
    decoders |= fastest
    ((_, runs),) = decode_in_turns(decoders, [ids], model.device, repeats, f"compiled at {context}")
    return {
        "context": context,
        "new_tokens": new_tokens,
        **{f"{name}_ms_per_token": each.per_token for name, each in runs.items()},
        **_reading(compiled, context, repeats, megabytes),
        "compile_seconds": seconds,
        "left_out": missing,
    }


def _reading(decoder: Speculator, context: int, repeats: int, megabytes: int) -> dict[str, Any]:
    """What a plain token reads, and how fast the device copies."""
    model, cached = decoder.model, cache_bytes(decoder) * context
    return {
        "weight_bytes_per_token": read_bytes(model),
        "cache_bytes_per_token": cached,
        "copy_gb_per_s": copy_bandwidth(model.device, [megabytes], repeats)["gb_per_s"],
        "bytes_per_token": read_bytes(model) + cached,
    }


def tree_costs(model: PreTrainedModel, context: int, nodes: Sequence[int]) -> dict[int, float]:
    """t(n) behind a context: milliseconds of the target's forward over n nodes, by n."""
    return verify_costs(model, (), random_prompt(model, context), nodes)


def round_costs(
    model: PreTrainedModel,
    drafter: Drafter,
    choose: Callable[[Costs], Mapping[str, Paths]],
    context: int,
    new_tokens: int,
    repeats: int,
    nodes: int,
    depth: int,
) -> dict[str, Any]:
    """Real rounds of a few trees, and where their time goes, at batch 1.

    Args:
        choose: names the trees to time, as rank paths, by the planner's costs.
        nodes, depth: the largest tree, and the deepest, that the planner's costs are to cover.

    Returns:
        `plain_ms`, a round of plain decoding run in turns with the trees, and for each of the
        `trees` its `paths`, `nodes`, `round_ms`, the `parts` of a round as it is decoded (see
        `profile_rounds`), and `peak_bytes`. Of the drafter its
        `weight_bytes` and `cache_bytes`, which is its state's. And the planner's `costs`.
    """
    ids = random_prompt(model, context - new_tokens // 2)
    costs = planner_costs(model, drafter, ids, new_tokens, nodes, depth)
    shapes = {name: StaticTree(paths) for name, paths in choose(costs).items()}
    peaks = {name: peak(model, drafter, tree, ids, new_tokens) for name, tree in shapes.items()}
    ours = {name: Speculator(model, drafter, tree=tree) for name, tree in shapes.items()}
    done = decode_times({"plain": Speculator(model), **ours}, [[ids[0]]] * repeats, new_tokens)
    taken = {name: 1e3 * statistics.median(each) for name, each in done.per_round.items()}
    found: dict[str, Any] = {}
    cache = 0
    for name, tree in shapes.items():
        parts, cache = profile_rounds(ours[name], ids, new_tokens)
        found[name] = {
            "paths": [list(path) for path in tree.paths],
            "tree": tree.label,
            "nodes": tree.nodes,
            "round_ms": taken[name],
            "parts": parts,
            "peak_bytes": peaks[name],
        }
    return {
        "plain_ms": taken["plain"],
        "context": context,
        "trees": found,
        "weight_bytes": weight_bytes(drafter),
        "cache_bytes": cache,
        "costs": asdict(costs),
    }


def planner_costs(
    model: PreTrainedModel, drafter: Drafter, ids: Tensor, new_tokens: int, nodes: int, depth: int
) -> Costs:
    """What the planner measures, behind prompts [B, P] that the target has continued."""
    texts = write_texts(model, drafter, list(ids), new_tokens)
    return measure_costs(model, drafter, texts, nodes, depth)


def random_prompt(model: PreTrainedModel, length: int) -> Tensor:
    """[1, length] int64, the same for every model of that vocabulary."""
    vocab = model.config.get_text_config(decoder=True).vocab_size
    tokens = torch.randint(vocab, (1, length), generator=torch.Generator().manual_seed(0))
    return tokens.to(model.device)


def cache_bytes(decoder: Speculator) -> int:
    """Bytes of keys and values that one token has in a target's cache."""
    shapes = decoder.target.shapes
    sizes = [shape.dtype.itemsize * heads * size for shape in shapes for heads, size in
             (shape.key, shape.value)]  # fmt: skip
    return sum(sizes)


def peak(
    model: PreTrainedModel, drafter: Drafter | None, tree: Any, ids: Tensor, new_tokens: int
) -> int | None:
    """The most bytes allocated on a GPU while decoding [B, P], weights and all; None elsewhere.

    Whatever else is allocated counts too, so nothing else may hold a cache meanwhile.
    """
    if ids.device.type != "cuda":
        return None
    decode_texts(Speculator(model, drafter, tree=tree), list(ids), new_tokens)  # libraries' own
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(ids.device)
    decode_texts(Speculator(model, drafter, tree=tree), list(ids), new_tokens)
    return torch.cuda.max_memory_allocated(ids.device)
