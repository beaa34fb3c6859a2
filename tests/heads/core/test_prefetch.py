"""Weights brought ahead of the layers that read them; a stand-in does a copy at the last moment."""

import copy
import gc
import threading
import time
import weakref
from collections import deque
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from headstart.heads import DecodingError
from headstart.heads.core import Prefetch
from headstart.heads.core.prefetch import side_by_side
from headstart.heads.core.weight_sources import InFile, OpenFiles
from headstart.infer import Speculator
from tests.support.families import TREES, drafter
from tests.support.late_copies import Late, as_on_a_gpu
from tests.support.streamed import deep, fetched, streamed, streamed_tiny
from tests.support.tape import DeadMemory
from tests.support.tiny import one_line, prompts, tiny

IDS = torch.arange(12).view(2, 6)
ON_DISK = {"cpu": 0, "disk": 5, "both": 2, "map": 2}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("where", ON_DISK)
def test_layers_find_their_weights(where: str, tmp_path: Path) -> None:
    """Forward after forward; and without it, and after an error, accelerate fetches them."""
    model, stream = streamed(deep(), where, tmp_path), cast(Any, Late())
    expected = logits(model)
    assert torch.equal(expected, logits(deep()))
    ahead = Prefetch(model, stream)
    count = 2 if where == "map" else 5  # what is in memory stays there on a CPU
    of_one = ahead.size // count
    assert ahead.layers == count and of_one >= 8 * 4 * 32 * 48
    assert ahead.on_disk == ON_DISK[where]
    used = of_one * (count - ahead.on_disk + 2 * (ahead.on_disk > 0))
    assert used <= stream.pinned <= 2 * used
    for turn in range(1, 4):
        with ahead:
            assert torch.equal(logits(model), expected)
            gc.collect()
        copies = stream.copies
        begun = range(count * turn, count * turn + 2)
        assert copies in begun[1 if where in ("cpu", "both") else 0 :]
        assert torch.equal(logits(model), expected) and stream.copies == copies
    for faulty in (1, 3):
        layer = model.model.layers[faulty]
        handle = layer.mlp.register_forward_pre_hook(lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError), ahead:
            logits(model)
        handle.remove()
        assert torch.equal(logits(model), expected)
        with ahead:
            assert torch.equal(logits(model), expected)
        assert all(weight.is_meta for weight in layer.parameters())


@pytest.mark.parametrize(
    "sizes", [[660] * 40, [1711] * 80, [436] * 32, [5, 9, 5], [7], []], ids=len
)
def test_layers_share_blocks_of_pinned_memory(sizes: list[int]) -> None:
    """torch rounds each block up to a power of two; few bytes are lost, and nothing overlaps."""
    blocks = []

    def memory(size: int) -> Tensor:
        blocks.append(1 << (size - 1).bit_length())
        return torch.zeros(size, dtype=torch.uint8)

    found = list(side_by_side(sizes, memory))
    for number, each in enumerate(found):
        each.fill_(number)
    assert [len(each) for each in found] == sizes
    assert all((each == number).all() for number, each in enumerate(found))
    apart = sum(1 << (size - 1).bit_length() for size in sizes)
    assert sum(blocks) <= apart
    if len(sizes) > 30:
        assert sum(blocks) <= 1.08 * sum(sizes) and max(blocks) <= 0.4 * sum(sizes)


def test_a_copy_that_is_not_waited_for_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Controls: the stand-in tells of each order of events, and of memory, that would be wrong."""
    for number, (fault, where, caught) in enumerate(
        (
            ("wait", "cpu", None), ("mark", "cpu", AssertionError), ("memory", "cpu", DeadMemory),
            ("mark", "disk", AssertionError), ("reached", "disk", None),
            ("memory", "disk", DeadMemory),
        )
    ):  # fmt: skip
        model, stream = streamed(deep(), where, tmp_path / str(number)), cast(Any, Late())
        expected, ahead = logits(model), Prefetch(model, stream)
        if fault == "wait":
            monkeypatch.setattr(stream, "wait", stream.computes)
        elif fault == "mark":
            monkeypatch.setattr(stream, "mark", lambda: None)
        elif fault == "memory":
            monkeypatch.setattr(stream, "wait", dropped(ahead, stream.wait))
        else:  # a block is read into while it is copied from
            monkeypatch.setattr(ahead._ahead, "_reached", lambda event: None)
            monkeypatch.setattr(stream, "wait", when_read(ahead, stream.wait))
        if caught is None:
            with ahead:
                assert not torch.equal(logits(model), expected)
            continue
        with pytest.raises(caught), ahead:
            logits(model)


def when_read(ahead: Prefetch, wait: Any) -> Any:
    """A wait until all is read that is to be read now."""

    def run(event: Any) -> None:
        while ahead._ahead._thread._runs:
            time.sleep(0.001)
        wait(event)

    return run


def dropped(ahead: Prefetch, wait: Any) -> Any:
    """A wait before which the layers' memory is given back, without waiting for the copies."""
    cast(Any, ahead._ahead)._reached = lambda event: None

    def run(event: Any) -> None:
        for _, layer in ahead._layers:
            layer.host = layer.host.clone()
        when_read(ahead, lambda event: None)(event)
        moved = [(part, block.clone(), *rest) for part, block, *rest in ahead._ahead._due]
        ahead._ahead._due = deque(cast(Any, moved))
        wait(event)

    return run


@pytest.mark.parametrize(
    ("name", "where"), [(None, "cpu"), ("medusa", "cpu"), ("medusa", "disk"), (None, "both")]
)
def test_the_text_is_that_of_generate(
    name: str | None, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and trees both run so; the stream is there once for each model."""
    made = as_on_a_gpu(monkeypatch)
    model = streamed_tiny(where, tmp_path)
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
    least = 2 * 2 * (rounds + 1)
    assert len(made) == 1 and made[0].copies - least in ((1,) if where == "cpu" else (0, 1))
    assert torch.equal(model.generate(ids, **options), expected)


@pytest.mark.parametrize("where", ["disk", "map", "both"])
def test_files_are_read_ahead(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate fetches nothing of those layers."""
    model = streamed(deep(), where, tmp_path)
    assert Prefetch.of(model) is None and Prefetch.of(deep()) is None, "on a CPU"
    as_on_a_gpu(monkeypatch)
    ids = prompts([7])[0]
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():  # its memory serves other forwards as well
        first = Speculator(model).generate(ids, **options)
    again = Speculator(model)
    with fetched() as keys:
        assert torch.equal(again.generate(ids, **options), first)
    assert keys and not any("layers" in key for key in keys)
    assert torch.equal(first, deep().generate(ids, **options))
    ahead = ahead_of(model)
    assert ahead.on_disk == ON_DISK[where]
    for _, layer in ahead._layers:  # as disks are fastest
        order = [source.place for *_, source, _ in layer._places]
        assert order == sorted(order)


def test_a_file_that_cannot_be_read_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raised by the forward that needs the layer; where the file is back the next one goes on."""
    as_on_a_gpu(monkeypatch)
    model = streamed(deep(), "disk", tmp_path)
    speculator, ids = Speculator(model), prompts([7])[0]
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = speculator.generate(ids, **options)
    path = tmp_path / "offloaded" / "model.layers.3.mlp.up_proj.weight.dat"
    aside = path.with_suffix(".aside")

    def fails(said: str) -> None:
        with pytest.raises(DecodingError) as caught:
            speculator.generate(ids, **options)
        message = one_line(caught.value)
        assert str(path) in message and said in message and "load it again" in message

    path.rename(aside)
    fails("No such file")
    path.write_bytes(aside.read_bytes()[:-8])
    fails("it was changed")
    path.unlink()
    aside.rename(path)
    assert torch.equal(speculator.generate(ids, **options), expected)


def ahead_of(model: Any) -> Prefetch:
    found = Prefetch.of(model)
    assert found is not None
    return found


def reading() -> int:
    """Threads that read weights."""
    return sum("read ahead" in each.name for each in threading.enumerate())


def test_nothing_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread once there is nothing to read, and no memory once the model is gone."""
    as_on_a_gpu(monkeypatch)
    true = InFile.read

    def slowly(self: InFile, to: Tensor, files: OpenFiles) -> None:
        time.sleep(0.005)
        true(self, to, files)

    monkeypatch.setattr(InFile, "read", slowly)
    model = streamed(deep(), "disk", tmp_path)
    speculator = Speculator(model)
    ids, options = prompts([7])[0], {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    expected = deep().generate(ids, **options)
    text, threads = speculator.generate(ids, **options), reading()
    assert torch.equal(text, expected)
    assert threads == 1, "the next request's first layers"
    ahead = ahead_of(model)
    gone = [weakref.ref(each) for each in (ahead, ahead._ahead, ahead._layers[0][1])]
    del speculator, ahead, model
    gc.collect()
    end = time.monotonic() + 20
    while reading() and time.monotonic() < end:
        time.sleep(0.01)
    assert not reading()
    gc.collect()
    assert [each() for each in gone] == [None] * 3


@pytest.mark.parametrize(("where", "gpu"), [("disk", True), ("both", True), ("disk", False)])
def test_requests_in_threads(
    where: str, gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several speculators of one model, some of them made meanwhile, each with its own text."""
    if gpu:
        as_on_a_gpu(monkeypatch)
    model = streamed(deep(), where, tmp_path)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    wrong, shared = list[object](), Speculator(model)

    def requests(turn: int) -> None:
        try:
            own = shared if turn % 2 else Speculator(model)
            for seed in range(3):
                ids = prompts([5 + turn], seed)[0]
                if not torch.equal(own.generate(ids, **options), deep().generate(ids, **options)):
                    wrong.append((turn, seed))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=requests, args=(turn,)) for turn in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


def test_a_model_that_was_loaded_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.hooks import remove_hook_from_submodules

    as_on_a_gpu(monkeypatch)
    model = streamed_tiny("cpu", tmp_path)
    first = Prefetch.of(model)
    assert first is not None and Prefetch.of(model) is first and first.attached
    expected = logits(model)
    remove_hook_from_submodules(model)
    assert not first.attached and Prefetch.of(model) is None
    assert torch.equal(logits(model), expected)
