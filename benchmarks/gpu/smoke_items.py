"""The items of `smoke`, by group: each is a name and a function that returns what it found."""

from __future__ import annotations

import gc
import math
import subprocess
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headstart.heads import FAMILIES, Drafter
from headstart.heads.core import FusedLayers
from headstart.heads.core.triton_here import no_kernel
from headstart.infer.batcher import Batcher
from headstart.infer.capture import CudaCapture
from headstart.infer.graphs import RoundGraphs
from headstart.infer.measure.costs import measure_costs
from headstart.infer.measure.lossless_greedy import compare_greedy
from headstart.infer.measure.own_text import write_texts
from headstart.infer.measure.timing import Stopwatch
from headstart.infer.speculator import Speculator

from .attention_ways import Layer, kernel, plain
from .attention_ways import Shape as LayerShape
from .bandwidth import copy_bandwidth
from .costs import usual_tree
from .machine import machine
from .paths import Fallback, watched_paths
from .shapes import SHAPES, random_drafter, random_target

Items = Iterator[tuple[str, Callable[[], dict[str, Any]]]]

TREES = {"static": "[[0],[1],[2],[0,0],[0,1]]", "dynamic": "best-first:6,2,3"}
NEW = 24


@dataclass(frozen=True)
class Place:
    """Where it runs, and at which size: `full` or `toy`."""

    device: torch.device
    size: str

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def full(self) -> bool:
        return self.size == "full"


def missing(place: Place) -> dict[str, Any]:
    """What an item says of missing kernels, if they are, see `without`."""
    reason = no_kernel(place.device)
    return {} if reason is None else without(place, reason)


def without(place: Place, reason: str) -> dict[str, Any]:
    """What an item says of a kernel that is missing; on a GPU it fails, for it judges another way.

    Raises:
        Fallback: on a GPU.
    """
    if place.on_gpu:
        raise Fallback(f"it would run without its kernel: {reason}")
    return {"kernel": reason}


@cache
def small_target(device: torch.device, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    return random_target(SHAPES["toy"], device, dtype)


@cache
def _drafter(name: str, device: torch.device) -> Drafter:
    return random_drafter(name, small_target(device))


def make_prompts(device: torch.device, batch: int, turn: int) -> Tensor:
    generator = torch.Generator().manual_seed(turn)
    return torch.randint(1, 500, (batch, 9 + turn), generator=generator).to(device)


def _texts(
    place: Place, name: str | None, batches: list[int], captured: bool = True, **options: Any
) -> list[tuple[Tensor, list[list[int]]]]:
    """Requests one after another, by a speculator of its own: texts, and what rounds emitted."""
    sampled = options.pop("sampled", False)
    drafter = None if name is None else _drafter(name, place.device)
    if drafter is not None and drafter.remembers:
        drafter.forget()
    speculator = Speculator(small_target(place.device), drafter, graphs=True, **options)
    if not captured:  # the same rounds, run as they are written
        speculator.graphs = RoundGraphs()
    texts = []
    for turn, batch in enumerate(batches):
        ids = make_prompts(place.device, batch, turn)
        given: dict[str, Any] = {"max_new_tokens": NEW, "pad_token_id": 0, "do_sample": sampled}
        if sampled:
            given |= {"temperature": 0.8, "top_k": 20, "seed": list(range(batch))}
        else:
            given |= {"suppress_tokens": [3, 4]}
        text = speculator.generate(ids, attention_mask=torch.ones_like(ids), **given)
        texts.append((text, speculator.stats.counts.tolist()))
    return texts


def _compared(place: Place, name: str | None, batches: list[int], **options: Any) -> dict[str, Any]:
    """Captured rounds against rounds as written; the former must have been captured."""
    with watched_paths() as paths:
        captured = _texts(place, name, batches, **options)
    paths.check()
    written = _texts(place, name, batches, captured=False, **options)
    for number, (ours, expected) in enumerate(zip(captured, written, strict=True), start=1):
        if not torch.equal(ours[0], expected[0]):
            raise AssertionError(f"request {number} wrote another text when captured")
        if ours[1] != expected[1]:
            raise AssertionError(f"request {number} accepted other drafts when captured")
    return {"requests": len(captured), **paths.to_dict()}


def about_machine(place: Place) -> Items:
    yield "versions", lambda: {**machine(place.device), "triton": _version("triton")}
    if place.on_gpu:
        yield "clocks", _clocks
    copies = [64, 1024] if place.full else [1, 4]
    yield "copies", lambda: copy_bandwidth(place.device, copies, 5)
    yield "products", lambda: _products(place)


def _version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _clocks() -> dict[str, Any]:
    asked = "clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"
    line = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=20, check=True)
    return dict(zip(asked.split(","), done.stdout.strip().split(", "), strict=False))


def _products(place: Place) -> dict[str, Any]:
    """How fast matrix products are, and reading a matrix for one row."""
    size, dtype = (8192, torch.bfloat16) if place.full else (128, torch.float32)
    square = torch.randn(size, size, dtype=dtype, device=place.device)
    row, watch = square[:1].clone(), Stopwatch(place.device)
    found = {}
    for name, work in (("square", lambda: square @ square), ("row", lambda: row @ square)):
        watch.time(work, 2)
        found[name] = min(watch.time(work, 5) for _ in range(3))
    return {
        "tflops": 2 * size**3 / found["square"] / 1e9,
        "row_gb_per_s": square.numel() * square.element_size() / found["row"] / 1e6,
    }


def kernels(place: Place) -> Items:
    for context in (2048, 32_768) if place.full else (70, 300):
        for tile in (None, (64, 64, 4), (128, 64, 8)):
            name = f"{context} tokens, {'its own tile' if tile is None else tile}"
            yield name, partial(_kernel, place, context, tile)


def _kernel(place: Place, context: int, tile: tuple[int, int, int] | None) -> dict[str, Any]:
    dtype = torch.bfloat16 if place.full else torch.float32
    shape = LayerShape(1, 8 if place.full else 2, 4, 128 if place.full else 16, 64, context)
    torch.manual_seed(0)
    layer = Layer.draw(shape, dtype, place.device)
    expected = plain(layer)().float()
    if (reason := no_kernel(place.device, dtype, shape.size)) is not None:
        return without(place, reason) | {"size": list(expected.shape)}
    from headstart.heads.core.kernels import Tile

    run = kernel(layer, **({} if tile is None else {"tile": Tile(*tile)}))
    difference = (run().float() - expected).abs().max().item()
    if not difference <= 2e-2:
        raise AssertionError(f"it differs from the definition by {difference:.2g}")
    watch = Stopwatch(place.device)
    watch.time(run, 5)
    milliseconds = min(watch.time(run, 10) for _ in range(3))
    return {
        "difference": difference,
        "ms": milliseconds,
        "gb_per_s": layer.floor / milliseconds / 1e6,
    }


def families(kind: str, sampled: bool, place: Place) -> Items:
    """Captured rounds of every family, with one kind of tree and one way to choose."""
    for batch, name in product((1, 3), FAMILIES):
        if not place.full and (batch == 1) != (kind == "static"):
            continue
        title = f"{name}, {kind}, {'coupled' if sampled else 'greedy'}, batch {batch}"
        given = {"tree": TREES[kind], "sampled": sampled}
        yield title, partial(_compared, place, name, [batch] * 3, **given)


def identity(place: Place) -> Items:
    """Greedy text in float32 against that of `generate`."""
    for number, name in enumerate(FAMILIES):
        yield name, partial(_identity, place, name, tuple(TREES)[number % len(TREES)])


def _identity(place: Place, name: str, kind: str) -> dict[str, Any]:
    model = small_target(place.device)
    with watched_paths() as paths:
        speculator = Speculator(model, _drafter(name, place.device), tree=TREES[kind], graphs=True)
        prompts = [make_prompts(place.device, 1, turn) for turn in range(3)]
        found = compare_greedy(speculator, prompts, 2 * NEW)
    paths.check()
    if not found.holds:
        raise AssertionError(f"it differs from `generate`: {found.divergences}")
    return {"tokens": found.tokens, "near_ties": len(found.divergences), **paths.to_dict()}


def lifetimes(place: Place) -> Items:
    """What requests make and take with them, while their graphs stay."""
    yield "batches", partial(_compared, place, "medusa", [1, 2, 3, 4, 5, 4, 3, 2, 1])
    yield "plain", partial(_compared, place, None, [1, 3, 1], tree="plain")
    yield "nine speculators in turn", partial(_nine, place)
    yield "requests of several threads", partial(_threads, place)
    yield "another thread during a capture", partial(_meanwhile, place)
    yield "a failed capture", partial(_failed_capture, place)


def _nine(place: Place) -> dict[str, Any]:
    model, drafter = small_target(place.device), _drafter("medusa", place.device)
    trees = [f"chain:{n}" for n in (1, 2, 3)] + [f"[[0],[{n}]]" for n in range(1, 7)]
    ours = [Speculator(model, drafter, tree=tree, graphs=True) for tree in trees]
    ids = make_prompts(place.device, 1, 0)
    texts = []
    for _ in range(3):
        for speculator in ours:
            texts.append(speculator.generate(ids, max_new_tokens=NEW, do_sample=False))
        gc.collect()
    if not all(torch.equal(text, texts[0]) for text in texts):
        raise AssertionError("a speculator writes another text")
    return {"replayed_rounds": [s.graphs.replayed for s in ours if s.graphs is not None]}


def _threads(place: Place) -> dict[str, Any]:
    """Together, in batches that grow and shrink, against each alone; in float64, without ties.

    Every third one is greedy, and the others are sampled, each by settings of its own.
    """
    model = small_target(place.device, torch.float64)
    drafter = random_drafter("medusa", model)
    speculator = Speculator(model, drafter, tree=TREES["static"], graphs=True)
    batcher, plain = Batcher(speculator, rows=4), Speculator(model, graphs=False)

    def text(decode: Any, turn: int) -> Tensor:
        ids = make_prompts(place.device, 1, turn)
        how: dict[str, Any] = {"do_sample": False}
        if turn % 3:
            how = {"do_sample": True, "seed": turn, "temperature": 0.5 + turn / 10, "top_k": 0}
            how |= {"top_p": 0.9} if turn % 2 else {"top_k": 20, "min_p": 0.01}
        return decode.generate(ids, max_new_tokens=8 + 8 * (turn % 5), **how)

    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(partial(text, batcher), range(12)))
    if not all(torch.equal(found, text(plain, turn)) for turn, found in enumerate(texts)):
        raise AssertionError("a thread got another text than alone")
    replayed = 0 if speculator.graphs is None else speculator.graphs.replayed
    if place.on_gpu and not replayed:
        raise AssertionError("no round was captured")
    return {"requests": len(texts), "replayed_rounds": replayed}


def _meanwhile(place: Place) -> dict[str, Any]:
    """What a capture does not record, and is not spoilt by: random numbers, and a read."""
    value, found = torch.ones(4, device=place.device), list[Any]()

    def elsewhere() -> float:
        return torch.rand(1000, device=place.device).mean().item()

    def work() -> None:
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(elsewhere).result())
        found.append(value + 1)

    replay = CudaCapture(value.device)(work) if place.on_gpu else work
    value.fill_(2)
    replay()
    if found[-1].tolist() != [3.0] * 4:
        raise AssertionError(f"a replay computed {found[-1].tolist()}")
    return {"mean": found[0]}


def _failed_capture(place: Place) -> dict[str, Any]:
    """A read of the device within a capture; decoding must go on as if nothing had been."""
    failed = "not captured on the CPU"
    if place.on_gpu:
        value, stream = torch.ones(4, device=place.device), torch.cuda.current_stream()
        try:
            CudaCapture(value.device)(lambda: value.sum().item())
            raise AssertionError("a read of the device was captured")
        except RuntimeError as error:
            failed = one_line_of(error)
        if torch.cuda.current_stream() != stream:
            raise AssertionError("the thread is left on the capture's stream")
        torch.rand(9, device=place.device).sum().item()
    return {"failed": failed, **_compared(place, "medusa", [2, 2, 2])}


def one_line_of(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [""])[0][:200]


def compiled(place: Place) -> Items:
    yield "the same text", partial(_compiled, place, {"compile": "default"})


def fused(place: Place) -> Items:
    yield "the same text", partial(_compiled, place, {"fused": True})
    yield "an 8 B shape's layers", partial(_fused_layers, place)


def _fused_layers(place: Place) -> dict[str, Any]:
    """What is fused, and for how many rows the products' kernels are no slower than torch's."""
    unfused = missing(place)
    found = FusedLayers(_large(place))
    if not all(found.found.values()):
        raise AssertionError(f"not all kinds of layers are fused: {found.found}")
    return {**found.found, "rows": found.rows, **unfused}


def _compiled(place: Place, how: dict[str, Any]) -> dict[str, Any]:
    """In float32, where rounding seldom matters."""
    ids = make_prompts(place.device, 1, 0)
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    with watched_paths() as paths:
        speculator = Speculator(small_target(place.device), **how)
        text = speculator.generate(ids, **options)
        seconds = speculator.stats.decode_seconds
        again = speculator.generate(ids, **options)
    paths.check()
    expected = Speculator(small_target(place.device)).generate(ids, **options)
    if not (torch.equal(text, expected) and torch.equal(again, expected)):
        raise AssertionError("such forwards write another text")
    return {"first_seconds": seconds, **paths.to_dict()}


def costs(place: Place) -> Items:
    for name in FAMILIES:
        yield name, partial(_costs, place, name)


def _costs(place: Place, name: str) -> dict[str, Any]:
    """What the planner measures is a time, and none is of memory that was gone."""
    model, drafter = small_target(place.device), _drafter(name, place.device)
    with watched_paths() as paths:
        texts = write_texts(model, drafter, list(make_prompts(place.device, 2, 3)), 12)
        found = measure_costs(model, drafter, texts, 8, min(3, drafter.max_depth or 3))
    paths.check()
    times = [found.plain, found.begin, *found.verify.values(), *found.extend.values()]
    if not all(math.isfinite(time) and time >= 0 for time in times) or found.plain <= 0:
        raise AssertionError(f"found times {times}")
    return {"costs": asdict(found), **paths.to_dict()}


def profile(place: Place) -> Items:
    """An 8 B shape's round of one token, and of 64 nodes."""
    for nodes, fused in product((1, 64), (False, True)):
        title = f"{nodes} nodes{', fused' if fused else ''}"
        yield title, partial(_profile, place, nodes, fused)


@cache
def _large(place: Place) -> PreTrainedModel:
    shape, dtype = ("8b", torch.bfloat16) if place.full else ("toy", torch.float32)
    return random_target(SHAPES[shape], place.device, dtype)


def _profile(place: Place, nodes: int, fused: bool) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    model = _large(place)
    medusa = random_drafter("medusa", model) if nodes > 1 else None
    tree = usual_tree(nodes, 4) if medusa is not None else "plain"
    ids = torch.randint(1, 500, (1, 2048 if place.full else 20)).to(place.device)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    with watched_paths() as paths:
        speculator = Speculator(model, medusa, tree=tree, fused=fused)
        for _ in range(2):
            speculator.generate(ids, **options)
    paths.check()
    found = speculator.stats
    rounds = len(found.counts)
    round_ms = 1e3 * found.decode_seconds / rounds
    activity = ProfilerActivity.CUDA if place.on_gpu else ProfilerActivity.CPU
    with profiled(activities=[activity]) as record:
        speculator.generate(ids, **options)
    times = times_by_name(record.events() or (), place)
    most = sorted(times, key=lambda name: -sum(times[name]))[:12]
    return {
        "round_ms": round_ms,
        "rounds": rounds,
        "launches_a_round": sum(map(len, times.values())) / rounds,
        "longest": {name: [sum(times[name]) / rounds, len(times[name]) / rounds] for name in most},
        **paths.to_dict(),
    }


def times_by_name(events: Iterable[Any], place: Place) -> dict[str, list[float]]:
    """Milliseconds of each launch on a GPU, or operator on the CPU, by its name.

    Beside what a GPU does the profiler records what the host calls for it: `cudaGraphLaunch`, say.
    """
    times: dict[str, list[float]] = {}
    for event in events:
        if place.on_gpu and event.device_type.name == "CPU":
            continue
        took = event.device_time_total if place.on_gpu else event.self_cpu_time_total
        times.setdefault(event.name[:80], []).append(took / 1e3)
    return times
