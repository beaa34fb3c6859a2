"""How fast a target writes training rows with a drafter and without, at each batch size.

    python benchmarks/distill_speed.py TARGET DRAFTER CORPUS [--batches 1 2 4 8 16 32 64]

Prompts are windows of CORPUS (a file as `corpus.source` takes it). Each batch size writes four
times as many texts as it has rows, greedily, rows being filled anew as they end; the last column is
the same without a drafter in batches that wait for their longest text. Every text's length is drawn
between an eighth of --new-tokens and all of it, as answers differ. Two rounds in turns, the faster
one counts; tokens are those written.
"""

import argparse
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headstart.infer import Speculator, load
from headstart.infer.prompts import Prompt
from headstart.infer.stream import decode_stream
from headstart.train.data.prefixes import make_prefixes
from headstart.train.data.reading import read_documents
from headstart.train.data.training_rows import write_rows
from headstart.train.recipe import Distill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("target", "drafter", "corpus"):
        parser.add_argument(name)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prefix-tokens", type=int, default=32)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.target).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    spec = Distill(prefix_tokens=options.prefix_tokens, new_tokens=options.new_tokens)
    documents = read_documents(options.corpus, answers=True)
    prefixes = make_prefixes(spec, tokenizer, documents)
    drawn = prefixes.draw(4 * max(options.batches), seed=0)
    lengths = torch.randint(
        options.new_tokens // 8, options.new_tokens + 1, (len(drawn),),
        generator=torch.Generator().manual_seed(1),
    ).tolist()  # fmt: skip
    prompts = [
        Prompt(number, prefixes[number].tolist(), length)
        for number, length in zip(drawn, lengths, strict=True)
    ]
    plain, drafted = Speculator(model), load(model, options.drafter, tokenizer=tokenizer)
    model.generation_config.eos_token_id = None  # the drawn lengths alone end a text
    longest = spec.prefix_tokens + spec.new_tokens
    print(f"tree {drafted.tree}, tokens a second")
    print("| batch | plain | with the drafter | ratio | plain, not filled anew |")
    print("|---|---|---|---|---|")
    for batch in options.batches:
        some = prompts[: 4 * batch]
        ways = {
            "plain": lambda s=some, b=batch: streamed(plain, s, b, longest),
            "drafted": lambda s=some, b=batch: streamed(drafted, s, b, longest),
            "waiting": lambda s=some, b=batch: waiting(plain, s, b, spec),
        }
        best = dict.fromkeys(ways, 0.0)
        for name in [*ways, *ways]:
            best[name] = max(best[name], speed(ways[name]))
        ratio = best["drafted"] / best["plain"]
        print(
            f"| {batch} | {best['plain']:.0f} | {best['drafted']:.0f} | {ratio:.2f} | "
            f"{best['waiting']:.0f} |",
            flush=True,
        )


def speed(write: Callable[[], int]) -> float:
    begun = time.perf_counter()
    tokens = write()
    return tokens / (time.perf_counter() - begun)


def streamed(speculator: Speculator, prompts: list[Prompt], batch: int, longest: int) -> int:
    ready = iter(prompts)
    found = decode_stream(speculator, lambda: next(ready, None), batch, longest)
    return sum(len(text) for _, text in found)


def waiting(speculator: Speculator, prompts: list[Prompt], batch: int, spec: Distill) -> int:
    """Batches of texts that all run to the longest one's end; only wanted tokens count."""
    for first in range(0, len(prompts), batch):
        some = prompts[first : first + batch]
        shape = Distill(
            prefix_tokens=spec.prefix_tokens, new_tokens=max(p.new_tokens for p in some)
        )
        write_rows(speculator, [torch.tensor(p.tokens) for p in some], [0] * len(some), shape)
    return sum(prompt.new_tokens for prompt in prompts)


if __name__ == "__main__":
    main()
