"""Tokens per round of suffix decoding, by what it has answered before.

    python -m benchmarks.suffix PATH/OF/stories260k

The model continues the openings of stories by 128 tokens: several samples of each opening, one
after another, and then many openings that it has written itself, once each.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.retrieval import stories
from benchmarks.stories import story_writer
from headstart.heads import load_drafter
from headstart.infer import Speculator
from headstart.infer.measure.own_text import decode_texts

NEW, SAMPLES, BATCH = 128, 8, 25
TREES = ("chain:7", "best-first:16,4,8", "best-first:32,4,16")


def tau(speculator: Speculator, prompts: Sequence[Tensor], temperature: float, seed: int) -> float:
    """Of prompts, decoded in one batch."""
    decode_texts(speculator, prompts, NEW, temperature, seed)
    return speculator.stats.tau


def samples(model: Any, prompts: Sequence[Tensor], temperature: float) -> None:
    """τ of the first, second, … sample of all prompts."""
    for name in ("lookup", "recycling", "suffix"):
        for tree in TREES if name == "suffix" else (None,):
            speculator = Speculator(model, load_drafter(name, model), tree=tree)
            found = [tau(speculator, prompts, temperature, 1000 * n) for n in range(SAMPLES)]
            means = "  ".join(f"{each:.2f}" for each in found)
            print(f"temperature {temperature:g}  {name:10} {tree or '':20} τ {means}", flush=True)


def growing(model: Any, openings: Sequence[Tensor], temperature: float) -> None:
    """τ of one batch of stories after another, the last of each doubling."""
    for name in ("lookup", "suffix"):
        speculator = Speculator(model, load_drafter(name, model), tree="best-first:16,4,8")
        found = {}
        for number in range(0, len(openings), BATCH):
            batch = openings[number : number + BATCH]
            found[number] = tau(speculator, batch, temperature, number)
        kept = [n for n in found if n == 0 or (n // BATCH).bit_count() == 1]
        means = "  ".join(f"{n}: {found[n]:.2f}" for n in kept)
        print(f"temperature {temperature:g}  {name:10} τ after so many stories {means}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    model, prompts = story_writer(parser.parse_args().target)
    for temperature in (0.5, 1.0):
        samples(model, prompts, temperature)
    openings = [text[:24] for text, _ in stories(model, 1000, 0.0)]
    for temperature in (0.0, 1.0):
        growing(model, openings, temperature)
    drafter: Any = load_drafter("suffix", model)
    drafter.remember(torch.arange(drafter.config.max_tokens) % 500, 1)
    started = time.perf_counter()
    for _ in range(20):
        drafter.remember(torch.randint(500, (600,)), 100)
    print(f"to keep an answer of 500 tokens: {50 * (time.perf_counter() - started):.1f} ms")


if __name__ == "__main__":
    main()
