"""What accepting costs: time against a forward, memory, and no host sync."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaModel, LogitsProcessorList

from headstart.heads import Sampling, TokenTree, Topology
from headstart.infer.rules.registry import RULES
from headstart.infer.rules.rule_api import Text, Verified
from headstart.infer.trees.parse import parse_static
from tests.support.syncs import WARPERS, NoSync

WALKING = [name for name, rule in RULES.items() if rule.samples]


def verified_of(
    rule: str, batch: int, vocab: int, drawn: bool, processors: Any = None, known: bool = True
) -> Verified:
    """64 nodes, or a chain of 8 for `block`, in float32; every inner node has its proposals."""
    static = parse_static("chain:7" if RULES[rule].chains_only else "cartesian:3,4,4")
    topology, proposal_row = static.shape(batch, torch.device("cpu"))
    if not known:
        topology = Topology.from_parents(topology.parents, static.max_depth, static.width)
    nodes, inner = static.nodes, sorted({*static.parents[1:]})
    rows = torch.tensor([-1, *(inner.index(parent) for parent in static.parents[1:])])
    tokens = torch.randint(vocab, (batch, nodes))
    logits, proposals = torch.randn(batch, nodes, vocab), torch.randn(batch, len(inner), vocab)
    tree = TokenTree(
        tokens,
        topology,
        None,
        rows.expand(batch, -1) if drawn else proposal_row,
        proposals if drawn else None,
    )
    sampling = Sampling(torch.arange(batch), processors)
    text = Text(torch.zeros(batch, 80, dtype=torch.long), 1)
    return Verified(tree, logits, sampling, torch.zeros(batch, dtype=torch.long), text)


class Largest(TorchDispatchMode):
    """Notes the most numbers that a new floating-point tensor held."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for value in found if isinstance(found, tuple | list) else [found]:
            if isinstance(value, Tensor) and value.is_floating_point() and not value._is_view():
                self.most = max(self.most, value.numel())
        return found


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("rule", WALKING)
@torch.no_grad()
def test_one_row_of_the_vocabulary_at_a_time(rule: str, drawn: bool, known: bool) -> None:
    """Nothing larger than [B, V] is made, and the host is never asked to wait."""
    verified = verified_of(rule, 3, 5000, drawn, LogitsProcessorList(WARPERS), known)
    with NoSync(), Largest() as largest:
        RULES[rule].accept(verified)
    assert largest.most == 3 * 5000


def test_a_row_for_every_node_would_be_noticed() -> None:
    """Negative control."""
    verified = verified_of("rejection", 3, 5000, True)
    with Largest() as largest:
        verified.logits.softmax(-1)
    assert largest.most == 3 * 64 * 5000


def seconds(run: Callable[[], object], times: int) -> float:
    """The median of a few runs, after one."""
    run()
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        run()
        found.append(time.perf_counter() - begun)
    return sorted(found)[times // 2]


@pytest.mark.proof
@torch.no_grad()
def test_accepting_costs_under_a_twentieth_of_the_forward(capsys: pytest.CaptureFixture) -> None:
    """64 nodes, V = 32,000, batch 8, against a Llama of 16 layers and 1.0 B parameters.

    The forward is two of its layers on the same 8 × 64 tokens, times 8, and its output layer.
    """
    torch.set_num_threads(2)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    layers, out = LlamaModel(config).eval(), torch.nn.Linear(2048, 32_000, bias=False)
    ids, hidden = torch.randint(32_000, (8, 64)), torch.randn(8, 64, 2048)
    forward = 8 * seconds(lambda: layers(ids), 3) + seconds(lambda: out(hidden), 3)

    shares = {}
    for rule in WALKING:
        for drawn in (True, False) if "with_replacement" not in RULES[rule].refuses else (False,):
            for known in (True, False):
                verified = verified_of(rule, 8, 32_000, drawn, None, known)
                spent = seconds(
                    lambda rule=rule, verified=verified: RULES[rule].accept(verified), 5
                )
                shares[rule, drawn, known] = spent / forward
    with capsys.disabled():
        print(f"\nforward {forward * 1e3:.0f} ms (two layers, scaled)")
        for (rule, drawn, known), share in shares.items():
            children = "drawn" if drawn else "point masses"
            shape = "static" if known else "rows may differ"
            took = share * forward * 1e3
            print(f"{rule:10} {children:13} {shape:16} {took:7.1f} ms {share:.2%}")
    assert max(shares.values()) < 0.05
