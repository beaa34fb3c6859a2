"""The items of `smoke` about what one request leaves for the next: answers, times, texts' keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.heads import Drafter
from headstart.heads.core.forms import Form, FormsByRow
from headstart.heads.early_exit import EarlyExit
from headstart.infer.batcher import Batcher
from headstart.infer.graphs import RoundGraphs
from headstart.infer.speculator import Speculator

from .paths import watched_paths
from .shapes import random_drafter
from .smoke_items import NEW, TREES, Items, Place, make_prompts, small_target

_KEPT = ("eagle3", "draft_model", "early_exit", "recycling", "suffix")
"""Families that read features of several layers, have a cache or caches, or are told of texts."""
_OPTIONS: dict[str, Any] = {"max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False}

Requests = Callable[[Speculator], list[Tensor]]


def kept(place: Place) -> Items:
    """Requests that begin as others, or repeat them; forms; and drafters that families lack."""
    tree = TREES["static"]
    for name in _KEPT:
        yield f"turns of a chat, {name}", partial(_chat, place, name)
    yield "an answer again, suffix", partial(_again, place)
    yield "an early exit alone", partial(_alone, place)
    yield "several drafters", partial(_several, place, ("draft_model", "suffix"), f"chain:2+{tree}")
    for name in ("medusa", "eagle3", "draft_model"):
        yield f"adaptive depths, {name}", partial(_adaptive, place, name)
    for name in ("medusa", "suffix"):
        yield f"forms between captured requests, {name}", partial(_forms, place, name)
    yield "threads whose prompts begin alike", partial(_threads, place)


def _chat(place: Place, name: str) -> dict[str, Any]:
    """Each turn goes on from the text of the last one, which is not run again."""
    drafters = [random_drafter(name, small_target(place.device))]
    return _compared(place, drafters, _turns, tree=TREES["static"], prefix_caching=True)


def _turns(speculator: Speculator) -> list[Tensor]:
    texts, ids = [], make_prompts(speculator.device, 1, 0)
    for turn in range(4):
        texts.append(_write(speculator, ids))
        if speculator.prefix_caching and turn and not speculator.stats.kept_tokens:
            raise AssertionError(f"turn {turn + 1} was run whole")
        ids = torch.cat([texts[-1], make_prompts(speculator.device, 1, turn + 1)], 1)
    return texts


def _again(place: Place) -> dict[str, Any]:
    """Replayed rounds read what was remembered after they were captured."""
    drafters, taus = [random_drafter("suffix", small_target(place.device))], list[float]()

    def same_prompt(speculator: Speculator) -> list[Tensor]:
        ids, texts = make_prompts(speculator.device, 1, 0), list[Tensor]()
        for _ in range(4):
            texts.append(_write(speculator, ids))
            taus.append(speculator.stats.tau)
        return texts

    found = _compared(place, drafters, same_prompt, tree="chain:4")
    if not min(taus[1:4]) > 3:
        raise AssertionError(f"{taus[1:4]} tokens a round of an answer that is known; expected > 3")
    return found | {"tau": taus[:4]}


def _alone(place: Place) -> dict[str, Any]:
    model = small_target(place.device)
    drafter = EarlyExit.of_target(model, 1).to(model.device, model.dtype)  # type: ignore[arg-type]
    return _compared(place, [drafter.eval().bind(model)], _others, tree=TREES["dynamic"])


def _several(place: Place, names: Sequence[str], tree: str) -> dict[str, Any]:
    drafters = [random_drafter(name, small_target(place.device)) for name in names]
    return _compared(place, drafters, _others, tree=tree)


def _adaptive(place: Place, name: str) -> dict[str, Any]:
    """Rounds of several depths in turn, which are chosen by the clock: the text is plain's."""
    drafters = [random_drafter(name, small_target(place.device))]
    with watched_paths() as paths:
        texts, counts = _ran(place, drafters, _others, True, tree="adaptive:chain:4")
    paths.check()
    if not all(map(torch.equal, texts, _ran(place, [], _others, False)[0])):
        raise AssertionError("captured rounds write another text than plain decoding")
    return {"rounds": list(map(len, counts)), **paths.to_dict()}


def _others(speculator: Speculator) -> list[Tensor]:
    """Prompts that have nothing in common."""
    batches = enumerate((1, 3, 1))
    return [_write(speculator, make_prompts(speculator.device, n, turn)) for turn, n in batches]


class _Even(Form):
    """Texts of even tokens."""

    def allow(self, text: np.ndarray, bits: np.ndarray) -> bool:
        bits &= 0b01010101
        return True


def _forms(place: Place, name: str) -> dict[str, Any]:
    """The host reads texts that shall have a form; rounds of the others are captured."""
    drafters = [random_drafter(name, small_target(place.device))]

    def some_with_forms(speculator: Speculator) -> list[Tensor]:
        ids, texts = make_prompts(speculator.device, 1, 0), list[Tensor]()
        for form in (None, _Even(), None, _Even()):
            given: dict[str, Any] = {"logits_processor": [FormsByRow([form])]} if form else {}
            texts.append(_write(speculator, ids, **given))
            odd = bool((texts[-1][:, ids.shape[1] :] % 2).any())
            if odd == (form is not None):
                raise AssertionError(
                    f"text {len(texts)} has {'odd' if odd else 'only even'} tokens"
                )
        return texts

    return _compared(place, drafters, some_with_forms, tree=TREES["static"])


def _threads(place: Place) -> dict[str, Any]:
    """Rows that take a text that is kept, and leave theirs; in float64, without ties."""
    model = small_target(place.device, torch.float64)
    drafters = [random_drafter(name, model) for name in ("eagle3", "suffix")]
    how: dict[str, Any] = {"tree": "chain:2+chain:3", "prefix_caching": True}
    speculator, plain = Speculator(model, drafters, graphs=True, **how), Speculator(model)
    begin = make_prompts(place.device, 1, 40)
    batcher, some = Batcher(speculator, rows=4), range(1, 9)
    prompts = [torch.cat([begin, make_prompts(place.device, 1, turn)], 1) for turn in some]
    expected = [_write(plain, ids) for ids in prompts]

    def write(ids: Tensor) -> tuple[Tensor, int]:
        return _write(batcher, ids), batcher.stats.kept_tokens

    with ThreadPoolExecutor(4) as pool:
        texts, known = zip(*pool.map(write, prompts * 2), strict=True)
    if not all(map(torch.equal, texts, expected * 2)):
        raise AssertionError("a thread got another text than alone")
    if not any(known):
        raise AssertionError("every prompt was run whole, though all begin alike")
    replayed = 0 if speculator.graphs is None else speculator.graphs.replayed
    if place.on_gpu and not replayed:
        raise AssertionError("no round was captured")
    return {"kept_tokens": known, "replayed_rounds": replayed}


def _write(decode: Any, ids: Tensor, **given: Any) -> Tensor:
    return decode.generate(ids, attention_mask=torch.ones_like(ids), **_OPTIONS, **given)


def _compared(
    place: Place, drafters: list[Drafter], requests: Requests, **how: Any
) -> dict[str, Any]:
    """Captured rounds against rounds as written, and their texts against plain decoding's."""
    with watched_paths() as paths:
        texts, counts = _ran(place, drafters, requests, True, **how)
    paths.check()
    written, as_written = _ran(place, drafters, requests, False, **how)
    plain, _ = _ran(place, [], requests, False)
    for name, expected in (("rounds as written", written), ("plain decoding", plain)):
        if not all(map(torch.equal, texts, expected)):
            raise AssertionError(f"captured rounds write another text than {name}")
    if counts != as_written:
        raise AssertionError("captured rounds accept other drafts than rounds as written")
    return {"requests": len(texts), **paths.to_dict()}


def _ran(
    place: Place, drafters: list[Drafter], requests: Requests, captured: bool, **how: Any
) -> tuple[list[Tensor], list[list[int]]]:
    """Texts of requests, and what each round emitted; nothing is remembered from before."""
    for drafter in drafters:
        if drafter.remembers:
            drafter.forget()
    speculator = Speculator(small_target(place.device), drafters or None, graphs=True, **how)
    if not captured:
        speculator.graphs = RoundGraphs()
    counts, true = list[list[int]](), speculator.generate

    def noted(*given: Any, **options: Any) -> Any:
        found = true(*given, **options)
        counts.append(speculator.stats.counts.flatten().tolist())
        return found

    speculator.generate = noted  # type: ignore[method-assign]
    return requests(speculator), counts
