"""The CPU benchmark runs whole at toy size, and counts what it says it counts."""

import json

import pytest
import torch

from benchmarks.cpu import __main__ as cpu
from benchmarks.cpu import limit, shapes
from headstart.heads.core.cpu_compile import instruction_sets, kernels
from headstart.heads.core.packing import onednn_packs
from headstart.infer import Speculator
from headstart.infer.measure.roofline import Roofline, round_bytes


def test_it_runs_at_toy_size(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--shape", "toy", "--prompt", "8", "--new-tokens", "6", "--repeats", "1"]
    cpu.main(["limit", *small, "--megabytes", "8", "--dtype", "float32", "--json"])
    (found,) = json.loads(capsys.readouterr().out)
    assert found["same text"] and found["ms a token"].keys() == {*limit.WAYS, "generate"}
    assert [int(n) for n in found["ms of a tree's forward"]["packed"]] == list(limit.NODES)
    share = (
        found["bytes a round"] / (found["GB read a second"] * 1e6) / found["ms a token"]["eager"]
    )
    assert found["share of the limit"]["eager"] == pytest.approx(share)


def test_products_are_timed_in_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    cpu.main(["products", "--shape", "toy", "--repeats", "1", "--rows", "2", "--json"])
    found = json.loads(capsys.readouterr().out)
    ways = ["torch", *["packed for oneDNN"] * onednn_packs(torch.bfloat16)]
    if kernels(torch.bfloat16) is not None:
        for name in instruction_sets(torch.bfloat16):
            ways += [name, f"{name}, layers together"]
    assert [*found["ms"]] == [*ways, *(f"{way}, pages of 2 MB" for way in ways)]
    assert found["MB"] == 2e-6 * (2 * (4 * 64 * 64 + 3 * 64 * 128) + 256 * 64)


def test_bytes_are_those_of_the_weights_and_the_live_cache() -> None:
    model = shapes.random_llama("toy", torch.bfloat16)
    layers = 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64  # products, and norms
    head, line = 256 * 64, 64
    assert round_bytes(model, 3) == 2 * (layers + head + 3 * line)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    assert round_bytes(model, 3) == 2 * (layers + head)
    speculator = Speculator(model)
    speculator.generate(torch.ones(2, 5, dtype=torch.long), max_new_tokens=2)
    cache = speculator.target.cache
    assert cache.bytes_of(cache.batch, 5) == 2 * 2 * (2 * 5 * 2 * 64)
    assert Roofline(3_000_000, 1_000_000, 4e9).ms == pytest.approx(1.0)
    assert Roofline(3_000_000, 1_000_000, 4e9).share(2.0) == pytest.approx(0.5)
