"""The decode loop with drafters that have no weights, on a tiny target."""

from typing import Any

import torch
from torch import Tensor

from headstart.infer import Speculator
from tests.support.scripted import decoding_of
from tests.support.syncs import run_rounds
from tests.support.tiny import prompts, tiny

NEW = 40
SPARSE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0, 0]]


def generated(
    drafter: Any, tree: Any, batch: int, stop: bool, **options: Any
) -> tuple[Tensor, Tensor, Speculator]:
    """What `generate` writes, what the speculator writes, and the speculator."""
    model = tiny("llama")
    ids, mask = prompts([11] if batch == 1 else [13, 7, 10, 3])
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    settings |= {"attention_mask": mask, "eos_token_id": None}
    expected = model.generate(ids, **settings)
    if stop:
        first_row = expected[0, ids.shape[1] : ids.shape[1] + 15].tolist()
        settings["eos_token_id"] = max(first_row, key=first_row.index)
        expected = model.generate(ids, **settings)
    speculator = Speculator(model, drafter, tree=tree, **options)
    return expected, speculator.generate(ids, **settings), speculator


def check_shared_noise(drafter: Any, tree: str) -> None:
    """The text of an exact rule does not depend on what is proposed."""
    ids, mask = prompts([13, 7, 10, 3])
    settings: dict = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": True}
    settings |= {"temperature": 0.7, "top_k": 0, "pad_token_id": 0, "eos_token_id": None, "seed": 5}
    plain = Speculator(tiny("llama")).generate(ids, **settings)
    out = Speculator(tiny("llama"), drafter, tree=tree).generate(ids, **settings)
    assert torch.equal(out, plain)


def check_no_wait(drafter: Any, tree: str) -> None:
    """A round of several rows reads nothing of the device."""
    ids, mask = prompts([9, 4, 7])
    decoding = decoding_of(tiny("llama"), drafter, tree)
    with torch.no_grad():
        decoding.prefill(ids, mask, 16)
        assert run_rounds(decoding) > 2
