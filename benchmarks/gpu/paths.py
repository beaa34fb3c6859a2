"""Whether what is timed ran as it is meant to: captured rounds that attend to trees by the kernel.

Where a GPU cannot do either, decoding goes on without, and its figures would be of something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from headstart.infer.graphs import RoundGraphs
from headstart.infer.speculator import Speculator
from headstart.infer.target import Target


class Fallback(RuntimeError):
    """A GPU's figure would be that of a slower way than the one that is measured."""


@dataclass
class Paths:
    """How the decoders of an entry ran.

    Attributes:
        on_gpu: whether any of them was on a GPU; graphs: whether all were to capture rounds.
        tree_attention: whether all of them attended to trees so.
        rounds, replayed: rounds in all, and those that were replayed.
        failed: why rounds could not be captured.
    """

    on_gpu: bool = False
    graphs: bool = True
    tree_attention: bool = True
    rounds: int = 0
    replayed: int = 0
    failed: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As it stands in an entry."""
        captured = self.graphs and not self.failed
        return {
            "captured": captured and (self.replayed > 0 or not self.rounds),
            "tree_attention": self.tree_attention,
            "replayed_rounds": self.replayed,
        }

    def check(self) -> None:
        """Raise `Fallback` where a GPU was used, and not as meant."""
        if not self.on_gpu:
            return
        if not self.graphs:
            raise Fallback("a decoder captured no rounds; see the log, level info, for the reason")
        if self.failed:
            raise Fallback(f"rounds were not captured: {self.failed[0]}")
        if self.rounds and not self.replayed:
            raise Fallback(f"none of {self.rounds} rounds was replayed as a graph")
        if not self.tree_attention:
            raise Fallback("a decoder attended under masks; see the log, level info")


@contextmanager
def watched_paths() -> Iterator[Paths]:
    """How all decoders run that are made and used while this lasts."""
    found = Paths()

    def noted(owner: type, name: str, note: Callable[[Any], None]) -> Any:
        true = getattr(owner, name)

        def call(self: Any, *args: Any, **options: Any) -> Any:
            answer = true(self, *args, **options)
            note(self)
            return answer

        return mock.patch.object(owner, name, call)

    def target(made: Target) -> None:
        found.on_gpu |= made.device.type == "cuda"
        found.tree_attention &= made.windows.tree

    def speculator(made: Speculator) -> None:
        found.graphs &= made.graphs is not None

    def ran(graphs: RoundGraphs) -> None:
        found.rounds += 1
        found.failed += [reason for reason in graphs.failed if reason not in found.failed]

    true_replay = RoundGraphs.count_replay

    def replayed(self: RoundGraphs) -> None:
        true_replay(self)
        found.replayed += 1

    with ExitStack() as patches:
        patches.enter_context(noted(Target, "__init__", target))
        patches.enter_context(noted(Speculator, "_set_up", speculator))
        patches.enter_context(noted(RoundGraphs, "run", ran))
        patches.enter_context(mock.patch.object(RoundGraphs, "count_replay", replayed))
        yield found


def context_is_lost(device: torch.device) -> bool:
    """Whether an error has ended all work of this process on a GPU, such as an illegal address."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
        torch.ones(1, device=device).item()
    except RuntimeError:
        return True
    return False
