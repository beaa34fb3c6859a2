"""How fast threads get their answers, decoded one after another and together.

    python benchmarks/batching.py TARGET DRAFTER PROMPTS [--threads 1 2 4 8] [--rows 1 2 4 8]

Each thread asks for one text after another, of prompts cut to --prefix-tokens, at --temperatures in
turn: by default greedily. A text's length is drawn between an eighth of --new-tokens and all of it,
as answers differ. All ways take turns, --repeats times; medians count. Columns are
`Batcher(rows=…)`: tokens a second of all threads together, and the median seconds until an answer
is whole.
"""

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from headstart.heads.core import use_physical_cores
from headstart.infer import Batcher, load
from headstart.train.data.reading import read_documents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("target", "drafter", "prompts"):
        parser.add_argument(name)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prefix-tokens", type=int, default=64)
    parser.add_argument("--texts", type=int, default=32, help="of all threads together")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    use_physical_cores()
    speculator = load(options.target, None if options.drafter == "none" else options.drafter)
    speculator.model.generation_config.eos_token_id = None  # the drawn lengths alone end a text
    tokenizer = speculator.tokenizer
    assert tokenizer is not None
    documents = read_documents(options.prompts, answers=True)
    texts = [str(document.text) for document in documents]
    ids = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
    ids = [each[:, : options.prefix_tokens] for each in ids if each.shape[1] > 1]
    lengths = torch.randint(
        options.new_tokens // 8, options.new_tokens + 1, (options.texts,),
        generator=torch.Generator().manual_seed(1),
    ).tolist()  # fmt: skip

    of_each = options.temperatures

    def ask(batcher: Batcher, threads: int) -> tuple[float, float]:
        """Tokens a second, and the median seconds of an answer."""

        def one(number: int) -> float:
            begun, temperature = time.perf_counter(), of_each[number % len(of_each)]
            how: dict[str, Any] = {"do_sample": False}
            if temperature:
                how = {"do_sample": True, "temperature": temperature, "top_k": 0, "seed": number}
            prompt = ids[number % len(ids)]
            batcher.generate(prompt, max_new_tokens=lengths[number], **how)
            return time.perf_counter() - begun

        begun = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            taken = list(pool.map(one, range(len(lengths))))
        return sum(lengths) / (time.perf_counter() - begun), statistics.median(taken)

    batchers = {rows: Batcher(speculator, rows) for rows in options.rows}
    print(f"tree {speculator.tree.label}, tokens a second (seconds of an answer)")
    print("| threads |" + "".join(f" rows={rows} |" for rows in options.rows))
    print("|---|" + "---|" * len(options.rows))
    for threads in options.threads:
        found: dict[int, list[tuple[float, float]]] = {rows: [] for rows in options.rows}
        for _ in range(options.repeats):
            for rows, batcher in batchers.items():
                found[rows].append(ask(batcher, threads))
        cells = []
        for turns in found.values():
            rate, seconds = (statistics.median(each) for each in zip(*turns, strict=True))
            cells.append(f" {rate:.0f} ({seconds:.2f}) |")
        print(f"| {threads} |" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
