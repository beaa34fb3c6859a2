"""Seconds to the first token of each turn of a chat, with prefix caching and without.

    python -m benchmarks.prefixes TARGET [DRAFTER] --first 400 --turn 48 --new-tokens 48 --turns 6

The first prompt has `--first` made-up tokens; each further one is the text so far and `--turn`
more. Both ways take turns, and the texts are the same but for near-ties. The least of `--repeats`
chats, since what else runs on a machine only adds.
"""

import argparse
from typing import Any

import torch

import headstart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("drafter", nargs="?")
    for name, value in {
        "first": 400,
        "turn": 48,
        "new-tokens": 48,
        "turns": 6,
        "repeats": 5,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    ways = {
        caching: headstart.load(given.target, given.drafter, prefix_caching=caching)
        for caching in (False, True)
    }
    vocabulary = ways[True].model.config.get_text_config(decoder=True).vocab_size
    seconds: dict[bool, list[list[float]]] = {way: [[] for _ in range(given.turns)] for way in ways}
    lengths, kept, differing = list[int](), list[int](), 0
    for repeat in range(given.repeats + 1):  # the first one warms up
        draws = torch.Generator().manual_seed(repeat)
        ids = torch.randint(9, vocabulary, (1, given.first), generator=draws)
        lengths, kept = [], []
        for turn in range(given.turns):
            options: dict[str, Any] = {
                "attention_mask": torch.ones_like(ids), "max_new_tokens": given.new_tokens,
                "min_new_tokens": given.new_tokens, "do_sample": False,
            }  # fmt: skip
            texts = {}
            for way, speculator in ways.items():
                texts[way] = speculator.generate(ids, **options)
                if repeat:
                    seconds[way][turn].append(speculator.stats.prefill_seconds)
            lengths.append(ids.shape[1])
            kept.append(ways[True].stats.kept_tokens)
            differing += not torch.equal(texts[False], texts[True])
            more = torch.randint(9, vocabulary, (1, given.turn), generator=draws)
            ids = torch.cat([texts[False], more], 1)
    print("| turn | tokens | kept | ms, whole | ms, kept |\n|---|---|---|---|---|")
    for turn in range(given.turns):
        whole, part = (1e3 * min(seconds[way][turn]) for way in (False, True))
        print(f"| {turn + 1} | {lengths[turn]} | {kept[turn]} | {whole:.1f} | {part:.1f} |")
    print(f"{differing} of {(given.repeats + 1) * given.turns} texts differ")


if __name__ == "__main__":
    main()
