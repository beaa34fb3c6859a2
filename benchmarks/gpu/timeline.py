"""The launches of a captured round on a GPU, in their order: how long each takes, and what lies
between them.

    python -m benchmarks.gpu.timeline [--family NAME --tree TREE] [--shape 8b] [--context N]
                                      [--rows N] [--sampled] [--each]

Random weights (see `shapes`). Medians over the rounds of one request; sums by kernel, the longest
first, or each launch with `--each`. Tracing itself delays what the host launches between rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from headstart.cli import exit_status
from headstart.infer.speculator import Speculator
from headstart.terminal import UsageError

from .costs import random_prompt
from .shapes import SHAPES, random_drafter, random_target

_REPORT = "Memcpy DtoH"  # what a round ends with: its report, copied to the host
_TOKENS = 48  # decoded while they are traced
_WIDTH = 90  # of a kernel's name, which may be a whole template


@dataclass(frozen=True)
class Launched:
    """What a GPU did, in microseconds of its clock."""

    name: str
    begun: float
    took: float


@dataclass(frozen=True)
class Place:
    """A launch's place in a round: medians, in microseconds; `gap` is what lies before it."""

    name: str
    took: float
    gap: float


def places(launches: Sequence[Launched]) -> list[Place]:
    """The launches of a round, in order, of the kind of round that there are most of.

    Args:
        launches: of many rounds, by when they began. What came before the first report belongs to
            the prompt; a round's first gap begins with the end of the round before it.
    """
    rounds, now, end = [], list[tuple[str, float, float]](), 0.0
    for each in launches:
        now.append((each.name, each.took, each.begun - end))
        end = each.begun + each.took
        if each.name.startswith(_REPORT):
            rounds.append(now)
            now = []
    kinds = Counter(tuple(name for name, *_ in each) for each in rounds[1:])
    if not kinds:
        return []
    (kind, _), *_ = kinds.most_common(1)
    alike = [each for each in rounds[1:] if tuple(name for name, *_ in each) == kind]
    return [
        Place(column[0][0], *(statistics.median(each[part] for each in column) for part in (1, 2)))
        for column in zip(*alike, strict=True)
    ]


@torch.no_grad()
def trace(decoder: Speculator, ids: torch.Tensor, sampled: bool) -> list[Launched]:
    """What the GPU did while a request was decoded, whose rounds had been captured before."""
    from torch.profiler import ProfilerActivity, profile

    options = {"max_new_tokens": _TOKENS, "do_sample": sampled, "pad_token_id": 0}
    if sampled:
        options |= {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": list(range(len(ids)))}
    for _ in range(2):
        decoder.generate(ids, attention_mask=torch.ones_like(ids), **options)
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        decoder.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert record.profiler is not None and record.profiler.kineto_results is not None
    found = record.profiler.kineto_results.events()
    there = [each for each in found if each.device_type().name == "CUDA"]
    launches = [Launched(e.name(), e.start_ns() / 1e3, e.duration_ns() / 1e3) for e in there]
    return sorted(launches, key=lambda each: each.begun)


def lines_of(found: Sequence[Place], each: bool) -> Iterator[str]:
    """The table as it is printed."""
    took, gaps = (sum(getattr(place, part) for place in found) / 1e3 for part in ("took", "gap"))
    yield f"{len(found)} launches of {took:.3f} ms, and {gaps:.3f} ms between them"
    if each:
        for number, place in enumerate(found):
            yield f"{number:5d} {place.took:9.2f} µs  gap {place.gap:7.2f}  {place.name[:_WIDTH]}"
        return
    for name, own in _by_name(found):
        took, gaps = (sum(getattr(place, part) for place in own) for part in ("took", "gap"))
        yield f"{len(own):5d} {took:9.1f} µs  gaps {gaps:7.1f}  {name[:_WIDTH]}"


def _by_name(found: Iterable[Place]) -> list[tuple[str, list[Place]]]:
    own: dict[str, list[Place]] = defaultdict(list)
    for place in found:
        own[place.name].append(place)
    return sorted(own.items(), key=lambda item: -sum(each.took for each in item[1]))


def _run(chosen: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise UsageError("no GPU was found; a timeline is of what one does.")
    device = torch.device("cuda", torch.cuda.current_device())
    model = random_target(SHAPES[chosen.shape], device, torch.bfloat16)
    drafter = None if chosen.family is None else random_drafter(chosen.family, model)
    ids = random_prompt(model, chosen.context).expand(chosen.rows, -1).contiguous()
    found = places(trace(Speculator(model, drafter, tree=chosen.tree), ids, chosen.sampled))
    if not found:
        raise UsageError("no round was traced to its end; were rounds captured?")
    print("\n".join(lines_of(found, chosen.each)))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Decode, trace, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.timeline",
        description=" ".join((__doc__ or "").split(":")[0].split()),
    )
    parser.add_argument("--family", help="of the drafter (default: plain decoding)")
    parser.add_argument("--tree", default="plain", help="(default: plain)")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--each", action="store_true", help="each launch, in order")
    return exit_status("benchmarks.gpu.timeline", lambda: _run(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
