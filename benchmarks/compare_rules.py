"""Compares acceptance rules by tokens per round when sampling, paired over prompts.

    python benchmarks/compare_rules.py TARGET DRAFTER PROMPTS [--limit 128] [--seeds 1]

PROMPTS is what `headstart bench --prompts` takes; windows of 64 tokens of it, evenly spaced, are
continued by 128 at temperature 1. A t above about 2 is a difference that chance seldom makes.
"""

import argparse
import math

import numpy as np
import torch

import headstart
from headstart.infer import Speculator
from headstart.train.data.reading import read_documents

Way = tuple[str, str, str | None]  # tree, rule, expansion
PAIRS: list[tuple[Way, Way]] = [
    (
        ("cartesian:4,2,1", "rejection", "without_replacement"),
        ("cartesian:4,2,1", "rejection", "with_replacement"),
    ),
    (("cartesian:4,2,1", "traversal", None), ("cartesian:4,2,1", "rejection", None)),
    (("cartesian:3,2,1,1", "traversal", None), ("cartesian:3,2,1,1", "rejection", None)),
    (("chain:5", "block", None), ("chain:5", "rejection", None)),
    (("cartesian:4,2,1", "coupled", None), ("cartesian:4,2,1", "rejection", None)),
    (("cartesian:8,2", "coupled", None), ("cartesian:8,2", "rejection", None)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("target", "drafter", "prompts"):
        parser.add_argument(name)
    parser.add_argument("--limit", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    loaded = headstart.load(options.target, options.drafter, compile=False)
    assert loaded.tokenizer is not None
    texts = [loaded.tokenizer(d.text)["input_ids"] for d in read_documents(options.prompts)]
    windows = [t[at : at + 64] for t in texts for at in range(0, len(t) - 64, 64)]
    ids = torch.tensor(windows[:: max(len(windows) // options.limit, 1)][: options.limit])
    print(f"{len(ids)} prompts, {options.seeds} seeds")

    known: dict[Way, tuple[np.ndarray, float]] = {}
    for pair in PAIRS:
        for way in pair:
            known[way] = known[way] if way in known else measure(loaded, ids, options.seeds, way)
        (one, whole_one), (other, whole_other) = known[pair[0]], known[pair[1]]
        apart = one - other
        t = apart.mean() / (apart.std(ddof=1) / math.sqrt(len(apart)))
        names = [" ".join(filter(None, way)) for way in pair]
        print(
            f"{names[0]}: {whole_one:.4f}; {names[1]}: {whole_other:.4f}; "
            f"ratio {whole_one / whole_other:.4f}, t {t:.1f}",
            flush=True,
        )


def measure(
    loaded: Speculator, ids: torch.Tensor, seeds: int, way: Way
) -> tuple[np.ndarray, float]:
    """Tokens per round of each prompt, [P], and of all together."""
    tree, rule, expansion = way
    speculator = Speculator(loaded.model, loaded.drafter, tree=tree, rule=rule, expansion=expansion)
    tokens, rounds = np.zeros(len(ids)), np.zeros(len(ids))
    for seed in range(seeds):
        for first in range(0, len(ids), 32):
            batch = ids[first : first + 32]
            speculator.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=128,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                seed=[(seed << 20) + first + row for row in range(len(batch))],
            )
            counts = speculator.stats.counts  # [rounds, B]
            tokens[first : first + 32] += counts.sum(0)
            rounds[first : first + 32] += (counts > 0).sum(0)
    return tokens / rounds, float(tokens.sum() / rounds.sum())


if __name__ == "__main__":
    main()
