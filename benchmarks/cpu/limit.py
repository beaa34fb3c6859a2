"""Plain decoding and trees, as they are and on packed weights, against one read of the weights.

All ways to decode take turns on the same prompt, with the kernels that measure how fast memory is
read, and all tree sizes take turns on the same cache: a drift of the machine's speed meets all
alike. Each figure is a median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from tqdm import tqdm
from transformers.generation.configuration_utils import CompileConfig

from headstart.heads import TokenTree
from headstart.infer import Speculator
from headstart.infer.measure.baselines import Runs, TimedDecode, timed_generate, timed_speculator
from headstart.infer.measure.roofline import Roofline, reading_kernels, round_bytes
from headstart.infer.measure.round_parts import round_parts
from headstart.infer.measure.timing import Call, Stopwatch, interleaved, medians, take_turns
from headstart.infer.trees.static import StaticTree

from .shapes import SHAPES, greedy_after, prompt_of, random_llama

NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
_LOOPS = 5  # runs, and replays of their forwards, of which the loop is the difference
WAYS: dict[str, dict[str, Any]] = {"eager": {}, "packed": {"compile": True}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shape", action="append", choices=SHAPES, help="(default: 160m and 1b)")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    add("--prompt", type=int, default=128, help="tokens of the prompt")
    add("--new-tokens", type=int, default=64)
    add("--repeats", type=int, default=5)
    add("--megabytes", type=int, default=1024, help="MiB that measure the bandwidth")
    add("--nodes", type=int, action="append", help=f"of trees (default: {NODES})")
    add("--compiled", action="store_true", help="also generate with a static cache, compiled")


def run(options: argparse.Namespace) -> None:
    found = []
    for name in options.shape or ("160m", "1b"):
        found.append(measure(name, options))
        if not options.json:
            print_figures(found[-1])
    if options.json:
        print(json.dumps(found, indent=2))


def measure(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    model = random_llama(shape, getattr(torch, options.dtype))
    vocab, device = model.config.vocab_size, torch.device("cpu")
    ids = prompt_of(options.prompt, vocab)
    greedy = greedy_after(ids, options.new_tokens)
    ours = {name: Speculator(model, **how) for name, how in WAYS.items()}
    ways = {name: timed_speculator(each, **greedy) for name, each in ours.items()}
    ways["generate"] = timed_generate(model, **greedy)
    if options.compiled:
        ways["compiled generate"] = timed_generate(model, **static_and_compiled(), **greedy)
    size, kernels = reading_kernels(device, options.megabytes)
    watch = Stopwatch(device)
    reads = {f"read: {name}": partial(_read, watch, call) for name, call in kernels.items()}
    take_turns({**ways, **reads}, [ids])  # warms up
    repeats = tqdm([ids] * options.repeats, desc=f"{shape}: decode", file=sys.stderr)
    turns = take_turns({**ways, **reads}, repeats)
    runs = {name: Runs.of(turns[name], ids.shape[1]) for name in ways}
    taken = medians({name: turns[name] for name in reads})
    loops = {name: loop_share(each, ways[name], ids) for name, each in ours.items()}
    nodes = sorted({1, *(options.nodes or NODES)})
    forwards = {name: tree_costs(each, ids, nodes, options.repeats) for name, each in ours.items()}

    cache = ours["packed"].target.cache
    middle = options.prompt + options.new_tokens // 2
    reading = size / (min(taken.values()) * 1e-3)
    limit = Roofline(round_bytes(model, 1), cache.bytes_of(1, middle), reading)
    plain = {name: each.per_token for name, each in runs.items()}
    return {
        "shape": shape,
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "ms a token": plain,
        "bytes a round": limit.weights + limit.cache,
        "GB read a second": limit.bytes_per_s / 1e9,
        "GB read a second at best": size / min(min(turns[name]) for name in reads) / 1e6,
        "share of the limit": {name: limit.share(ms) for name, ms in plain.items()},
        "packed, times faster": {name: ms / plain["packed"] for name, ms in plain.items()},
        "same text": len({tuple(each.tokens) for each in runs.values()}) == 1,
        "loop's share of a round": loops,
        "ms of a tree's forward": forwards,
    }


def _read(watch: Stopwatch, call: Call, ids: torch.Tensor) -> float:
    """Milliseconds of a kernel that reads memory, in its turn between prompts."""
    return watch.time(call)


def static_and_compiled() -> dict[str, Any]:
    """Arguments with which `generate` compiles on a CPU; with a static cache alone it does not."""
    how: Any = CompileConfig(mode="default")
    how._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": how}


def loop_share(speculator: Speculator, decode: TimedDecode, ids: torch.Tensor) -> float:
    """The share of a plain round that is spent outside the target's forward."""
    taken = statistics.median(decode(ids).decode_ms for _ in range(_LOOPS))
    parts = round_parts(speculator, lambda: decode(ids), taken, _LOOPS)
    assert parts is not None
    return parts.loop / (parts.verify + parts.draft + parts.loop)


@torch.no_grad()
def tree_costs(
    speculator: Speculator, ids: torch.Tensor, nodes: Sequence[int], repeats: int
) -> dict[int, float]:
    """Milliseconds of the target's forward over trees of so many nodes."""
    target, length = speculator.target, ids.shape[1]
    target.prefill(ids, [length], length + max(nodes))
    lengths, work = torch.full_like(ids[:, 0], length), dict[int, Call]()
    for count in nodes:
        siblings = StaticTree([[rank] for rank in range(count - 1)])
        topology, row = siblings.shape(1, ids.device)
        tree = TokenTree(ids[:, :1].repeat(1, count), topology, None, row)
        work[count] = lambda tree=tree: target.verify(tree, lengths, length, True)
    return medians(interleaved(work, ids.device, repeats, 3))


def print_figures(found: dict[str, Any]) -> None:
    print(f"\n{found['shape']}, {found['dtype']}, {found['threads']} threads")
    reads, best = found["GB read a second"], found["GB read a second at best"]
    print(f"  this machine reads {reads:.1f} GB a second ({best:.1f} at best), a round must read "
          f"{found['bytes a round'] / 1e6:.0f} MB")  # fmt: skip
    print(f"  the same text in all ways: {'yes' if found['same text'] else 'no'}")
    for name, ms in found["ms a token"].items():
        share, times = found["share of the limit"][name], found["packed, times faster"][name]
        print(f"  {name:18} {ms:8.2f} ms a token   {share:5.2f} of the limit   packed is "
              f"{times:.2f} times as fast")  # fmt: skip
    for name, costs in found["ms of a tree's forward"].items():
        cells = "  ".join(f"{nodes}: {ms / costs[1]:.2f}" for nodes, ms in costs.items())
        share = found["loop's share of a round"][name]
        print(f"  {name}: the loop takes {share:.1%} of a round")
        print(f"  {name}: t(1) {costs[1]:.2f} ms; t(n)/t(1)  {cells}", flush=True)
