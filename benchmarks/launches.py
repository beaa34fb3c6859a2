"""What a round of the target launches, reads and writes, as it is and with fused layers.

    python -m benchmarks.launches [--nodes 1 64] [--context 2048] [--vocabulary 128256]
                                  [--capability 90]

Counted on the CPU, at the layer shape of Llama-3-8B in bfloat16: launches and bytes under a
dispatch mode, which sees each operator as a GPU's stream would; programs, shared memory, registers
and spills of the Triton kernels from what compiles for a GPU that need not be there. A layer is the
difference of models with two layers and with one. Nothing here is a time.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headstart.heads import TokenTree
from headstart.heads.core import fused as fused_layers
from headstart.heads.core import tree_attention, tree_lines
from headstart.infer.target import Target
from headstart.infer.trees.static import StaticTree

from . import drafter_launches, rule_launches
from .gpu.shapes import SHAPES, random_target

_FREE = ("empty", "new_empty", "_unsafe_view", "_reshape_alias")
_PICKED = ("embedding", "gather", "index_select", "index_copy", "index_copy_", "write")
"""Operators that read of a large tensor what they pick, or write what they are given."""


class Counts(TorchDispatchMode):
    """Counts the operators that a GPU would launch a kernel for: all but views and empty tensors.

    Attributes:
        launches: of all; bytes: read and written, each tensor once for each launch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.bytes = 0
        self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        aliases = [entry.alias_info for entry in func._schema.returns]
        views = bool(aliases) and all(a is not None and not a.is_write for a in aliases)
        name = func.overloadpacket.__name__
        if views or self._paused or name.startswith(_FREE):
            return found
        self.launches += 1
        given = [_size(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = sum(_size(leaf) for leaf in tree_leaves(found) if isinstance(leaf, Tensor))
        if name == "rotate_and_write":  # the slots alone of the cache, of the size of what is given
            key, value, cache = args[1], args[7], args[4:6]
            self.bytes += sum(given) - sum(map(_size, cache)) + made + _size(key) + _size(value)
        elif name in _PICKED:  # twice what is moved, and the numbers of where
            moved = sum(given) - max(given) if name.startswith(("index_copy", "write")) else made
            moved -= max(given) if name == "write" else 0
            self.bytes += 2 * moved
        else:
            self.bytes += sum(given) + made
        return found

    @contextmanager
    def as_many(self, launches: int, size: int = 0) -> Iterator[None]:
        """Count what is done meanwhile as so many launches, and bytes."""
        self.launches, self.bytes, self._paused = self.launches + launches, self.bytes + size, True
        try:
            yield
        finally:
            self._paused = False


def _size(tensor: Tensor) -> int:
    """Bytes that a tensor has in memory; what is expanded stands there once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.itemsize


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """A context in which layers are fused, and run, by operators of our own, as on a GPU."""
    with ExitStack() as patches:
        for module in (fused_layers, tree_lines):
            patches.enter_context(mock.patch.object(module, "_directly", lambda states: False))
        yield


@torch.no_grad()
def count_forward(runner: Target, nodes: int, context: int) -> Counts:
    """A forward over a tree of so many nodes behind a text; tree attention is two kernels.

    Fused operators count as the kernels that they are on a GPU, which a CPU calls torch's own for.
    """
    counted, true = Counts(), tree_attention.tree_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, packed: Tensor, *rest: Any) -> Tensor:
        live = (context + nodes) / key.shape[2]  # of the slots, which the kernel's loop ends at
        size = int(live * (_size(key) + _size(value))) + 2 * _size(query) + _size(packed)
        with counted.as_many(2, size):
            return true(query, key, value, packed, *rest)

    ids = torch.arange(context).view(1, -1) % 100
    runner.prefill(ids, [context], context + nodes)
    topology, row = StaticTree([[rank] for rank in range(nodes - 1)]).shape(1, ids.device)
    tree = TokenTree(ids[:, :1].expand(1, nodes), topology, None, row)
    with as_on_a_gpu(), mock.patch.object(tree_attention, "tree_attention", attend):
        runner.verify(tree, torch.tensor([context]), context)  # layers show that they hand on
        counted = Counts()
        with counted:
            runner.verify(tree, torch.tensor([context]), context)
    return counted


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel: which, in how many programs, and what it was given."""

    kernel: Any
    grid: tuple[int, ...]
    given: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def programs(self) -> int:
        """How many."""
        return int(torch.tensor(self.grid).prod())

    def compiled(self, capability: int) -> dict[str, Any]:
        """Shared bytes and warps of a program, registers of a thread and bytes that it spills.

        And its name in Triton's cache, and the seconds of a core until it was there.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            begun = sum(os.times()[:4])  # of this process, and of the assembler that it runs
            made = self.compile(capability)
            seconds = sum(os.times()[:4]) - begun
        found = {"shared": made.metadata.shared, "warps": made.metadata.num_warps}
        found |= {"name": made.hash, "seconds": seconds}
        return found | of_ptxas(made.asm["ptx"])

    def compile(self, capability: int) -> Any:
        """What Triton makes of the kernel for this launch, on a GPU that need not be there.

        Triton itself finds types, constants and what is a multiple of 16, as when it launches.
        """
        from triton.runtime import driver  # type: ignore[import-not-found]

        with mock.patch.object(driver, "_active", _Absent(capability)):
            return self.kernel.warmup(*self.given, grid=self.grid, **self.options)


class _Absent:
    """In the place of Triton's driver: a GPU of a capability, which nothing can be run on."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_device(self) -> int:
        """A number of its own for each capability, since Triton keeps kernels by it."""
        return self.capability

    def get_current_stream(self, device: int) -> int:
        """None that is used."""
        return 0

    def get_current_target(self) -> Any:
        """What is compiled for."""
        from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]

        return GPUTarget("cuda", self.capability, 32)


def of_ptxas(ptx: str) -> dict[str, int]:
    """Registers and spills; nothing where the assembler that comes with triton fails."""
    import triton.backends.nvidia as backend  # type: ignore[import-not-found]

    name = re.findall(r"^\.target (\S+?),?$", ptx, re.MULTILINE)[0].rstrip(",")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx, encoding="utf-8")
        for ptxas in sorted((Path(next(iter(backend.__path__))) / "bin").glob("ptxas*")):
            line = [str(ptxas), "-v", f"--gpu-name={name}", str(file), "-o", f"{folder}/out"]
            done = subprocess.run(line, capture_output=True, text=True)
            said = done.stdout + done.stderr
            used = re.search(r"Used (\d+) registers", said)
            spilled = re.search(r"(\d+) bytes spill stores", said)
            if used and spilled:
                return {"registers": int(used[1]), "spilled": int(spilled[1])}
    return {}


def recorded(module: Any, names: Sequence[str], call: Callable[[], Any]) -> list[Launch]:
    """The launches of a module's kernels, named by those, that a call would make; none is."""
    found: list[Launch] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *given, **options: found.append(Launch(self.kernel, grid, given, options))

    recorders: Any = {name: Recorder(getattr(module, name)) for name in names}
    with mock.patch.multiple(module, **recorders):
        call()
    return found


def kernel_launches(nodes: int, context: int, vocabulary: int = 128_256) -> dict[str, Launch]:
    """Each kernel of a layer of that shape, as it would be launched; nothing is computed."""
    from headstart.heads.core import fused_kernels, kernels, product_kernels

    shape = SHAPES["8b"]
    hidden, inner, heads = shape.hidden, shape.intermediate, shape.kv_heads
    size = hidden // shape.heads

    def states(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16)

    some, gate = states(1, nodes, hidden), states(1, nodes, inner)
    query, key = (states(1, nodes, count, size).transpose(1, 2) for count in (4 * heads, heads))
    angle, slots = states(1, nodes, size), torch.zeros(nodes, dtype=torch.int64)
    cached = states(context + 64, heads, size)
    three = [states(count * size, hidden) for count in (4 * heads, heads, heads)]
    packed = torch.empty(1, 1, nodes, 2 + nodes, dtype=torch.int32)
    slab = cached.unsqueeze(0).transpose(1, 2)  # [1, H, S, D]
    calls: dict[str, tuple[Any, Sequence[str], Callable[[], Any]]] = {
        "norm": (fused_kernels, ["_norm"],
                 lambda: fused_kernels.rms_norm(some, states(hidden), 1e-5)),
        "sum and norm": (fused_kernels, ["_add_norm"],
                 lambda: fused_kernels.add_norm(some, some, states(hidden), 1e-5)),
        "queries, keys and values": (product_kernels, ["_three"],
                 lambda: product_kernels.three_layers(some, three, [])),
        "cosines and sines": (fused_kernels, ["_angles"],
                 lambda: fused_kernels.angles(
                     slots.view(1, -1), torch.ones(size // 2), 1.0, torch.bfloat16)),
        "rotary and cache write": (fused_kernels, ["_turn"],
                 lambda: fused_kernels.rotate(
                     query, key, angle, angle, (cached, cached, slots, key))),
        "attention": (kernels, ["_attend", "_merge"],
                 lambda: kernels.split_attention(query, slab, slab, packed, 0.1)),
        "gated layers": (product_kernels, ["_gated"],
                 lambda: product_kernels.gated_layers(some, [states(inner, hidden)] * 2, [])),
        "one layer": (product_kernels, ["_one"],
                 lambda: product_kernels.one_layer(some, three[:1], [])),
        "output layer": (product_kernels, ["_one"],
                 lambda: product_kernels.one_layer(some, [states(vocabulary, hidden)], [])),
        "gated product": (fused_kernels, ["_gated"],
                 lambda: fused_kernels.gated(gate, gate)),
    }  # fmt: skip
    calls |= rule_launches.kernel_calls(nodes, vocabulary)
    launches: dict[str, Launch] = {}
    for name, (module, parts, call) in calls.items():
        with mock.patch.object(kernels, "processors", lambda device: 132):  # an H100's
            found = recorded(module, parts, call)
        for part, launch in zip(parts, found, strict=True):
            launches[name if part == parts[0] else f"{name}, {part[1:]}"] = launch
    return launches


def _target(layers: int, fused: bool) -> Target:
    shape = replace(SHAPES["8b"], layers=layers, vocab=128)
    model = random_target(shape, torch.device("cpu"), torch.bfloat16)
    with as_on_a_gpu():
        return Target(model, (), "tree", fused=fused)


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, and print both tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.launches", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=128_256, help="of the rules' scores")
    parser.add_argument("--capability", type=int, default=90, help="of the GPU compiled for")
    chosen = parser.parse_args(arguments)
    print("| nodes | layers | launches a layer | launches beside | MB a layer | MB beside |")
    print("|---|---|---|---|---|---|")
    for nodes in chosen.nodes:
        for fused in (False, True):
            one, two = (count_forward(_target(n, fused), nodes, chosen.context) for n in (1, 2))
            launches, size = two.launches - one.launches, (two.bytes - one.bytes) / 1e6
            print(
                f"| {nodes} | {'fused' if fused else 'as they are'} | {launches} | "
                f"{one.launches - launches} | {size:.2f} | {one.bytes / 1e6 - size:.2f} |"
            )
    print("\n| drafter of one layer | nodes of a level | launches |\n|---|---|---|")
    for family, width in product(drafter_launches.FAMILIES, (1, 8)):
        counted, _ = drafter_launches.count_level(family, width, Counts, as_on_a_gpu)
        print(f"| {family} | {width} | {counted.launches} |")
    print("\n| drafter that matches texts | matches | a level |\n|---|---|---|")
    for family in drafter_launches.MATCHING:
        begun, level = drafter_launches.count_matching(family, Counts)
        print(f"| {family} | {begun.launches} | {level.launches} |")
    print("\n| sampling | without kernels | with |\n|---|---|---|")
    for name, apart, together in rule_launches.rows(chosen.vocabulary, Counts):
        print(f"| {name} | {apart.launches} | {together.launches} |")
    if importlib.util.find_spec("triton") is None:
        print("\nWithout triton there are no kernels to compile.")
        return 0
    with (
        tempfile.TemporaryDirectory() as empty,
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=empty),
    ):
        _print_compiled(chosen.nodes, chosen.context, chosen.vocabulary, chosen.capability)
    return 0


def _print_compiled(nodes: list[int], context: int, vocabulary: int, capability: int) -> None:
    print("\n| kernel | nodes | programs | warps | shared bytes | registers | spilled bytes |")
    print("|---|---|---|---|---|---|---|")
    seconds: dict[str, float] = {}
    for count in nodes:
        for name, launch in kernel_launches(count, context, vocabulary).items():
            of = launch.compiled(capability)
            seconds.setdefault(of["name"], of["seconds"])
            rest = [of["warps"], of["shared"], of.get("registers", "–"), of.get("spilled", "–")]
            print(f"| {name} | {count} | {launch.programs} | {' | '.join(map(str, rest))} |")
    print(f"\n{len(seconds)} different ones, compiled in {sum(seconds.values()):.0f} s of a core.")


if __name__ == "__main__":
    raise SystemExit(main())
