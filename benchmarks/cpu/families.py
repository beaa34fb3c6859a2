"""Trained drafters on their target: packed against not, and against transformers' own speculation.

Each family is decoded with `compile=True` and without, by its own tree, in turns: what packing is
worth at the same acceptance. A draft model and prompt lookup are also run as chains of several
lengths against `generate` with the same model as assistant, and with prompt lookup.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

import headstart
from headstart.heads.artifacts.source import DrafterSource
from headstart.infer import Speculator
from headstart.infer.measure.baselines import (
    TimedDecode,
    decode_in_turns,
    timed_generate,
    timed_speculator,
)
from headstart.infer.measure.noise import compare

_CHAINS = (5, 7, 12, 16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--drafter", metavar="DIR", action="append", required=True, help="artifacts of one target")
    add("--prompts", metavar="FILE", required=True, help="JSONL with text")
    add("--dtype", default="float32", choices=("bfloat16", "float32"))
    add("--limit", type=int, default=12, help="prompts")
    add("--prefix-tokens", type=int, default=64)
    add("--new-tokens", type=int, default=128)
    add("--repeats", type=int, default=3)
    add("--chain", type=int, action="append", help=f"(default: {_CHAINS})")


def run(options: argparse.Namespace) -> None:
    found = measure(options)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{found['target']}, {found['dtype']}, {found['threads']} threads, medians over prompts")
    for row in found["ways"]:
        print(
            f"  {row['way']:24} {row['ms']:7.2f} ms a token (tau {row['tau']:.2f}), "
            f"{row['times as fast']:.2f} times as fast as {row['against']} "
            f"{_interval(row)}; the same text: {row['same']}"
        )


def _interval(row: dict[str, Any]) -> str:
    return "" if row["low"] is None else f" ({row['low']:.2f}-{row['high']:.2f})"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    name = DrafterSource(options.drafter[0]).own_target
    dtype = getattr(torch, options.dtype)
    first = headstart.load(name, dtype=dtype, compile=False)
    model, tokenizer = first.model, first.tokenizer
    rows = []
    with Path(options.prompts).open(encoding="utf-8") as file:
        for line, _ in zip(file, range(options.limit), strict=False):
            text = json.loads(line)["text"]
            rows.append(tokenizer(text).input_ids[: options.prefix_tokens])  # type: ignore[misc]
    prompts = [torch.tensor(row) for row in rows]
    greedy: dict[str, Any] = {"max_new_tokens": options.new_tokens, "do_sample": False}
    pad = model.generation_config.pad_token_id or 0  # type: ignore[union-attr]

    def ours(drafter: Any, tree: Any, packed: bool) -> Speculator:
        return Speculator(model, drafter, tree=tree, tokenizer=tokenizer, compile=packed)

    def in_turns(way: str, fast: Speculator, against: str, other: TimedDecode) -> dict[str, Any]:
        ways = {way: timed_speculator(fast, **greedy), against: other}
        done = [
            runs for _, runs in decode_in_turns(ways, prompts, fast.device, options.repeats, way)
        ]
        times = {each: [runs[each].per_token for runs in done] for each in ways}
        ratio = compare(times[against], times[way])
        assert ratio is not None, "no text has a second token"
        return {
            "way": way, "against": against, "ms": statistics.median(times[way]),
            "other ms": statistics.median(times[against]), "tau": fast.stats.tau,
            "times as fast": ratio.median, "low": ratio.low, "high": ratio.high,
            "same": all(runs[way].tokens == runs[against].tokens for runs in done),
        }  # fmt: skip

    found, chains = [], options.chain or _CHAINS
    for folder in options.drafter:
        loaded = headstart.load(model, folder, tokenizer=tokenizer)
        family = DrafterSource(folder).manifest.family
        drafter, tree = loaded.drafter, loaded.tree
        packed, eager = (ours(drafter, tree, way) for way in (True, False))
        found.append(in_turns(family, packed, "as it is", timed_speculator(eager, **greedy)))
        for chain in chains if family in ("draft_model", "lookup") else ():
            if family == "lookup":
                given: dict[str, Any] = {"prompt_lookup_num_tokens": chain}
            else:
                assistant: Any = drafter.language_model  # type: ignore[union-attr]
                how = assistant.generation_config
                how.num_assistant_tokens, how.assistant_confidence_threshold = chain, 0.0
                how.num_assistant_tokens_schedule = "constant"
                given = {"assistant_model": assistant}
            other = timed_generate(model, **greedy, pad_token_id=pad, **given)
            fast = ours(drafter, f"chain:{chain}", True)
            found.append(in_turns(f"{family} chain:{chain}", fast, "generate", other))
    return {
        "target": name, "dtype": options.dtype, "threads": torch.get_num_threads(), "ways": found
    }  # fmt: skip
