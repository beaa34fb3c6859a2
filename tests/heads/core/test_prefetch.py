"""Weights copied ahead of the layers that read them; a stand-in does a copy at the last moment."""

import copy
import gc
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from headstart.heads.core import Prefetch, prefetch
from headstart.infer import Speculator
from tests.support.families import TREES, drafter
from tests.support.streamed import streamed_tiny
from tests.support.tape import DeadMemory, Place
from tests.support.tiny import prompts, tiny

IDS = torch.arange(12).view(2, 6)


def place(tensor: Tensor) -> Place:
    return Place(tensor, StorageWeakRef(tensor.untyped_storage()), "a copy")


class Late:
    """In the place of `CopyStream`: a copy is done when it is waited for, and holds no memory.

    Until then there is NaN where it goes to. A copy that does not wait for who reads there fails.
    """

    device = torch.device("cpu")

    def __init__(self, device: Any = None) -> None:
        self.pending: list[tuple[object, Place, Place]] = []
        self.copies = 0
        self._reader: dict[int, object] = {}  # by the address: the event behind who reads there

    def host_memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def copy(self, to: Tensor, source: Tensor, after: Any) -> Any:
        reader = self._reader.get(to.data_ptr())
        assert reader is None or reader is after, "somebody may be reading what is overwritten"
        to.fill_(255)
        self.pending.append((event := object(), place(to), place(source)))
        self.copies += 1
        return event

    def wait(self, event: Any) -> None:
        while event in [each for each, _, _ in self.pending]:
            _, to, source = self.pending.pop(0)
            to.tensor().copy_(source.tensor())
            self._reader[to.tensor().data_ptr()] = "it computes"

    def mark(self) -> Any:
        event = object()
        for address, reader in self._reader.items():
            if reader == "it computes":
                self._reader[address] = event
        return event


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_layers_find_their_weights(tmp_path: Path) -> None:
    """Forward after forward; and without it, and after an error, accelerate fetches them."""
    model, stream = streamed_tiny("cpu", tmp_path), cast(Any, Late())
    expected = logits(model)
    assert torch.equal(expected, logits(tiny("llama")))
    ahead = Prefetch(model, stream)
    assert ahead.layers == 2 and ahead.size >= 2 * 8 * 64 * 64
    for turn in range(1, 4):
        with ahead:
            assert torch.equal(logits(model), expected)
            gc.collect()
        assert stream.copies == 2 * turn + 1, "the next forward's first layer comes already"
        assert torch.equal(logits(model), expected) and stream.copies == 2 * turn + 1
    layer = model.model.layers[1]
    handle = layer.mlp.register_forward_pre_hook(lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError), ahead:
        logits(model)
    handle.remove()
    assert torch.equal(logits(model), expected)
    with ahead:
        assert torch.equal(logits(model), expected)
    assert all(weight.is_meta for weight in layer.parameters())


def test_a_copy_that_is_not_waited_for_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Controls: the stand-in tells of each order of events, and of memory, that would be wrong."""
    for fault, caught in (("wait", None), ("mark", AssertionError), ("memory", DeadMemory)):
        model, stream = streamed_tiny("cpu", tmp_path), cast(Any, Late())
        expected, ahead = logits(model), Prefetch(model, stream)
        if fault == "wait":
            monkeypatch.setattr(stream, "wait", lambda event: None)
        elif fault == "mark":
            monkeypatch.setattr(stream, "mark", lambda: None)
        else:
            monkeypatch.setattr(stream, "wait", dropped(ahead, stream.wait))
        if caught is None:
            with ahead:
                assert not torch.equal(logits(model), expected)
            continue
        with pytest.raises(caught), ahead:
            logits(model)


def dropped(ahead: Prefetch, wait: Any) -> Any:
    """A wait before which the layers' memory is given back."""

    def run(event: Any) -> None:
        for _, layer in ahead._layers:
            layer.host = layer.host.clone()
        wait(event)

    return run


@pytest.mark.parametrize("name", [None, "medusa"])
def test_the_text_is_that_of_generate(
    name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and trees both run so; the stream is there once for each model."""
    made = list[Late]()

    def stream(device: torch.device) -> Late:
        made.append(Late())
        return made[-1]

    monkeypatch.setattr(prefetch, "CopyStream", stream)
    monkeypatch.setattr(prefetch, "device_of", lambda model: torch.device("cuda"))
    model = streamed_tiny("cpu", tmp_path)
    draft = None if name is None else copy.deepcopy(drafter(name, "tiny")).bind(model)
    ids, mask = prompts([9, 4])
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    options["pad_token_id"] = 0
    expected = tiny("llama").generate(ids, **options)
    tree = "plain" if name is None else TREES[1]
    first, speculator = (Speculator(model, draft, tree=tree) for _ in range(2))
    for each in (first, speculator):
        assert torch.equal(each.generate(ids, **options), expected)
    rounds = len(speculator.stats.counts)
    assert len(made) == 1 and made[0].copies == 2 * 2 * (rounds + 1) + 1
    assert torch.equal(model.generate(ids, **options), expected)


@pytest.mark.parametrize("where", ["disk", "map"])
def test_what_is_on_disk_is_left_to_accelerate(where: str, tmp_path: Path) -> None:
    model = streamed_tiny(where, tmp_path)
    assert Prefetch(model, cast(Any, Late())).layers == 0
    assert Prefetch.of(model) is None and Prefetch.of(tiny("llama")) is None


def test_a_model_that_was_loaded_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.hooks import remove_hook_from_submodules

    monkeypatch.setattr(prefetch, "CopyStream", Late)
    monkeypatch.setattr(prefetch, "device_of", lambda model: torch.device("cuda"))
    model = streamed_tiny("cpu", tmp_path)
    first = Prefetch.of(model)
    assert first is not None and Prefetch.of(model) is first and first.attached
    expected = logits(model)
    remove_hook_from_submodules(model)
    assert not first.attached and Prefetch.of(model) is None
    assert torch.equal(logits(model), expected)
