"""Sequoia's claims on this machine: larger trees pay only when optimal, and sampling stays robust.

    python benchmarks/sequoia.py TARGET DRAFTER PROMPTS OUT [--limit 32] [--part size,sampling]

Tree size: τ of optimal trees, of k chains from the root and of binary trees, to 512 nodes. It
comes from ranks recorded on the target's greedy text (`infer/measure/ranks.py`): trees are fitted
on one half of the texts and replayed on the other, and the halves exchanged. Sampling: τ of one
fixed tree, really decoded under the rule `rejection`, with children drawn without replacement, with
replacement, and the top k. Prompts are windows of 64 tokens, evenly spaced, continued by 64.

Writes OUT/sequoia.json, whose points of sampling a second run does not measure again, and
OUT/sequoia.png. τ depends on no clock, so a busy machine measures the same.

Source of the claims: Chen et al. 2024 (arXiv 2402.12374), figures 4 and 5.
"""

import argparse
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import headstart
from headstart.infer import Speculator
from headstart.infer.measure.own_text import write_texts
from headstart.infer.measure.ranks import acceptance, measure_ranks, replay
from headstart.infer.trees.optimal import OptimalTrees
from headstart.train.data.reading import read_documents

SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512)
DEPTH, WIDTH = 16, 64
TEMPERATURES, TOP_P = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2), (1.0, 0.8, 0.9)
EXPANSIONS = ("without_replacement", "with_replacement", "topk")
SAMPLED_TREE = "cartesian:4,2,1,1"
CHAINS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("target", "drafter", "prompts", "out"):
        parser.add_argument(name)
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--part", default="size,sampling")
    options = parser.parse_args()
    loaded = headstart.load(options.target, options.drafter, tree="plain", compile=False)
    assert loaded.tokenizer is not None
    texts = [loaded.tokenizer(d.text)["input_ids"] for d in read_documents(options.prompts)]
    windows = [text[at : at + 64] for text in texts for at in range(0, len(text) - 64, 64)]
    every = max(len(windows) // options.limit, 1)
    prompts = [torch.tensor(window) for window in windows[::every][: options.limit]]
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    kept = out / "sequoia.json"
    found = json.loads(kept.read_text()) if kept.is_file() else {}
    parts = options.part.split(",")
    if "size" in parts:
        found["size"] = by_size(loaded, prompts, options.new_tokens)
        kept.write_text(json.dumps(found, indent=1) + "\n")
    if "sampling" in parts:
        for done in by_sampling(loaded, prompts, options.new_tokens, found.get("sampling", {})):
            found["sampling"] = done
            kept.write_text(json.dumps(found, indent=1) + "\n")
    draw(found, out / "sequoia.png")


def by_size(loaded: Any, prompts: Sequence[torch.Tensor], new_tokens: int) -> dict[str, Any]:
    """τ by shape and nodes, with its standard error over texts."""
    texts = write_texts(loaded.model, loaded.drafter, prompts, new_tokens)
    depth = min(DEPTH, loaded.drafter.max_depth or DEPTH)
    ranks = measure_ranks(loaded.drafter, texts, depth)
    halves = ranks[::2], ranks[1::2]
    fitted = [OptimalTrees(acceptance(half, WIDTH), SIZES[-1], depth) for half in halves]
    found: dict[str, Any] = {"depth": depth, "texts": len(ranks)}
    for shape in ("optimal", "chains", "binary"):
        found[shape] = []
        for size in SIZES:
            counts = []
            for tree, half in zip(fitted, reversed(halves), strict=True):
                paths = tree.paths(size) if shape == "optimal" else fixed(shape, size, depth)
                done = replay(half, paths)
                counts += zip(done.tokens, done.rounds, strict=True)
            found[shape].append({"nodes": size, **ratio(counts)})
    return found


def fixed(shape: str, size: int, depth: int) -> list[list[int]]:
    """Rank paths of `size` nodes, the root counted: chains from the root, or two children a node.

    k chains are the drafter's k best first tokens, each followed by its best; as many as fit, and
    as long as the depth allows.
    """
    if shape == "binary":
        level, paths = [[]], []
        while len(paths) < size - 1 and len(level[0]) < depth:
            level = [[*path, rank] for path in level for rank in (0, 1)]
            paths += level
        return paths[: size - 1]
    count = max(math.ceil((size - 1) / depth), min(CHAINS, size - 1))
    long, more = divmod(size - 1, count)
    lengths = [long + (place < more) for place in range(count)]
    return [[k] + [0] * d for k, length in enumerate(lengths) for d in range(length)]


def by_sampling(
    loaded: Any, prompts: Sequence[torch.Tensor], new_tokens: int, found: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """τ by top-p, expansion and temperature, after each point; those in `found` are kept."""
    batch = torch.stack(list(prompts))
    points = found.get("points", [])
    known = {(p["expansion"], p["temperature"], p["top_p"]) for p in points}
    for top_p, expansion, temperature in itertools.product(TOP_P, EXPANSIONS, TEMPERATURES):
        if (expansion, temperature, top_p) in known:
            continue
        speculator = Speculator(
            loaded.model, loaded.drafter, tree=SAMPLED_TREE, rule="rejection", expansion=expansion
        )
        how: dict[str, Any] = {"temperature": temperature, "top_k": 0, "top_p": top_p}
        how |= {"do_sample": True, "max_new_tokens": new_tokens, "eos_token_id": None}
        speculator.generate(batch, seed=list(range(len(batch))), **how)
        counts = speculator.stats.counts
        pairs = list(zip(counts.sum(0).tolist(), (counts > 0).sum(0).tolist(), strict=True))
        point = {"expansion": expansion, "temperature": temperature, "top_p": top_p}
        points.append(point | ratio(pairs))
        print(points[-1], flush=True)
        yield {"tree": SAMPLED_TREE, "prompts": len(batch), "points": points}


def ratio(counts: Sequence[tuple[float, float]]) -> dict[str, float]:
    """τ and the standard error of that ratio over texts."""
    tokens, rounds = (sum(each) for each in zip(*counts, strict=True))
    tau, n = tokens / rounds, len(counts)
    spread = sum((t - tau * r) ** 2 for t, r in counts)
    return {"tau": tau, "se": math.sqrt(n / (n - 1) * spread) / rounds}


def draw(found: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    colors = ("#0072b2", "#d55e00", "#009e73")
    if "size" in found:
        labels = {"optimal": "optimal", "chains": "k chains", "binary": "binary"}
        for (shape, label), color in zip(labels.items(), colors, strict=True):
            points = found["size"][shape]
            sizes, taus = [p["nodes"] for p in points], [p["tau"] for p in points]
            left.errorbar(sizes, taus, [p["se"] for p in points], color=color, marker="o", ms=4,
                          capsize=2, label=label)  # fmt: skip
        left.set_xscale("log", base=2)
        left.set_xticks(SIZES, [str(size) for size in SIZES])
        left.set(xlabel="nodes of the tree, the root counted", ylabel="tokens a round, τ")
        left.set_title("Greedy: τ by tree size and shape", loc="left")
        left.set_ylim(bottom=1)
        left.legend(frameon=False)
    if "sampling" in found:
        names = {e: e.replace("_", " ").replace("topk", "top k") for e in EXPANSIONS}
        for (expansion, label), color in zip(names.items(), colors, strict=True):
            for top_p, style in zip(TOP_P, ("-", ":", "--"), strict=True):
                own = [p for p in found["sampling"]["points"]
                       if p["expansion"] == expansion and p["top_p"] == top_p]  # fmt: skip
                if len(own) < len(TEMPERATURES):  # not measured to the end yet
                    continue
                own.sort(key=lambda p: p["temperature"])
                right.plot([p["temperature"] for p in own], [p["tau"] for p in own], style,
                           marker="o", ms=3, color=color, lw=1.4,
                           label=f"{label}" if top_p == 1.0 else None)  # fmt: skip
        right.set(xlabel="temperature", ylabel="tokens a round, τ")
        title = f"Sampling: τ of {SAMPLED_TREE}; dotted: top-p 0.8, dashed: 0.9"
        right.set_title(title, loc="left", fontsize="medium")
        right.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
