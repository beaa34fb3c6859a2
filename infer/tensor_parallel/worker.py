"""A process that holds a part of a target, and runs what the leader tells it to.

Started by `Workers`, as `python -m headstart.infer.tensor_parallel.worker DEVICE PORT PROCESSES
RANK`. What it is told comes from stdin, and it ends with that; its answers go to stdout.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from headstart.heads import HeadstartError, TokenTree
from headstart.heads.core import CACHE, Topology, brief, decoder_of, load_pretrained

from ..target import Target
from .sent import receive, send
from .workers import ALONE, join


class Part:
    """The parts of targets in this process.

    The leader may tell its methods, and by other names those of a target, whose number comes first.

    Args:
        answers: where what is asked for is written.
    """

    def __init__(self, answers: Any):
        self.kept: dict[int, Any] = {}  # by the leader's numbers
        self._shapes: dict[int, Topology] = {}  # of each target's last tree
        self._answers = answers

    def run(self, name: str, *what: Any) -> None:
        """What the leader has told."""
        if (own := getattr(self, name, None)) is not None:
            own(*what)
        else:
            number, *args = what
            getattr(self.kept[number], name)(*args)

    def load(self, number: int, name: str, options: dict[str, Any]) -> None:
        """A model's part; the answer is empty, or what is wrong."""
        said = ""
        try:
            self.kept[number] = load_pretrained(AutoModelForCausalLM, name, **options).eval()
        except Exception as error:
            said = f"{type(error).__name__}: {brief(error)}"
        send(said, self._answers)

    def target(self, number: int, model: int, attention: str) -> None:
        self.kept[number] = Target(self.kept[model], (), attention, fused=False)

    def spare(self, number: int, of: int) -> None:
        self.kept[number] = self.kept[of].spare()

    def apart(self, number: int, target: int, *args: Any) -> None:
        self.kept[number], _ = self.kept[target].prefill_apart(*args)

    def adopt(self, target: int, other: int, rows: Tensor, slots: int) -> None:
        self.kept[target].adopt(self.kept[other], rows, slots)

    def drop(self, numbers: Sequence[int]) -> None:
        """Forget what is not needed any more."""
        for number in numbers:
            self.kept.pop(number, None)
            self._shapes.pop(number, None)

    def verify(self, number: int, tokens: Tensor, shape: Any, *args: Any) -> None:
        """Of a tree of this shape, or of that of the last one where it is None."""
        if shape is not None:
            self._shapes[number] = Topology.from_parents(*shape)
        tree = TokenTree(tokens, self._shapes[number], None, torch.zeros_like(tokens))
        self.kept[number].verify(tree, *args)

    def forward(
        self,
        model: int,
        decoder: bool,
        cache: int | None,
        length: int,
        args: Sequence[Any],
        options: dict[str, Any],
    ) -> None:
        """A forward as `generate` makes it, over a cache that holds so many tokens before."""
        runs = self.kept[model]
        if cache is not None:
            if cache not in self.kept:
                self.kept[cache] = DynamicCache(config=runs.config)
            own = self.kept[cache]
            if more := own.get_seq_length() - length:  # the leader's was cut
                own.crop(-more)
            options = {**options, CACHE: own}
        (decoder_of(runs) if decoder else runs)(*args, **options)


def main(device: str, port: str, processes: str, rank: str) -> None:
    """Join the others, and run what is told until nobody tells any more."""
    logging.set_verbosity_error()  # the leader says what all would
    logging.disable_progress_bar()
    told = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    send("", answers)  # all is imported
    distributed = cast("Any", torch.distributed)
    store = distributed.TCPStore("127.0.0.1", int(port), int(processes), is_master=False)
    join(store, int(rank), int(processes), device)
    own = torch.device("cuda", int(rank)) if device == "cuda" else torch.device("cpu")
    part = Part(answers)
    with torch.no_grad():
        while True:
            dropped, name, *what = receive(told, own)
            part.drop(dropped)
            # The leader meets an error of ours, too, and so does it mostly with too little memory.
            with suppress(HeadstartError, *[torch.OutOfMemoryError] * (name in ALONE)):
                part.run(name, *what)


if __name__ == "__main__":
    status = 0
    try:
        main(*sys.argv[1:])
    except EOFError:
        pass  # the leader has ended, or needs no part of a target any more
    except Exception as error:
        print(f"headstart: process {sys.argv[-1]} of a target: {brief(error)}", file=sys.stderr)
        status = 1
    finally:
        sys.stderr.flush()
    os._exit(status)  # without waiting for those that it computed with
