"""A divided target in the process that leads the others: what it runs, they run as well."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from headstart.heads import OptionError, SlabCache, TokenTree
from headstart.heads.core import CACHE_NAMES, Topology, decoder_of, device_and_dtype, way_refused

from ..kept import KeptTexts
from ..target import Target, way_to_run
from .workers import Workers

_REORDERS = ("reorder_cache", "batch_repeat_interleave", "batch_select_indices")


class Led:
    """A divided model's part in this process, and the workers that have the others.

    Args:
        number: of the model, as the workers know it; place: where it runs, in which dtype.
    """

    def __init__(self, workers: Workers, number: int, place: Any):
        self.workers, self.number, self.place = workers, number, place

    def cache_number(self, cache: Any) -> int | None:
        """That of a cache which `generate` made; the workers have one of their own for it.

        Raises:
            OptionError: a cache of another kind.
        """
        if cache is None:
            return None
        if type(cache) is not DynamicCache:
            raise OptionError(
                f"found a {type(cache).__name__} for a target that is divided among processes; "
                "expected a DynamicCache: leave cache_implementation out."
            )
        own: Any = cache
        if not hasattr(own, "_headstart_number"):
            if own.get_seq_length():
                raise OptionError(
                    f"found a cache of {own.get_seq_length()} tokens for a target that is divided "
                    "among processes, and the others have none; give an empty DynamicCache to the "
                    "first forward."
                )
            own._headstart_number = self.workers.number(own)
            for name in _REORDERS:
                setattr(own, name, _refuse)
        return own._headstart_number


def _refuse(*args: Any, **options: Any) -> None:
    raise OptionError(
        "a target that is divided among processes keeps each row's cache in its place; expected "
        "greedy decoding or sampling: leave num_beams out."
    )


def _led_forward(led: Led, decoder: bool, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a model, or of its decoder, which the workers run as well."""

    @functools.wraps(forward)
    def run(*args: Any, **options: Any) -> Any:
        if led.workers.inside:
            return forward(*args, **options)
        others = options.copy()
        cache = next((others.pop(name) for name in CACHE_NAMES if name in others), None)
        number = led.cache_number(cache)
        length = 0 if cache is None else cache.get_seq_length()
        told = led.number, decoder, number, length, args, others
        with led.workers.together("forward", *told):
            return forward(*args, **options)

    return run


def lead(model: Any, workers: Workers, number: int) -> None:
    """Have the workers run a model's forwards, too, and keep those of its targets in step."""
    model._headstart_led = led = Led(workers, number, device_and_dtype(model))
    for decoder, runs in ((False, model), (True, decoder_of(model))):
        runs.forward = _led_forward(led, decoder, runs.forward)


def leads(model: PreTrainedModel) -> bool:
    """Whether a model is divided among processes of which this one leads the others."""
    return hasattr(model, "_headstart_led")


def runner_of(model: PreTrainedModel, *args: Any, **options: Any) -> Target:
    """The `Target` that runs a model's forwards, and has the workers run those of a divided one."""
    if (led := getattr(model, "_headstart_led", None)) is None:
        return Target(model, *args, **options)
    return LedTarget(led, model, *args, **options)


class LedTarget(Target):
    """A divided target: what this process runs of it, the others run as well."""

    def __init__(
        self,
        led: Led,
        model: PreTrainedModel,
        feature_layers: Sequence[int] = (),
        attention: str = "auto",
        compile: bool | str = False,
        fused: bool | None = None,
    ):
        # What is refused here alone, before the others are told:
        way_to_run(model, compile)
        if device_and_dtype(model) != led.place:
            raise OptionError(
                "the target is divided among processes, and its part in this one was moved or "
                "recast; load it with the dtype that it shall have."
            )
        if fused:
            raise way_refused("fused", fused)
        self._workers = led.workers
        self._number = self._workers.number(self)
        self._shape: Topology | None = None  # that of the last tree, which the others have, too
        with self._workers.together("target", self._number, led.number, attention):
            super().__init__(model, feature_layers, attention, compile, fused=False)
        self.kept = KeptTexts(0)  # the others have no copies

    def spare(self) -> Target:
        found = copy.copy(self)
        found._number, found._shape = self._workers.number(found), None
        with self._workers.together("spare", found._number, self._number):
            found.cache = SlabCache(self.shapes, 0, 0)
            found.kept = KeptTexts(0)
        return found

    def run_prompts(
        self, tokens: Tensor, counts: Sequence[int], first: int = 0
    ) -> tuple[Tensor, Tensor]:
        with self._together("run_prompts", tokens, counts, first):
            return super().run_prompts(tokens, counts, first)

    def prefill_apart(
        self, tokens: Tensor, counts: Sequence[int], kept: Sequence[int]
    ) -> tuple[SlabCache, Tensor]:
        number = self._workers.next_number()
        with self._workers.together("apart", number, self._number, tokens, counts, kept):
            apart, features = super().prefill_apart(tokens, counts, kept)
        weakref.finalize(apart, self._workers.drop, number)
        apart._headstart_number = number  # type: ignore[attr-defined]
        return apart, features

    def verify(
        self, tree: TokenTree, lengths: Tensor, longest: int, even: bool = False
    ) -> tuple[Tensor, Tensor]:
        shape, told = tree.topology, None
        if shape is not self._shape:  # that of a static tree is the same in every round
            told = shape.parents, shape.max_depth, shape.width, shape.children
        with self._together("verify", tree.tokens, told, lengths, longest, even):
            self._shape = shape
            return super().verify(tree, lengths, longest, even)

    def keep(self, slots: int, capacity: int) -> None:
        with self._together("keep", slots, capacity):
            super().keep(slots, capacity)

    def resize(self, batch: int, capacity: int) -> None:
        with self._together("resize", batch, capacity):
            super().resize(batch, capacity)

    def reserve(self, slots: int) -> int:
        with self._together("reserve", slots):
            return super().reserve(slots)

    def adopt(self, other: SlabCache, rows: Tensor, slots: int) -> None:
        number = other._headstart_number  # type: ignore[attr-defined]
        with self._together("adopt", number, rows, slots):
            super().adopt(other, rows, slots)

    def release(self) -> None:
        with self._together("release"):
            super().release()

    def commit(self, path: Tensor, in_place: bool = False) -> None:
        with self._together("commit", path, in_place):
            super().commit(path, in_place)

    def _together(self, name: str, *args: Any) -> Any:
        return self._workers.together(name, self._number, *args)
