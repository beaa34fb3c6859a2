"""The items of `smoke` about a target whose decoder layers are elsewhere."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from accelerate import cpu_offload, disk_offload
from transformers import PreTrainedModel

from headstart.heads.core import Prefetch, decoder_layers
from headstart.infer.measure.forward_costs import verify_costs
from headstart.infer.measure.timing import Stopwatch
from headstart.infer.speculator import Speculator

from .paths import Fallback
from .shapes import SHAPES, random_target
from .smoke_items import NEW, Items, Place, make_prompts, small_target


def streamed(place: Place) -> Items:
    """A target whose decoder layers are in CPU memory, or on disk."""
    for where in ("memory", "disk"):
        yield f"the same text, from {where}", partial(_streamed_text, place, where)
        yield f"share of the link, from {where}", partial(_link, place, where)


@contextmanager
def _away(model: PreTrainedModel, device: torch.device, where: str) -> Iterator[PreTrainedModel]:
    """The model with its layers elsewhere, while this lasts; files are in the page cache."""
    model = cast(Any, model).to("cpu")
    with TemporaryDirectory() as folder:
        for number, layer in enumerate(decoder_layers(model)):
            if where == "memory":
                cpu_offload(layer, device)
            else:
                disk_offload(layer, f"{folder}/{number}", device)
        yield _rest_to(model, device)


def _rest_to(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Move what is not streamed."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if not tensor.is_meta:
            tensor.data = tensor.data.to(device)
    return model


def _streamed_text(place: Place, where: str) -> dict[str, Any]:
    ids = make_prompts(place.device, 2, 0)
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    given: dict[str, Any] = {"attention_mask": torch.ones_like(ids), **options}
    expected = Speculator(small_target(place.device)).generate(ids, **given)
    with _away(copy.deepcopy(small_target(place.device)), place.device, where) as away:
        for turn in range(2):
            if not torch.equal(Speculator(away).generate(ids, **given), expected):
                raise AssertionError(f"another text with streamed layers, request {turn + 1}")
        ahead = Prefetch.of(away)
    found = 0 if ahead is None else ahead.layers
    if place.on_gpu and found != SHAPES["toy"].layers:
        raise AssertionError(f"{found} layers are brought ahead")
    return {"brought_ahead": found}


def _link(place: Place, where: str) -> dict[str, Any]:
    """A forward over 64 nodes of a 1 B shape, as a share of what one large copy gets."""
    shape, dtype = ("1b", torch.bfloat16) if place.full else ("toy", torch.float32)
    whole = random_target(SHAPES[shape], place.device, dtype)
    with _away(whole, place.device, where) as away:
        ids = torch.randint(1, 500, (1, 128)).to(place.device)
        seconds = verify_costs(away, (), ids, [64])[64] / 1e3
        ahead = Prefetch.of(away)
    if ahead is None:
        if place.on_gpu:
            raise Fallback("no layer is brought ahead of its forward")
        return {"forward_ms": 1e3 * seconds, "brought_ahead": 0}
    host = torch.empty(1 << 29, dtype=torch.uint8, pin_memory=True)
    there, watch = torch.empty_like(host, device=place.device), Stopwatch(place.device)
    best = min(watch.time(lambda: there.copy_(host, non_blocking=True), 2) for _ in range(3))
    link = host.nbytes / best / 1e6
    speed = ahead.size / seconds / 1e9
    return {
        "forward_ms": 1e3 * seconds, "brought_ahead": ahead.layers, "bytes": ahead.size,
        "gb_per_s": speed, "link_gb_per_s": link, "share": speed / link,
    }  # fmt: skip
