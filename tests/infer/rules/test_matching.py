"""What processors that read the text are shown along the walked path, for the rules that let them.

Never a text past its end, and a repetition penalty counts what the tree has drafted so far.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from benchmarks.launches import Counts
from benchmarks.rule_launches import verified_at
from headstart.heads import Sampling, TokenTree, Topology
from headstart.infer import RULES, Speculator
from headstart.infer.rules import matching
from headstart.infer.rules.rule_api import Text, Verified, seen_in
from tests.support.scripted import make
from tests.support.tiny import VOCAB, prompts, tiny

READING = [name for name, rule in RULES.items() if rule.reads_prefix]


@pytest.mark.parametrize("stop", ["end token", "length"])
@pytest.mark.parametrize("rule", READING)
def test_no_function_is_asked_about_a_text_past_its_end(rule: str, stop: str) -> None:
    """A drafter that is always right, and drafts on behind the end, has rounds that cross it."""
    model, new = tiny("llama"), 9
    ids, mask = prompts([7, 4])
    length = ids.shape[1]
    options: dict[str, Any] = {"attention_mask": mask, "pad_token_id": 0, "do_sample": False}
    free = model.generate(ids, max_new_tokens=new + 8, **options)[:, length:]
    # The text without an end is the script, so that what is drafted behind the end is there too.
    assert free[0, 4] not in free[0, :4]
    options["eos_token_id"] = int(free[0, 4]) if stop == "end token" else None
    if RULES[rule].samples:  # as good as greedy, but judged by the rule
        options |= {"do_sample": True, "temperature": 1e-3, "top_k": 0, "seed": 3}
    asked: list[tuple[int, list[int]]] = []

    def allowed(row: int, text: Tensor) -> list[int]:
        asked.append((row, text.tolist()))
        return list(range(VOCAB))

    speculator = Speculator(
        model, make("heads", model, free, "always", scale=9.0), tree="chain:4", rule=rule
    )
    out = speculator.generate(ids, max_new_tokens=new, prefix_allowed_tokens_fn=allowed, **options)
    assert speculator.stats.tau > 2.5
    written = []
    for row, text in enumerate(out.tolist()):
        ends = [n for n, token in enumerate(text[length:]) if token == options["eos_token_id"]]
        last = length + (ends[0] if ends else new - 1)  # the last token's place
        written += [(row, text[:n]) for n in range(length, last + 1)]
    assert sorted(asked) == sorted(written)


@pytest.mark.parametrize("rule", READING)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_repetition_penalty_counts_the_drafted_tokens(rule: str, depth: int) -> None:
    """After every node of a chain the target would repeat it, but for the penalty."""
    tokens = torch.arange(1, depth + 2).unsqueeze(0)  # the root, then the drafted ones
    shape = Topology.from_parents(torch.arange(-1, depth).unsqueeze(0), depth)
    tree = TokenTree(tokens, shape, None, torch.full_like(tokens, -1))
    logits = torch.zeros(1, depth + 1, 9, dtype=torch.float64)
    logits.scatter_(2, tokens.unsqueeze(-1), 80.0)  # what was drafted already: the node itself
    logits.scatter_(2, tokens.unsqueeze(-1) + 1, 60.0)  # what is drafted next
    ids = torch.zeros(1, 4 + depth, dtype=torch.long)
    ids[0, 1] = 1
    text = Text(ids, 2, seen=seen_in(ids[:, :1], 9))
    penalty = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.0)])
    seeds = torch.tensor([5]) if RULES[rule].samples else None
    sampling = Sampling(seeds, penalty, torch.float64)
    accepted = RULES[rule].accept(Verified(tree, logits, sampling, torch.tensor([1]), text))
    assert accepted.count.tolist() == [depth + 1]
    assert accepted.tokens.tolist() == [[*range(2, depth + 3)]]


@pytest.mark.parametrize(
    ("capability", "at_once"), [((8, 0), True), ((8, 9), False), ((10, 0), True), (None, False)]
)
@pytest.mark.parametrize("rule", ["coupled", "match"])
def test_where_noise_is_quick_all_nodes_are_scored_at_once(
    rule: str, capability: tuple[int, int] | None, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are the same; the launches do not grow with the depth."""
    launches = []
    for tree in ("chain:3", "chain:6"):
        verified = verified_at(tree, 1 << 17, None)
        expected = RULES[rule].accept(verified)
        with monkeypatch.context() as patch:
            patch.setattr(matching, "has_kernels", lambda logits: capability is not None)
            patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
            with Counts() as counted:
                found = RULES[rule].accept(verified)
        assert torch.equal(found.tokens, expected.tokens)
        assert torch.equal(found.count, expected.count)
        launches.append(counted.launches)
    assert (launches[0] == launches[1]) == at_once
