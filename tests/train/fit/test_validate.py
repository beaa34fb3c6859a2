"""Validation: ranks that fit the decode loop, trees that accept most."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from headstart.heads import OptionError, family
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.heads.suffix import Suffix, SuffixConfig
from headstart.infer import Speculator, StaticTree, parse_static
from headstart.infer.measure.own_text import Written, write_texts
from headstart.infer.measure.ranks import MISSED, best_tree, measure_ranks
from headstart.train.data.held_out import HeldOutPrompt
from headstart.train.data.training_rows import write_rows
from headstart.train.fit import validate
from headstart.train.fit.validate import (
    Validation,
    measure_tau,
    ratio,
    standard_error,
    tau_table,
)
from headstart.train.recipe import Distill
from tests.support.counting import SIZE, counting_drafter, counting_rows, counting_target
from tests.support.tiny import VOCAB, tiny


def second_best(drafter: Medusa, head: int) -> Medusa:
    """Make one head put the true token second, behind the token after it."""
    assert drafter.output is not None
    with torch.no_grad():
        drafter.output[head - 1] += 2 * torch.eye(SIZE).roll(head + 2, 0)
    return drafter


RESTRICTED = [{"min_p": 0.9}, {"typical_p": 0.2}, {"epsilon_cutoff": 0.2}, {"eta_cutoff": 0.5}]


@pytest.mark.parametrize("restricted", RESTRICTED, ids=lambda own: next(iter(own)))
def test_sampling_is_from_all_tokens_whatever_the_target_says(
    restricted: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of training text as of validation."""
    target = tiny("llama")
    spec = Distill(temperature=1.0, prefix_tokens=3, new_tokens=8)
    prompts = [torch.tensor([1, 2, 3 + n]) for n in range(4)]
    drafter = Medusa(MedusaConfig.for_target(target, heads=2)).double().bind(target)

    def sampled() -> tuple[list[int], list[list[int]]]:
        text = write_rows(Speculator(target), prompts, [5, 6, 7, 8], spec)[0]
        told = measure_tau(target, drafter, StaticTree.chain(2), "coupled", prompts, 8)
        return text.flatten().tolist(), [shown["ids"] for shown in told["samples"]]

    expected = sampled()
    for name, value in restricted.items():
        monkeypatch.setattr(target.generation_config, name, value)
    assert sampled() == expected


def test_what_was_decoded_before_is_not_remembered() -> None:
    """Each tree decodes the same prompts, and would find their answers."""
    target = tiny("llama")
    drafter = Suffix(SuffixConfig.for_target(target)).bind(target)
    prompts = [torch.tensor([1, 2, 3 + n]) for n in range(4)]
    given = target, drafter, StaticTree.chain(3), "coupled", prompts, 24
    assert measure_tau(*given)["tau"] == measure_tau(*given)["tau"] < 3


def test_ranks_fit_the_decode_loop() -> None:
    target = counting_target()
    drafter = second_best(counting_drafter(target, heads=3), head=2)
    prompts = list(counting_rows(2, 5))
    ranks = measure_ranks(drafter, write_texts(target, drafter, prompts, 12))
    # A round may start at any of the 12 written tokens but the last.
    ends = [[0, 1, MISSED], [0, MISSED, MISSED]]
    assert [row.tolist() for row in ranks] == [[[0, 1, 0]] * 9 + ends] * 2
    tree = StaticTree(best_tree(ranks, nodes=4))
    assert tree.paths == ((0,), (0, 1), (0, 1, 0))
    measured = measure_tau(target, drafter, tree, "greedy", prompts, 13)
    samples = measured.pop("samples")
    assert measured == {
        "tau": 4.0, "tau_se": 0.0, "tau_by_prompt": [4.0, 4.0], "rounds": 6,
        "acceptance_by_depth": [1.0, 1.0, 1.0],
    }  # fmt: skip
    assert [each["prompt"] for each in samples] == [prompt.tolist() for prompt in prompts]
    for each in samples:  # the first token came with the prefill
        assert each["rounds"] == [(4, 4)] * 3 and len(each["ids"]) == 13
    chain = measure_tau(target, drafter, StaticTree.chain(3), "greedy", prompts, 13)
    assert chain["tau"] == 2.0


def test_sparse_trees_follow_the_drafter() -> None:
    target = counting_target()
    validation = Validation(target, list(counting_rows(2, 5)), 12, "sparse:4", "greedy")
    right = validation(counting_drafter(target, heads=3))
    assert right["tree"] == [[0], [0, 0], [0, 0, 0]]
    assert right["simulated_tau"] == right["tau"] == 11 / 3
    other = validation(second_best(counting_drafter(target, heads=3), head=1))
    assert other["tree"] == [[1], [1, 0], [1, 0, 0]]
    fixed = Validation(target, list(counting_rows(2, 5)), 12, "chain:2", "greedy")
    found = fixed(counting_drafter(target, heads=3))
    assert found["tree"] == [[0], [0, 0]] and found["simulated_tau"] == found["tau"] == 11 / 4
    sampled = Validation(target, list(counting_rows(2, 5)), 12, "chain:2", "match")
    assert "simulated_tau" not in sampled(counting_drafter(target, heads=3))


def test_features_of_validation_are_not_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training needs its memory. No more than one batch's are there at once."""

    class OnDevice(torch.Tensor):
        def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return self.as_subclass(torch.Tensor)

    written: list[int] = []

    def write(target: Any, drafter: Any, prompts: Any, *how: Any) -> list[Written]:
        texts = write_texts(target, drafter, prompts, *how)
        written.append(len(texts))
        return [replace(t, features=t.features.as_subclass(OnDevice)) for t in texts]

    monkeypatch.setattr(validate, "write_texts", write)
    target = counting_target()
    validation = Validation(target, list(counting_rows(40, 5)), 12, "sparse:4", "greedy")
    assert validation(counting_drafter(target, heads=3))["tau"] == 11 / 3
    assert written == [32, 8] and validation._texts is not None
    assert {type(text.features) for text in validation._texts} == {torch.Tensor}
    validation(counting_drafter(target, heads=3))
    assert written == [32, 8]


def test_a_drafter_that_observes_decodes_for_its_figures() -> None:
    """What it proposes depends on the tree, so nothing is told from its recorded ranks."""
    model = tiny("llama")
    drafter = family("recycling").of_target(model).bind(model)
    prompts = list(torch.randint(VOCAB, (3, 12), generator=torch.Generator().manual_seed(3)))
    found = Validation(model, prompts, 40, "sparse:12", "greedy")(drafter)
    assert found["tau"] > 1 and not {"simulated_tau", "tree_shares"} & found.keys()
    tree = parse_static(found["tree"])
    rows = tau_table(model, drafter, tree, prompts, 40, chains=(2,))
    assert [(row["nodes"], row["temperature"]) for row in rows] == [
        (3, 0),
        (12, 0),
        (3, 1),
        (12, 1),
    ]
    assert rows[1]["tau"] == found["tau"] > rows[0]["tau"]


def test_prompts_of_different_lengths_are_decoded_as_each_alone() -> None:
    target = counting_target()
    drafter = second_best(counting_drafter(target, heads=3), head=2)
    tree = StaticTree([[0], [1], [0, 0]])
    lengths = [3, 9, 1, 6, 4]
    rows = [row[:n] for row, n in zip(counting_rows(5, 9), lengths, strict=True)]
    alone = [measure_tau(target, drafter, tree, "greedy", [row], 13) for row in rows]
    prompts = [
        HeldOutPrompt(row, f"chat {i // 2}", source="short" if len(row) < 4 else "long")
        for i, row in enumerate(rows)
    ]
    together = measure_tau(target, drafter, tree, "greedy", prompts, 13)
    # Twelve tokens of each prompt come in rounds.
    rounds = [12 / one["tau"] for one in alone]
    assert together["tau"] == pytest.approx(60 / sum(rounds))
    by_source = together["tau_by_source"]
    assert {name: of["prompts"] for name, of in by_source.items()} == {"long": 3, "short": 2}
    assert by_source["short"]["tau"] == pytest.approx(24 / (rounds[0] + rounds[2]))


def test_the_standard_error_is_the_spread_of_samples_of_documents() -> None:
    """Chats of several turns, whose prompts are alike: as if each were a document is too sure."""
    generator = np.random.default_rng(0)

    def sample() -> tuple[np.ndarray, list[str]]:
        counts, documents = [], []
        for chat in range(24):
            ease = generator.normal(3.0, 0.5)
            for _ in range(generator.integers(1, 5)):
                rounds = int(generator.integers(5, 40))
                counts.append((round(rounds * ease), rounds))
                documents.append(str(chat))
        return np.array(counts), documents

    samples = [sample() for _ in range(400)]
    spread = np.std([ratio(counts) for counts, _ in samples])
    errors: Any = [standard_error(counts, documents) for counts, documents in samples]
    assert np.mean(errors) == pytest.approx(spread, rel=0.1)
    alone: Any = [standard_error(c, list(map(str, range(len(c))))) for c, _ in samples]
    assert np.mean(alone) < 0.8 * spread
    assert standard_error(np.array([[3, 1], [5, 2]]), ["a", "a"]) is None


@pytest.mark.parametrize("rule", ["match", "coupled"])
def test_sampling_rules_are_measured_too(rule: str) -> None:
    target = counting_target()
    drafter = counting_drafter(target, heads=2)
    measured = measure_tau(target, drafter, StaticTree.chain(2), rule, list(counting_rows(2, 5)), 9)
    assert 1.0 <= measured["tau"] <= 3.0


def test_ranks_outside_a_trimmed_vocabulary_are_last() -> None:
    target = counting_target()
    drafter = counting_drafter(target, heads=1)
    trimmed = Medusa(type(drafter.config)(
        hidden_size=SIZE, vocab_size=SIZE, heads=1, output="trimmed", draft_vocab_size=4
    )).bind(target)  # fmt: skip
    assert isinstance(trimmed, Medusa) and trimmed.output is not None and drafter.output is not None
    with torch.no_grad():
        trimmed.vocabulary.copy_(torch.tensor([7, 8, 9, 10]))
        trimmed.output.copy_(drafter.output[:, 7:11])
    tokens = torch.arange(12)
    (ranks,) = measure_ranks(trimmed, [Written(tokens, torch.eye(SIZE)[:12], prompt=3)])
    wanted = [MISSED] * 3 + [0] * 4 + [MISSED]
    assert ranks.flatten().tolist() == wanted  # tokens 4 … 11


def test_the_best_tree_counts_paths_and_not_heads_apart() -> None:
    # Each head is right half of the time, but they are right together or not at all.
    joint = [torch.tensor([[0, 0], [1, 1]] * 8)]
    assert best_tree(joint, nodes=5, passes=1) == [[0], [1], [0, 0], [1, 1]]


def rate(row: list[list[int]], paths: list[list[int]]) -> float:
    """Tokens per round of a tree on a text, walked as the decode loop does."""
    at = rounds = 0
    while at < len(row):
        depth = max(d for d in range(len(row[at]) + 1) if not d or row[at][:d] in paths)
        at, rounds = at + depth + 1, rounds + 1
    return at / rounds


def test_the_best_tree_looks_where_rounds_start() -> None:
    generator = torch.Generator().manual_seed(0)
    better = 0
    for _ in range(20):
        # Texts that repeat a motif, where most positions may never start a round.
        motif = torch.randint(3, (7, 3), generator=generator)
        row = motif.repeat(12, 1)
        once, often = (rate(row.tolist(), best_tree([row], 4, passes)) for passes in (1, 4))
        assert often >= once
        better += often > once
    assert better > 0


def test_unlikely_ranks_get_no_node() -> None:
    assert best_tree([torch.tensor([[60, 0]] * 5)], nodes=3) == []


@pytest.mark.parametrize("tree", ["sparse:", "sparse:1", "sparse:x"])
def test_refusals(tree: str) -> None:
    with pytest.raises(OptionError, match="expected sparse:N"):
        Validation(counting_target(), [], 4, tree, "greedy")
