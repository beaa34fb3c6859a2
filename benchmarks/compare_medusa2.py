"""Compares drafters that were trained on one target by tokens per round, paired over prompts.

    python benchmarks/compare_medusa2.py TARGET HELD_OUT DRAFTER [DRAFTER …] [--limit 192]

HELD_OUT is a run's corpus/held_out.jsonl; prompts are those that the benchmark stage draws from it,
64 tokens each, continued greedily by 128. A drafter with an adapter is measured twice: on what its
adapted target writes, as it decodes; and on what the target wrote without it (`forced`), where
better heads are told from other text. A t above about 2 is a difference that chance seldom makes.
"""

import argparse
import math
from collections.abc import Sequence

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headstart.heads import Drafter, load_drafter
from headstart.heads.core import capture
from headstart.infer import StaticTree, parse_static
from headstart.infer.measure.own_text import Written, write_texts
from headstart.infer.measure.ranks import measure_ranks, replay
from headstart.train.data.held_out import held_out_prompts, held_out_texts
from headstart.train.data.reading import read_documents
from headstart.train.fit.joint import text_loss

CHAIN = StaticTree.chain(4).paths
Rounds = tuple[np.ndarray, np.ndarray]
"""Tokens and rounds of each prompt, [P] each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("target", "held_out"):
        parser.add_argument(name)
    parser.add_argument("drafters", nargs="+")
    parser.add_argument("--limit", type=int, default=192)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    documents = list(read_documents(options.held_out))
    drawn = held_out_prompts(tokenizer, documents, options.limit, 64)
    prompts = [prompt.tokens for prompt in drawn]
    held_out = held_out_texts(tokenizer, documents, 64)
    first: list[Rounds] = []
    base: list[torch.Tensor] = []
    for folder in options.drafters:
        target = AutoModelForCausalLM.from_pretrained(options.target).eval()
        plain = text_loss(target, held_out)
        drafter = load_drafter(folder, target, tokenizer).eval()
        if not base:
            fresh = AutoModelForCausalLM.from_pretrained(options.target).eval()
            base = [text.tokens for text in write_texts(fresh, drafter, prompts, 128)]
        texts = write_texts(target, drafter, prompts, 128)
        ranks = measure_ranks(drafter, texts)
        tree = parse_static(f"{folder}/tree.json")
        found = [rounds(ranks, CHAIN), rounds(ranks, tree.paths)]
        found.append(rounds(measure_ranks(drafter, read(drafter, base)), CHAIN))
        first = first or found
        same = [torch.equal(one.tokens, other) for one, other in zip(texts, base, strict=True)]
        print(
            f"{folder}: chain {against(found[0], first[0])}; {tree.nodes} nodes "
            f"{against(found[1], first[1])}; forced chain {against(found[2], first[2])}; texts as "
            f"the base's {np.mean(same):.2f}, distinct 4-grams of each text {distinct(texts):.3f}; "
            f"held-out loss {text_loss(target, held_out) / plain - 1:+.2%}",
            flush=True,
        )


@torch.no_grad()
def read(drafter: Drafter, texts: list[torch.Tensor]) -> list[Written]:
    """Texts [T] as the target reads them, of which the first 64 tokens are the prompt."""
    layers = list(drafter.config.feature_layers)
    features = (capture(drafter.target, layers, text[None])[0].clone() for text in texts)
    return [Written(*each, 64) for each in zip(texts, features, strict=True)]


def rounds(ranks: list[torch.Tensor], paths: Sequence[Sequence[int]]) -> Rounds:
    played = replay(ranks, paths)
    return np.array(played.tokens), np.array(played.rounds)


def against(found: Rounds, first: Rounds) -> str:
    """τ with its standard error, and t of the difference from the first drafter's."""
    (tau, own), (_, other) = estimate(*found), estimate(*first)
    apart, error = tau - estimate(*first)[0], (own - other).std(ddof=1) / math.sqrt(len(own))
    change = f", {apart:+.3f} t {apart / error:.1f}" if error else ""
    return f"{tau:.3f} ± {own.std(ddof=1) / math.sqrt(len(own)):.3f}{change}"


def estimate(tokens: np.ndarray, taken: np.ndarray) -> tuple[float, np.ndarray]:
    """τ, and each prompt's part in its error (a ratio's linearisation)."""
    tau = tokens.sum() / taken.sum()
    return float(tau), (tokens - tau * taken) / taken.mean()


def distinct(texts: list[Written]) -> float:
    """The share of distinct 4-grams in what was written, the mean over texts."""
    shares = []
    for text in texts:
        ids = text.tokens[text.prompt :].tolist()
        grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
        shares.append(len(set(grams)) / len(grams))
    return float(np.mean(shares))


if __name__ == "__main__":
    main()
