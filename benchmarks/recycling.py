"""Tokens per round of token recycling, by its tree, its settings, and what it is shown.

    python -m benchmarks.recycling PATH/OF/stories260k

The model continues the openings of stories by 128 tokens, greedily, all in one batch.
"""

import argparse
from typing import Any

import torch
from torch import Tensor

from benchmarks.stories import story_writer
from headstart.heads import load_drafter
from headstart.heads.recycling import Recycling, RecyclingState
from headstart.infer import Speculator, Union, parse_tree
from headstart.infer.measure.own_text import decode_texts, write_texts
from headstart.infer.measure.ranks import best_tree, measure_ranks

NEW = 128


class WithoutPrompt(Recycling):
    """Its table is empty when the first round begins."""

    def prefill(
        self, state: RecyclingState, features: Tensor, tokens: Tensor, count: Tensor
    ) -> None:
        super().prefill(state, features, tokens, torch.zeros_like(count))


class RootsAlone(Recycling):
    """Shown nothing of a tree but its root."""

    def observe(self, state: RecyclingState, tokens: Tensor, logits: Tensor, true: Tensor) -> None:
        super().observe(state, tokens[:, :1], logits[:, :1], true[:, :1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    model, prompts = story_writer(parser.parse_args().target)

    def made(kind: type[Recycling] = Recycling, **options: Any) -> Recycling:
        config: Any = kind.config_class
        return kind(config.for_target(model, **options)).eval().bind(model)

    def tell(name: str, drafter: Any, tree: Any) -> None:
        speculator = Speculator(model, drafter, tree=tree)
        decode_texts(speculator, prompts, NEW)
        nodes, tau = speculator.tree.nodes, speculator.stats.tau
        print(f"{name:32} {nodes:4} nodes   τ {tau:.2f}", flush=True)

    drafter, lookup = made(), load_drafter("lookup", model)
    ranks = measure_ranks(drafter, write_texts(model, drafter, prompts, NEW), 6)
    best = {nodes: best_tree(ranks, nodes, width=8) for nodes in (8, 16, 32, 64)}
    tell("chain:4", drafter, "chain:4")
    for nodes, tree in best.items():
        tell(f"best of {nodes} by ranks", drafter, tree)
    tell("its own tree", drafter, None)
    for chain in ("chain:4", "chain:7"):
        tell(f"lookup, {chain}", lookup, chain)
    for nodes in (16, 64):
        union = Union([parse_tree(best[nodes]), parse_tree("chain:7")])
        tell(f"best of {nodes} and lookup, chain:7", [drafter, lookup], union)
    tell("64, without the prompt", made(WithoutPrompt), best[64])
    tell("64, of each tree the root", made(RootsAlone), best[64])
    for successors in (1, 2, 4, 16):
        tell(f"64, {successors} successors", made(successors=successors), best[64])


if __name__ == "__main__":
    main()
