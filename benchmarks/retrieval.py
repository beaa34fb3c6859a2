"""Tokens per round of retrieval, by how much text is kept, its settings, and the tree.

    python -m benchmarks.retrieval PATH/OF/stories260k

The model writes stories: 24 tokens by sampling, then 200 greedily or sampled, which are kept. In
the same way it continues the openings of other stories by 128 tokens.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.stories import story_writer
from headstart.heads import load_drafter
from headstart.heads.retrieval import Retrieval
from headstart.infer import Speculator
from headstart.infer.measure.own_text import decode_texts, write_texts
from headstart.infer.measure.ranks import best_tree, measure_ranks

SAMPLED, WRITTEN, BATCH, NEW = 24, 200, 250, 128
TEXTS = (100, 500, 2000, 8000)


def stories(model: Any, count: int, temperature: float) -> list[tuple[Tensor, Tensor]]:
    """Texts of the model, [SAMPLED + WRITTEN] each, and which tokens count as written by it."""
    found = []
    for seed in range(count // BATCH):
        torch.manual_seed(seed)
        start = torch.full((BATCH, 1), model.config.bos_token_id)
        how: dict[str, Any] = {"do_sample": True, "top_k": 0, "pad_token_id": 0}
        opened = model.generate(start, max_new_tokens=SAMPLED - 1, **how)
        how |= {"temperature": temperature} if temperature else {"do_sample": False}
        texts = model.generate(opened, max_new_tokens=WRITTEN, **how)
        found += [(text, torch.arange(len(text)) >= SAMPLED) for text in texts]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    model, prompts = story_writer(parser.parse_args().target)

    def made(texts: Sequence[Any], **options: Any) -> Retrieval:
        config: Any = Retrieval.config_class
        drafter = Retrieval(config.for_target(model, **options)).eval()
        drafter.collect(texts)
        return drafter.bind(model)

    def tell(name: str, drafter: Any, tree: Any, temperature: float = 0.0) -> None:
        speculator = Speculator(model, drafter, tree=tree)
        decode_texts(speculator, prompts, NEW, temperature)
        nodes, tau = speculator.tree.nodes, speculator.stats.tau
        print(f"{name:36} {tree!s:18.18} {nodes:4} nodes   τ {tau:.2f}", flush=True)

    for temperature in (0.0, 1.0):
        started = time.perf_counter()
        texts = stories(model, max(TEXTS), temperature)
        print(f"temperature {temperature:g}: {time.perf_counter() - started:.0f} s of writing")
        for count in TEXTS:
            started = time.perf_counter()
            drafter = made(texts[:count])
            size = f"{drafter.config.places / 1000:.0f}k tokens"
            print(f"{size}: put in order in {time.perf_counter() - started:.1f} s")
            for tree in ("chain:4", "chain:7", "best-first:8,3,7", "best-first:32,4,8"):
                tell(size, drafter, tree, temperature)
            written = write_texts(model, drafter, prompts, NEW, temperature=temperature)
            ranks = measure_ranks(drafter, written, 8, temperature=temperature)
            for nodes in (8, 32):
                tell(f"{size}, best by ranks", drafter, best_tree(ranks, nodes, 8), temperature)
        for key, value in (("matches", 1), ("matches", 8), ("matches", 128), ("max_match", 8)):
            drafter = made(texts, **{key: value})
            tell(f"all, {key} {value}", drafter, "best-first:32,4,8", temperature)
        for name in ("lookup", "recycling"):
            tell(name, load_drafter(name, model), "chain:7", temperature)
        both = [made(texts), load_drafter("lookup", model)]
        tell("all, and lookup", both, "best-first:32,4,8+chain:7", temperature)


if __name__ == "__main__":
    main()
