"""Every family on every kind of tree, with every rule: greedy and sampled, alone and in a batch.

On the quickstart's target the drafters are those that `headstart train` left in `runs/`, and the
prompts are its held-out files; elsewhere both are random.
"""

import json
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.commands.quickstart import quickstart_of
from headstart.heads import FAMILIES, Drafter, DrafterGroup, family, load_drafter
from headstart.heads.draft_model import DraftModel
from headstart.heads.families import KNOWN, PUBLISHED
from headstart.infer import Speculator, parse_tree
from headstart.infer.rules import matching as choices
from headstart.infer.rules.registry import RULES
from headstart.infer.trees.expansions import SAMPLED
from tests.support.covering import covering
from tests.support.families import LENGTHS, TARGETS, TREES, UNIONS, drafter, own, target
from tests.support.paths import ROOT
from tests.support.tiny import prompts, tiny

NEW = 10


def recipes(name: str) -> list[str]:
    """The shipped recipes that train a drafter, or those that decode together."""
    return [quickstart_of(each) for each in name.split("+") if family(each).trainable]


def trees(name: str) -> list[str]:
    """The trees of a family, or of drafters that decode together."""
    return [f"{UNIONS[name]}+{tree}" for tree in TREES] if name in UNIONS else TREES


@cache
def pair(of: str, name: str) -> tuple[Any, Drafter | DrafterGroup]:
    """A target and its drafter; a trained one has a target of its own, which it may adapt."""
    trained = recipes(name)
    if of != "quickstart" or not trained:
        return target(of), drafter(name, of)
    model = target.__wrapped__(of)
    found = [load_drafter(ROOT / "runs" / recipe / "heads", model) for recipe in trained]
    found += [drafter(each, of) for each in name.split("+") if not family(each).trainable]
    return model, DrafterGroup(found) if len(found) > 1 else found[0]


def asked(of: str, batch: int) -> tuple[Tensor, Tensor, int]:
    """Prompts of unequal lengths, padded on the left, their mask, and how many tokens to write."""
    if of != "quickstart":
        return *prompts(LENGTHS[:batch]), NEW
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TARGETS[of])
    texts = (ROOT / "runs" / "quickstart" / "corpus" / "held_out.jsonl").read_text().splitlines()
    longest = 10 * max(LENGTHS)
    held_out = (tokenizer(json.loads(text)["text"]).input_ids for text in texts)
    enough = (found for found in held_out if len(found) >= longest)
    ids, mask = torch.zeros(2, batch, 10 * max(LENGTHS[:batch]), dtype=torch.long)
    for row, length in enumerate(LENGTHS[:batch]):
        ids[row, -10 * length :] = torch.tensor(next(enough)[: 10 * length])
        mask[row, -10 * length :] = 1
    return ids, mask, 4 * NEW


def cases() -> list[Any]:
    found = []
    pairs = [(name, tree) for name in (*FAMILIES, *UNIONS) for tree in trees(name)]
    chosen = [*product(TARGETS, pairs, (1, 4))]
    chosen += [(name, (name, tree), n) for name in PUBLISHED for tree in TREES for n in (1, 4)]
    for of, (name, tree), batch in chosen:
        folder, marks = TARGETS.get(of), []
        quick = of == "tiny" and batch == 4 if name in UNIONS else (of, batch) != ("stories260k", 1)
        if of == "quickstart" or not quick:
            marks.append(pytest.mark.proof)
        if folder is not None and not folder.is_dir():
            marks.append(pytest.mark.skip(reason=f"{of} is not on this machine"))
        elif of == "quickstart":
            for recipe in recipes(name):
                if not (ROOT / "runs" / recipe / "heads" / "headstart.json").is_file():
                    marks.append(pytest.mark.skip(reason=f"needs `headstart train {recipe}`"))
        found.append(
            pytest.param(
                of,
                name,
                tree,
                batch,
                marks=marks,
                id=f"{of}-{name}-{tree.rpartition('+')[2][:5]}-{batch}",
            )
        )
    return found


def few(found: list[Any]) -> list[Any]:
    """Of the cases that are no proofs, a covering few."""
    return covering([case.values for case in found if not case.marks]) + [
        case for case in found if case.marks
    ]


@pytest.mark.parametrize(("of", "name", "tree", "batch"), few(cases()))
def test_greedy_text_is_that_of_generate(of: str, name: str, tree: str, batch: int) -> None:
    ids, mask, new = asked(of, batch)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": new, "do_sample": False}
    options["pad_token_id"] = 0
    model, draft = pair(of, name)
    speculator = Speculator(model, draft, tree=tree)
    assert torch.equal(speculator.generate(ids, **options), model.generate(ids, **options))
    stats = speculator.stats
    assert stats.rounds > 0 and (of != "quickstart" or stats.tau > 1), "nothing was accepted"
    print(f"{of}, {name}, {tree}, {batch}: τ {stats.tau:.2f}")  # shown by `pytest -rP`


def sampled_cases() -> list[Any]:
    """With every rule that the tree can take."""
    return [
        pytest.param(*case.values, rule.name, marks=case.marks)
        for case in cases()
        for rule in RULES.values()
        if rule.samples and (not rule.chains_only or parse_tree(case.values[2]).in_place)
    ]


@pytest.mark.parametrize(("of", "name", "tree", "batch", "rule"), few(sampled_cases()))
def test_sampled_text(of: str, name: str, tree: str, batch: int, rule: str) -> None:
    """The rules of shared choices write plain decoding's text, the others each row's own."""
    ids, mask, new = asked(of, batch)
    seeds = [11, 12, 13, 14][:batch]
    options: dict[str, Any] = {
        "max_new_tokens": new, "do_sample": True, "top_k": 0, "temperature": 0.8, "pad_token_id": 0,
    }  # fmt: skip
    model, draft = pair(of, name)
    plain = Speculator(model).generate(ids, attention_mask=mask, seed=seeds, **options)
    record, policy, expansion = RULES[rule], parse_tree(tree), None
    static = all(hasattr(part, "paths") for part in getattr(policy, "parts", [policy]))
    if record.children in SAMPLED and not static:
        expansion = record.check_expansion("topk")  # searched trees take no drawn children
    speculator = Speculator(model, draft, tree=tree, rule=rule, expansion=expansion)
    text = speculator.generate(ids, attention_mask=mask, seed=seeds, **options)
    if record.same_text:
        assert torch.equal(text, plain)
        return
    assert text.shape == plain.shape and speculator.stats.rounds > 0
    for row in range(batch if batch > 1 else 0):
        own = ids[row][mask[row] == 1].unsqueeze(0)
        alone = speculator.generate(own, seed=[seeds[row]], **options)[0, own.shape[1] :]
        together = text[row, ids.shape[1] :]
        assert torch.equal(alone, together[: len(alone)]), row
        assert not together[len(alone) :].any(), "only padding follows the row's end"


@pytest.mark.parametrize("name", KNOWN)
def test_nothing_follows_an_end_token_that_was_walked_to(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nodes are asked level by level, those below an end token never are."""
    monkeypatch.setattr(choices, "_AT_ONCE", 0)
    ids, mask = prompts([9, 4, 7, 6])
    model = target(own(name))
    options: dict[str, Any] = {
        "attention_mask": mask, "max_new_tokens": 24, "do_sample": True, "top_k": 0, "seed": 3,
        "eos_token_id": list(range(0, 64, 9)), "pad_token_id": 0,
    }  # fmt: skip
    itself = DraftModel.of(tiny("llama")).bind(model) if name == "draft_model" else None
    speculator = Speculator(model, itself or drafter(name, own(name)), tree="chain:3")
    text = speculator.generate(ids, **options)
    assert torch.equal(text, Speculator(model).generate(ids, **options))
