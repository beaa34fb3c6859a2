"""A stream that has too little memory lets go of all that its batch held before it starts anew."""

import gc
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from headstart.heads.core import RowSettings, SlabCache
from headstart.infer import Speculator
from headstart.infer.continuous import Stream
from headstart.infer.graphs import _leaves
from headstart.infer.prompts import Manner, Prompt
from tests.support.drafters import made
from tests.support.recurrent import recurrent
from tests.support.tape import on_tape
from tests.support.tiny import tiny


def held_by(*owners: Any) -> list[StorageWeakRef]:
    """The memory of caches, and of what drafters' states hold."""
    found = []
    for leaf in (leaf for owner in owners for _, _, leaf in _leaves(owner)):
        if isinstance(leaf, SlabCache):
            found += leaf._memory
            found += [] if leaf.recurrent is None else leaf.recurrent._memory.values()
        else:
            found.append(leaf)
    return [StorageWeakRef(each.untyped_storage()) for each in found]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3.5"])
def test_memory_is_free_before_a_batch_starts_anew(name: str, graphs: bool) -> None:
    target = tiny(name) if name == "llama" else recurrent(name)
    speculator = Speculator(target, made("eagle", target).double(), tree="chain:2")
    if graphs:
        on_tape(speculator)
    greedy = RowSettings(temperature=0.0)
    prompts = [Prompt(n, [5 + n, 9, 7 * n + 1], 12, settings=greedy) for n in range(4)]
    texts, left = dict[int, list[int]](), list[int]()
    with speculator.reserved():
        stream = Stream(speculator, Manner(()), 4)
        true = stream._make_request

        def fail() -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        def make(batch: int) -> None:
            gc.collect()
            left.append(sum(not each.expired() for each in held))
            true(batch)

        stream.add(prompts)
        for _ in range(3):
            texts |= {piece.prompt.key: piece.text for piece in stream.round()}
        held = held_by(speculator.target.cache, stream.request.states)
        stream.decoding.round = fail  # type: ignore[method-assign]
        stream._make_request = make  # type: ignore[method-assign]
        with pytest.warns(RuntimeWarning, match="no memory to decode 4 requests"):
            texts |= {piece.prompt.key: piece.text for piece in stream.round()}
        while not stream.ended:
            texts |= {piece.prompt.key: piece.text for piece in stream.round()}
    assert len(held) > 1 and left[0] == 0
    how: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
    for prompt in prompts:
        ids = torch.tensor([prompt.tokens])
        assert texts[prompt.key] == target.generate(ids, **how)[0, ids.shape[1] :].tolist()
