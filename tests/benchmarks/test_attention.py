"""The benchmark of tree attention runs to its end at toy sizes, and its ways agree."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import attention
from benchmarks.gpu.attention import main, measure
from benchmarks.gpu.attention_ways import Layer, Run, Shape, plain, sdpa
from tests.support.tape import Tape

TOY = "--device cpu --dtype float32 --nodes 1 5 --contexts 70 --groups 1 4 --heads 2 --size 16"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_it_runs_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "attention.json"
    main([*TOY.split(), "--repeats", "2", "--json", str(file)])
    document = json.loads(file.read_text())
    assert document["bandwidth"] > 0
    assert len(document["measured"]) == 4 * 6
    out = capsys.readouterr().out
    for one in document["measured"]:
        if one["way"] in ("varlen", "kernel"):  # CUDA alone
            assert one["milliseconds"] is None and "CUDA" in one["reason"]
            assert one["reason"] in out
        else:
            assert one["reason"] is None, one
            assert one["difference"] <= 1e-5 and one["milliseconds"] > 0
            assert f"{one['milliseconds']:.4f} ms" in out


def test_a_way_that_is_wrong_shows() -> None:
    def blind(layer: Layer) -> Run:
        layer.mask = torch.zeros_like(layer.mask)
        return sdpa(layer)

    shape, cpu = Shape(1, 1, 2, 8, 6, 40), torch.device("cpu")
    wrong, right = measure(shape, torch.float32, cpu, 1e9, {"wrong": blind, "right": plain}, 1)
    assert wrong.difference is not None and wrong.difference > 1e-2
    assert right.difference == 0


def test_what_a_way_has_made_is_there_when_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph knows addresses alone; what the way keeps for itself goes with it."""

    def remembers(layer: Layer) -> Run:
        own, run = torch.zeros(1), plain(layer)
        return lambda: run() + own

    shape, cpu, tape = Shape(1, 1, 2, 8, 6, 40), torch.device("cpu"), Tape()
    monkeypatch.setattr(attention, "capture_on", lambda device: tape)
    (one,) = measure(shape, torch.float32, cpu, 1e9, {"one": remembers}, 2)
    assert one.captured and one.reason is None and tape.replayed == 2 and one.difference == 0


def test_the_floor_counts_what_is_live() -> None:
    layer = Layer.draw(Shape(2, 3, 4, 8, 5, 40), torch.float32, torch.device("cpu"))
    assert layer.floor == 2 * 4 * 8 * (2 * 3 * 45 + 2 * 12 * 5)
