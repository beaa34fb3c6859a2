"""Compares two drafters with their union at equal numbers of nodes, paired over prompts.

    python benchmarks/compare_union.py TARGET DRAFTER PROMPTS [--other lookup]
        [--limit 12] [--repeats 3] [--temperature 0] [--prefix-tokens 64]

PROMPTS is what `headstart bench --prompts` takes; windows of 64 tokens are continued by 128.
Every other window is measured, and on those between them DRAFTER's trees are fitted. Each prompt is
decoded in every way in turn, several times over: times are medians, and × plain is the median over
prompts of plain decoding's milliseconds per token by this way's. `ahead` counts the prompts on
which a way took fewer rounds than DRAFTER alone with as many nodes; `behind`, more.
"""

import argparse
import statistics
from typing import Any

import torch

import headstart
from headstart.heads import Drafter, load_drafter
from headstart.infer import Speculator, StaticTree, Union
from headstart.infer.measure.baselines import decode_in_turns, timed_speculator
from headstart.infer.measure.own_text import write_texts
from headstart.infer.measure.ranks import best_tree, measure_ranks
from headstart.train.data.reading import read_documents

SPLITS = {8: [(2, 6), (4, 4)], 12: [(4, 8), (8, 4)]}
"""For so many nodes, how many are DRAFTER's and the other's; the root is one of DRAFTER's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("target", "drafter", "prompts"):
        parser.add_argument(name)
    parser.add_argument("--other", default="lookup")
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prefix-tokens", type=int, default=64)
    options = parser.parse_args()
    loaded = headstart.load(options.target, options.drafter, compile=False)
    model, drafter, tokenizer = loaded.model, loaded.drafter, loaded.tokenizer
    assert isinstance(drafter, Drafter) and tokenizer is not None
    other = load_drafter(options.other, model, tokenizer)
    texts = [tokenizer(d.text)["input_ids"] for d in read_documents(options.prompts)]
    width = options.prefix_tokens
    windows = [t[at : at + width] for t in texts for at in range(0, len(t) - width + 1, width)]
    spaced = windows[:: max(len(windows) // (2 * options.limit), 1)][: 2 * options.limit]
    prompts = [torch.tensor(window) for window in spaced]
    ranks = measure_ranks(drafter, write_texts(model, drafter, prompts[1::2], 128))

    ways: dict[str, Speculator] = {"plain": Speculator(model)}
    for nodes, splits in SPLITS.items():
        whole = best_tree(ranks, nodes)
        ways[f"{nodes} alone"] = Speculator(model, drafter, tree=whole)
        ways[f"{nodes} {options.other}"] = Speculator(model, other, tree=f"chain:{nodes - 1}")
        for own, others in splits:
            tree = Union([StaticTree(best_tree(ranks, own)), StaticTree.chain(others)])
            ways[f"{nodes} union {own}+{others}"] = Speculator(model, [drafter, other], tree=tree)
    given: dict[str, Any] = {"max_new_tokens": 128, "do_sample": options.temperature > 0}
    if options.temperature > 0:
        given |= {"temperature": options.temperature, "top_k": 0, "seed": 0}
    report(ways, prompts[::2], options.repeats, given)


def report(
    ways: dict[str, Speculator], prompts: list[torch.Tensor], repeats: int, given: dict[str, Any]
) -> None:
    """Decode in turns, and print a line for each way."""
    decoders = {name: timed_speculator(speculator, **given) for name, speculator in ways.items()}
    runs: dict[str, list[Any]] = {name: [] for name in ways}
    counts: dict[str, list[tuple[int, int]]] = {name: [] for name in ways}
    grams: list[tuple[int, ...]] = []
    device = ways["plain"].device
    for prompt, found in decode_in_turns(decoders, prompts, device, repeats):
        text = found["plain"].tokens
        grams += [tuple(text[at : at + 4]) for at in range(len(text) - 3)]
        for name, speculator in ways.items():
            runs[name].append(found[name])
            counts[name].append((speculator.stats.tokens, speculator.stats.rounds))
            assert found[name].tokens == text, (name, prompt)
    print(f"{len(prompts)} prompts, distinct 4-grams {len(set(grams)) / len(grams):.2f}")
    for name in ways:
        tokens, rounds = (sum(column) for column in zip(*counts[name], strict=True))
        pairs = zip(runs["plain"], runs[name], strict=True)
        speedup = statistics.median(plain.per_token / mine.per_token for plain, mine in pairs)
        took = [run.decode_ms / n for run, (_, n) in zip(runs[name], counts[name], strict=True)]
        alone = counts.get(f"{name.split()[0]} alone", counts[name])
        both = list(zip(counts[name], alone, strict=True))
        fewer, more = sum(a[1] < b[1] for a, b in both), sum(a[1] > b[1] for a, b in both)
        print(
            f"{name:<18} τ {tokens / rounds:.2f}  {statistics.median(took):.2f} ms a round  "
            f"× plain {speedup:.2f}  ahead {fewer}, behind {more}",
            flush=True,
        )


if __name__ == "__main__":
    main()
