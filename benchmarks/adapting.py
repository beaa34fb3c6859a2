"""τ of a drafter before and after `headstart adapt`, on requests unlike its training text.

The prompts are windows of any texts; the drafter's own target answers them, and the answers are
recorded and adapted to. Each of --try, settings with spaces between them, is one more
adaptation to the same requests.

    headstart train benchmarks/stories260k.yaml
    python -m benchmarks.adapting runs/stories260k/heads \\
        ../shared/data/standard_ebooks_stories/stories.jsonl.gz --try distill.earlier_share=0
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import headstart
from headstart.cli import parse
from headstart.commands import adapt
from headstart.train.data.prefixes import make_prefixes
from headstart.train.data.reading import read_documents
from headstart.train.recipe import Distill

_BATCH = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("drafter")
    add("texts", help="what a corpus reads")
    add("--requests", type=int, default=700)
    add("--prefix-tokens", type=int, default=40)
    add("--new-tokens", type=int, default=96)
    add("--temperature", type=float, default=0.0)
    add("--folder", type=Path, default=Path("runs"), help="where the traffic and the runs go")
    add("--try", dest="tries", action="append", default=[], metavar="SETTINGS")
    options = parser.parse_args()
    traffic = options.folder / f"traffic-{options.temperature:g}.jsonl"
    traffic.unlink(missing_ok=True)
    started = time.perf_counter()
    record(options, traffic)
    print(f"recorded in {time.perf_counter() - started:.0f} s", flush=True)
    for number, override in enumerate(["", *options.tries]):
        out = options.folder / f"adapted-{options.temperature:g}-{number}"
        words = ["adapt", "--drafter", options.drafter, "--traffic", str(traffic)]
        given = parse([*words, "--out", str(out), *override.split()])
        print(override or "as it is", flush=True)
        adapt.run(given)


def record(options: argparse.Namespace, traffic: Path) -> None:
    """Let the target answer windows of the texts, with its drafter."""
    recorder = headstart.Recorder(traffic, headstart.load(None, options.drafter))
    tokenizer: Any = recorder.speculator.tokenizer
    spec = Distill(prefix="window", prefix_tokens=options.prefix_tokens)
    prefixes = make_prefixes(spec, tokenizer, read_documents(options.texts))
    prompts = [prefixes[number] for number in prefixes.draw(options.requests, seed=0)]
    how: dict[str, Any] = {"do_sample": False}
    for first in range(0, len(prompts), _BATCH):
        ids = torch.stack(prompts[first : first + _BATCH])
        if options.temperature:
            seeds = list(range(first, first + len(ids)))
            how = {"do_sample": True, "temperature": options.temperature, "top_k": 0, "seed": seeds}
        recorder.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=options.new_tokens, **how
        )


if __name__ == "__main__":
    main()
