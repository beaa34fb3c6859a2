"""Drafts within the form of a text: the text is the same, and no node is spent on others."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from headstart.heads import Step, TokenTree, family
from headstart.heads.core.forms import Form, FormsByRow
from headstart.infer import Grammar, Speculator
from headstart.infer import round as rounds
from headstart.infer.grammars import GrammarForm, GrammarTokens
from headstart.infer.masked_proposals import MaskedProposals
from tests.support.chats import CHATML, chat_tokenizer
from tests.support.talker import talker

TREES = ["cartesian:3,2,1", "best-first:10,3,3", "beam:2,3"]
DRAFTERS = ["medusa", "hydra", "eagle", "lookup", "recycling", "medusa+lookup"]


@pytest.fixture(scope="module")
def model() -> Any:
    return talker(chat_tokenizer(CHATML), "<|im_end|>", eagerness=1.0, context=256)


def speculator(model: Any, names: str, tree: str) -> Speculator:
    torch.manual_seed(1)
    drafters = [family(name).of_target(model).double().bind(model) for name in names.split("+")]
    whole = "+".join([tree] * len(drafters))
    return Speculator(model, drafters, tree=whole, tokenizer=chat_tokenizer(CHATML))


@pytest.mark.parametrize("names", DRAFTERS)
@pytest.mark.parametrize("tree", TREES)
def test_drafts_stay_within_the_form(
    model: Any, names: str, tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    ours, tokenizer = speculator(model, names, tree), chat_tokenizer(CHATML)
    tokenizer.padding_side = "left"
    inputs: Any = tokenizer(["a b a b", "once"], return_tensors="pt", padding=True)
    grammar = Grammar.regex("(ab|cd)[0-9][xyz]{1,3}(once){2}(true|false)+")
    options = {**inputs, "max_new_tokens": 30, "do_sample": True, "temperature": 2.0, "seed": 3}
    plain = Speculator(model, tokenizer=tokenizer).generate(**options, grammar=grammar)
    prepared = GrammarTokens(tokenizer, tokenizer.encode("<|im_end|>"))
    form = GrammarForm(grammar, prepared, inputs["input_ids"].shape[1])
    trees: list[tuple[TokenTree, Sequence[np.ndarray]]] = []
    true = rounds.accept_and_commit

    def noted(request: Any, tree: TokenTree, *rest: Any) -> Any:
        if tree.nodes > 1:
            trees.append((tree, request.texts()))
        return true(request, tree, *rest)

    monkeypatch.setattr(rounds, "accept_and_commit", noted)
    assert torch.equal(ours.generate(**options, grammar=grammar), plain)
    nodes = sum(count_within(form, tree, texts, len(tokenizer)) for tree, texts in trees)
    assert len(trees) > 3 and nodes > 3 * len(trees)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_verification_reads_only_the_texts_that_are_written(
    model: Any, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    torch.manual_seed(1)
    drafter = family("medusa").of_target(model).double().bind(model)
    tokenizer = chat_tokenizer(CHATML)
    ours = Speculator(model, drafter, tree="chain:4", rule=rule, tokenizer=tokenizer)
    read, true = [], FormsByRow.within

    def counted(self: FormsByRow, *given: Any) -> Any:
        read.append(given)
        return true(self, *given)

    monkeypatch.setattr(FormsByRow, "within", counted)
    inputs: Any = tokenizer("once", return_tensors="pt")
    options = {"max_new_tokens": 200, "do_sample": True, "seed": 3}
    output = ours.generate(**inputs, **options, grammar=Grammar.regex("(ab|cd){4}[xyz]{9,20}"))
    written = output.shape[1] - inputs["input_ids"].shape[1]
    assert len(read) == written < 200


def count_within(form: Form, tree: TokenTree, texts: Sequence[np.ndarray], vocabulary: int) -> int:
    """How many nodes could be tokens of the texts; the first child of each of those must be one."""
    count, parents = 0, tree.topology.parents
    for row, root in enumerate(texts):
        known = {0: root}
        for parent in range(tree.nodes):
            if parent not in known:
                continue
            bits = np.full((vocabulary + 7) // 8, 255, dtype=np.uint8)
            form.allow(known[parent], bits)
            allowed = np.unpackbits(bits, bitorder="little")
            children = (parents[row] == parent).nonzero().flatten().tolist()
            if tree.valid is not None:
                children = [child for child in children if tree.valid[row, child]]
            good = [child for child in children if allowed[tree.tokens[row, child]]]
            assert good[:1] == children[:1]
            known |= {c: np.append(known[parent], int(tree.tokens[row, c])) for c in good}
            count += len(good)
    return count


class Fixed(Form):
    """Allows these tokens, and says that one must follow."""

    def __init__(self, allowed: Sequence[int], forced: int = -1):
        self.mask, self.must = sum(1 << token for token in allowed), forced

    def allow(self, text: np.ndarray, bits: np.ndarray) -> bool:
        bits.fill(self.mask)
        return True

    def forced(self, text: np.ndarray) -> int:
        return self.must


class Given:
    """A drafter that proposes what it is given."""

    independent = False

    def __init__(self, step: Step):
        self.step, self.config = step, type("Config", (), {"vocab_size": 6})

    def begin(self, *given: Any) -> Step:
        return self.step


def proposed(step: Step, *forms: Form | None) -> Step:
    texts = [np.array([0])] * len(forms)
    (member,) = MaskedProposals([Given(step)], FormsByRow(forms), texts).members
    nothing = torch.empty(0)
    return member.begin(None, nothing, nothing, nothing)


def test_logits_of_what_is_excluded() -> None:
    logits = torch.arange(4.0).expand(3, 1, 4)
    step = Step(logits, vocabulary=torch.tensor([5, 1, 2, 0]))
    found = proposed(step, Fixed([5, 2, 3]), None, Fixed([3, 4])).logits
    assert found is not None
    never = -torch.inf
    # The third row's drafter knows none of the tokens that are allowed.
    expected = [[0.0, never, 2.0, never], [0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]]
    assert found.squeeze(1).tolist() == expected


def test_candidates_close_up_and_what_must_follow_takes_an_empty_place() -> None:
    ids = torch.tensor([3, 1, 5, -1]).expand(4, 1, 4)
    step = Step(ids=ids, log_probs=torch.tensor([-1.0, -2.0, -3.0, -9.0]).expand(4, 1, 4))
    found = proposed(step, Fixed([1, 5, 0], 0), Fixed([0, 2], 2), Fixed([0, 2]), None)
    assert found.ids is not None and found.log_probs is not None
    expected = [[1, 5, -1, -1], [2, -1, -1, -1], [-1, -1, -1, -1], [3, 1, 5, -1]]
    assert found.ids.squeeze(1).tolist() == expected
    assert found.log_probs[:3, 0, 0].tolist() == [-2.0, 0.0, -torch.inf]
