"""Compiled forwards write the same text: one graph for each shape, without breaks.

The default tests trace and split the graphs as ever, and run them by torch's own operators; the
proofs, and a GPU, have them written by inductor.
"""

import copy
import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as tf
from torch._dynamo.utils import counters

from headstart.heads import OptionError, TokenTree, UnsupportedTarget
from headstart.heads.core import fused
from headstart.heads.core import tree_attention as attention
from headstart.infer import Speculator, StaticTree, request
from headstart.infer.target import Target
from tests.support.families import TREES, drafter, target
from tests.support.tape import SAMPLED, decode, on_tape
from tests.support.tiny import COMMON, one_line, tiny

STATIC = TREES[1]


@pytest.fixture(autouse=True)
def graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not any(map(request.node.get_closest_marker, ("proof", "gpu"))):
        true = functools.partial(torch.compile, backend="aot_eager")
        monkeypatch.setattr(torch, "compile", true)
    counters.clear()
    yield
    torch._dynamo.reset()


def counted() -> tuple[int, int]:
    """Graphs, and breaks between them."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def pair(name: str | None, tree: str = STATIC, **options: Any) -> tuple[Speculator, Speculator]:
    """A speculator that compiles, and one that does not."""
    proposer = None if name is None else drafter(name, "tiny")
    made = {"tree": tree, **options}
    compiled = Speculator(target("tiny"), proposer, compile="default", **made)
    return compiled, Speculator(target("tiny"), proposer, **made)


def test_one_graph_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks, however long the text is, and wherever its cache lies."""
    monkeypatch.setattr(request, "FIRST_TOKENS", 8)
    compiled, plain = pair("medusa")
    for turn, options in enumerate(({"max_new_tokens": 90}, SAMPLED)):
        text = decode(compiled, turn=turn, **options)
        assert torch.equal(text, decode(plain, turn=turn, **options))
        assert compiled.stats.counts.tolist() == plain.stats.counts.tolist()
        assert counted() == (1, 0)
    assert torch.equal(decode(compiled, 2), decode(plain, 2))
    assert counted() == (2, 0)


def test_features_are_those_of_their_own_drafter() -> None:
    """Forwards of one shape whose hooks differ; what is compiled does not look at hooks."""
    for name in (None, "medusa", "draft_model", "medusa"):
        compiled, plain = pair(name, "plain" if name is None else "chain:2")
        assert torch.equal(decode(compiled), decode(plain))
        assert compiled.stats.counts.tolist() == plain.stats.counts.tolist()


def test_windows_that_differ_by_layer() -> None:
    model = tiny("gemma3")
    options: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False}
    ids = torch.arange(11).view(1, -1)
    text = model.generate(ids, **options)  # type: ignore[operator]
    assert torch.equal(Speculator(model, compile="default").generate(ids, **options), text)
    assert counted() == (1, 0)


def test_captured_rounds_may_be_compiled() -> None:
    compiled, plain = pair("medusa")
    tape = on_tape(compiled)
    for turn in range(2):
        assert torch.equal(decode(compiled, turn=turn), decode(plain, turn=turn))
    assert tape.replayed > tape.taped > 0 and counted() == (1, 0)


def test_the_cache_is_written_by_attention_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: were it not, later rounds would see other keys."""

    def only_attend(query: Any, key: Any, value: Any, packed: Any, layer: int, *rest: Any) -> Any:
        keys, values = attention._now.slab.layer(layer)
        return attention.tree_attention(query, keys, values, packed, *rest)

    monkeypatch.setattr(attention, "_attend", only_attend)
    with pytest.raises(UnsupportedTarget, match=r"differ from plain ones .*leave compile out"):
        pair("medusa")


def test_what_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(OptionError, match=r"compile is 'reduce-overhead'; expected True") as caught:
        Speculator(target("tiny"), compile="reduce-overhead")
    one_line(caught.value)
    with pytest.raises(OptionError, match="compile with attention='masked'") as caught:
        Speculator(target("tiny"), compile="default", attention="masked")
    one_line(caught.value)
    config = {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2}
    model: Any = tf.GptOssForCausalLM(tf.GptOssConfig(**config)).eval()
    with pytest.raises(UnsupportedTarget, match=r"s_aux.*: leave compile out") as refused:
        Speculator(model, compile="default")
    one_line(refused.value)


def test_what_a_thread_has_of_its_own_is_seen() -> None:
    """Torch 2.11 takes a class's attribute for it where there is one, and compiles that."""
    kinds = [k for k in threading.local.__subclasses__() if k.__module__.startswith("headstart")]
    assert len(kinds) >= 5
    for kind in kinds:
        assert all(name.startswith("__") for name in vars(kind)), kind


@torch.no_grad()
@pytest.mark.proof
def test_more_shapes_than_torch_compiles_of_one_code() -> None:
    """It gives up after eight, with a warning at most, and would run the ninth as it is."""
    runner = Target(target("tiny"), compile="default")
    ids, lengths = torch.tensor([[5, 6, 7]]), torch.tensor([3])
    for nodes in range(1, 11):
        runner.prefill(ids, [3], 32)
        topology, row = StaticTree([[rank] for rank in range(nodes - 1)]).shape(1, ids.device)
        tree = TokenTree(ids[:, :1].expand(1, nodes), topology, None, row)
        runner.verify(tree, lengths, 3)
    assert counted() == (10, 0)


@pytest.mark.proof
@pytest.mark.parametrize("name", [None, "medusa", "draft_model"])
def test_inductor_writes_the_same(name: str | None) -> None:
    compiled, plain = pair(name, "plain" if name is None else STATIC)
    for turn, options in enumerate(({"max_new_tokens": 90}, SAMPLED)):
        text = decode(compiled, turn=turn, **options)
        assert torch.equal(text, decode(plain, turn=turn, **options))
        assert compiled.stats.counts.tolist() == plain.stats.counts.tolist()
    assert counted() == (1, 0)


@pytest.mark.gpu
def test_captured_rounds_are_compiled_on_a_gpu() -> None:
    model: Any = copy.deepcopy(tiny("llama")).to("cuda", torch.float32)
    options: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False, "repetition_penalty": 1.3}
    ids = torch.arange(11, device="cuda").view(1, -1)
    compiled = Speculator(model, compile="default")
    assert torch.equal(compiled.generate(ids, **options), model.generate(ids, **options))
    assert counted() == (1, 0) and compiled.graphs is not None and compiled.graphs.captures


def test_products_of_compiled_forwards_are_one_launch() -> None:
    """Of the same states, for few rows; the compiler sees all else as it is."""
    model, seen = copy.deepcopy(target("tiny")).double(), list[set[str]]()
    default: Any = torch.compile  # by aot_eager, see `graphs`

    def kept(graph: Any, inputs: Any) -> Any:
        names = [node.name for node in graph.graph.nodes]
        seen.append(
            {name for name in names if name.startswith(("three", "gated", "rms", "rotate"))}
        )
        return graph

    compiled = Speculator(model, compile="default", fused=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(default.func, backend=kept))
        decode(compiled)
    found = decode(compiled)
    assert torch.equal(found, decode(Speculator(copy.deepcopy(target("tiny")).double())))
    layers = model.config.num_hidden_layers
    assert counted() == (1, 0) and len(seen) == 1
    for kind in ("three_layers", "gated_layers"):
        assert sum(name.startswith(kind) for name in seen[0]) == layers
    assert not any(name.startswith(("rms", "rotate")) for name in seen[0])
    assert fused._now.states is None and not fused._now.ready
