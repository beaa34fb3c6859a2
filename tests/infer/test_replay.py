"""A replayed round is the loop's own: its tokens, its probabilities and its reasons."""

import itertools
from typing import Any

import pytest
import torch

from headstart.heads import DrafterGroup, OptionError
from headstart.infer import Grammar, Speculator
from headstart.infer.replay import ReplayedRound, replay_round
from tests.support.chats import CHATML, chat_tokenizer
from tests.support.drafters import made
from tests.support.scripted import make
from tests.support.talker import talker
from tests.support.tiny import prompts, tiny

NEW = 24
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 8, "temperature": 0.8, "seed": 5}
CASES = {
    "greedy": (["cached"], "cartesian:2,2,1", None, {"do_sample": False}),
    "heads": (["heads"], "[[0],[1],[2],[0,0],[0,1],[1,0]]", None, {"do_sample": False}),
    "best-first": (["cached"], "best-first:9,3,4", None, {"do_sample": False}),
    "beam": (["cached"], "beam:3,3", None, {"do_sample": False}),
    "candidates": (["lookup"], "cartesian:2,1", None, {"do_sample": False}),
    "coupled": (["cached"], "cartesian:2,2", None, SAMPLED),
    "rejection": (["cached"], "cartesian:2,2", "rejection", SAMPLED),
    "traversal": (["heads"], "cartesian:2,2", "traversal", SAMPLED),
    "block": (["cached"], "chain:3", "block", SAMPLED),
    "typical": (["cached"], "cartesian:2,2", "typical", SAMPLED),
    "union": (["heads", "cached"], "cartesian:2,1+chain:3", None, {"do_sample": False}),
    "penalty": (["cached"], "chain:3", None, {"do_sample": False, "repetition_penalty": 1.3}),
    "ngrams": (["cached"], "chain:3", None, {"do_sample": False, "no_repeat_ngram_size": 2}),
    "counts": (["cached"], "chain:3", None, {"do_sample": False, "presence_penalty": 2.0}),
    "reader": (["cached"], "chain:3", None, {"do_sample": False, "bad_words_ids": [[7, 9], [8]]}),
}


def speculator_of(case: str) -> tuple[Speculator, torch.Tensor, dict[str, Any]]:
    shapes, tree, rule, options = CASES[case]
    ids, _ = prompts([9])
    plain = Speculator(tiny("llama")).generate(ids, max_new_tokens=NEW + 8, **options)
    how = ("always", 4.0) if case == "block" else ("sometimes", 1.0)  # a chain is soon rejected
    drafters = [make(shape, tiny("llama"), plain[:, 9:], *how) for shape in shapes]
    return Speculator(tiny("llama"), DrafterGroup(drafters), tree=tree, rule=rule), ids, options


def whole(speculator: Speculator, ids: torch.Tensor, options: Any, rounds: int) -> list[Any]:
    return [
        replay_round(speculator, ids, n, max_new_tokens=NEW, **options) for n in range(1, rounds)
    ]


@pytest.mark.parametrize("case", CASES)
def test_rounds_join_to_the_text(case: str) -> None:
    speculator, ids, options = speculator_of(case)
    out = speculator.generate(ids, max_new_tokens=NEW, **options)[0].tolist()
    counts = speculator.stats.counts[:, 0].tolist()
    drafted = speculator.stats.drafted.depths[0].tolist()
    rounds = min(len(counts), 6)
    accepted = 0
    for number, found in enumerate(whole(speculator, ids, options, rounds + 1), start=1):
        before = 10 + sum(counts[: number - 1])
        assert found.text == out[:before]
        assert found.emitted == out[before : before + counts[number - 1]]
        path = [node for node in found.nodes if node.accepted]
        taken = [node.depth for node in path[1:]] + [0]
        assert taken[: len(found.emitted)] == drafted[before - 9 :][: len(found.emitted)]
        accepted += len(path) - 1
        _check(found, speculator)
    assert accepted >= 1


def _check(found: ReplayedRound, speculator: Speculator) -> None:
    """The tree holds together, and what an approving reason says fits what was accepted."""
    nodes = {node.number: node for node in found.nodes}
    for node in found.nodes[1:]:
        above = nodes[node.parent]
        assert node.depth == above.depth + 1 and node.why
        if node.accepted:
            assert above.accepted
        assert (node.why == "its parent was not accepted") == (not above.accepted)
        if node.why == "the target chose it":
            assert node.accepted
        if node.why.startswith("needs a draw below") and ";" not in node.why:
            bound, drawn = (float(part.split()[-1]) for part in node.why.split(","))
            assert node.accepted == (drawn < bound) or drawn == bound
        assert node.wanted is not None and 0 <= node.wanted <= 1
        assert 0 <= node.drafter < len(speculator.drafters.drafters)
    assert 0 <= found.last <= 1


@pytest.mark.parametrize("case", ["greedy", "coupled", "best-first", "union"])
def test_probabilities_are_those_of_target_and_drafter(case: str) -> None:
    """The target's by a forward of the text and each path; a drafter's sum to 1 at most."""
    speculator, ids, options = speculator_of(case)
    found = replay_round(speculator, ids, 2, max_new_tokens=NEW, **options)
    nodes = {node.number: node for node in found.nodes}
    checked = 0
    for node in found.nodes[1:]:
        path, above = [], nodes[node.parent]
        while above.number:
            path.insert(0, above.token)
            above = nodes[above.parent]
        with torch.no_grad():
            logits = tiny("llama")(torch.tensor([[*found.text, *path]])).logits
        scores = logits[0, -1].float()
        if options["do_sample"]:
            scores = scores / 0.8
            scores[scores < scores.topk(8).values[-1]] = -torch.inf
        assert node.wanted == pytest.approx(float(scores.softmax(-1)[node.token]), abs=1e-5)
        checked += 1
    assert checked > 3
    family = sorted(found.nodes[1:], key=lambda node: (node.drafter, node.parent))
    for _, kids in itertools.groupby(family, key=lambda node: (node.drafter, node.parent)):
        shares = [kid.drafted for kid in kids]
        assert all(share is not None for share in shares)
        assert 0 < sum(share or 0 for share in shares) <= 1 + 1e-6


def test_candidates_have_no_probability() -> None:
    speculator, ids, options = speculator_of("candidates")
    found = [replay_round(speculator, ids, n, max_new_tokens=NEW, **options) for n in (1, 2, 3)]
    assert any(len(each.nodes) > 1 for each in found)
    assert all(node.drafted is None for each in found for node in each.nodes)


def test_a_round_that_there_is_not() -> None:
    speculator, ids, options = speculator_of("greedy")
    with pytest.raises(OptionError, match=r"the text ends after .* before round 9"):
        replay_round(speculator, ids, 9, max_new_tokens=4, **options)
    with pytest.raises(OptionError, match="expected one prompt"):
        replay_round(speculator, ids.expand(2, -1), 1)
    with pytest.raises(OptionError, match="a round from 1"):
        replay_round(speculator, ids, 0)
    with pytest.raises(OptionError, match="max_new_tokens is 0, which no round writes"):
        replay_round(speculator, ids, max_new_tokens=0)


@pytest.mark.parametrize(
    ("names", "tree"), [(["eagle"], "cartesian:2,2"), (["medusa", "eagle"], "chain:3+chain:2")]
)
def test_a_text_within_a_form_that_a_string_stops(names: list[str], tree: str) -> None:
    tokenizer = chat_tokenizer(CHATML)
    torch.manual_seed(0)
    model: Any = talker(tokenizer, "<|im_end|>", eagerness=1.0, context=256).double()
    ids = tokenizer("count", return_tensors="pt").input_ids
    form = Grammar.regex("[0-9]{3}-(ab){9}!")
    how: dict[str, Any] = {"do_sample": False, "grammar": form, "max_new_tokens": 40}
    drafters = [made(name, model).double() for name in names]
    speculator = Speculator(model, DrafterGroup(drafters), tree=tree, tokenizer=tokenizer)
    how |= {"stop_strings": "-aba", "temperature": 0}
    out = speculator.generate(ids, **how)[0].tolist()
    number, text, drafted = 0, list[int](), 0
    while len(text) < len(out):
        found = replay_round(speculator, ids, number := number + 1, **how)
        text = found.text + found.emitted
        assert text == out[: len(text)]
        drafted += len(found.nodes) - 1
    assert text == out and drafted and str(tokenizer.decode(out)).endswith("-aba")
    with pytest.raises(OptionError, match=f"before round {number + 1}"):
        replay_round(speculator, ids, number + 1, **how)


def test_the_speculator_decodes_on_as_before() -> None:
    speculator, ids, options = speculator_of("greedy")
    out = speculator.generate(ids, max_new_tokens=NEW, **options)
    tau = speculator.stats.tau
    replay_round(speculator, ids, 2, **options)
    assert speculator.stats.tau == tau
    assert torch.equal(speculator.generate(ids, max_new_tokens=NEW, **options), out)
