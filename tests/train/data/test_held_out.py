"""Held-out prompts."""

from typing import Any

import pytest
import torch

from headstart.train.data.documents import Document
from headstart.train.data.held_out import (
    HeldOutError,
    HeldOutPrompt,
    available_prompts,
    held_out_prompts,
    held_out_texts,
    prompt_settings,
    recipe_prompts,
)
from headstart.train.data.prefixes import DistillError, make_prefixes
from headstart.train.recipe import Distill, Recipe, load_recipe, parse_recipe
from headstart.train.scratch_target import train_tokenizer
from tests.support.chats import CHATML, chat_tokenizer
from tests.support.tiny import one_line

DOCUMENTS = [
    Document(str(n), " ".join(f"word{n} {n * k}" for k in range(12 * (n + 1)))) for n in range(6)
]


CHATS = [
    Document.chat(f"chats.jsonl:{n}", [
        {"role": role, "content": f"{role} {n} says {' '.join(map(str, range(n * turn % 7)))}."}
        for turn in range(1 + n % 3)
        for role in ("user", "assistant")
    ])
    for n in range(40)
]  # fmt: skip


def equal(one: HeldOutPrompt, other: HeldOutPrompt) -> bool:
    return one.document == other.document and torch.equal(one.tokens, other.tokens)


def test_prompts_are_disjoint_windows_of_different_documents() -> None:
    tokenizer = train_tokenizer(DOCUMENTS, 270, 128)
    bench = held_out_prompts(tokenizer, DOCUMENTS, 8, 10, seed=1)
    validation = held_out_prompts(tokenizer, DOCUMENTS, 4, 10, seed=1, part="validation")
    texts = {document.id: tokenizer(document.text)["input_ids"] for document in DOCUMENTS}

    def source(prompt: HeldOutPrompt) -> set[str]:
        ids = prompt.tokens.tolist()
        found = {
            name for name, t in texts.items() if any(t[i : i + 10] == ids for i in range(len(t)))
        }
        assert prompt.document in found
        return found

    assert all(prompt.tokens.shape == (10,) for prompt in bench + validation)
    first, second = (set().union(*map(source, prompts)) for prompts in (bench, validation))
    assert len(first) == 4 and len(second) == 2 and not first & second
    assert len({tuple(prompt.tokens.tolist()) for prompt in bench}) == 8
    again = held_out_prompts(tokenizer, DOCUMENTS[::-1], 8, 10, seed=1)
    assert all(equal(a, b) for a, b in zip(bench, again, strict=True))
    other = held_out_prompts(tokenizer, DOCUMENTS, 8, 10, seed=2)
    assert not all(equal(a, b) for a, b in zip(bench, other, strict=True))
    with pytest.raises(
        HeldOutError, match=r"expected 10000; give more documents, raise corpus\.held_out"
    ):
        held_out_prompts(tokenizer, DOCUMENTS, 10_000, 10)


def test_no_prompt_comes_twice_or_in_both_parts() -> None:
    """Of questions with four answers each, as sampled data sets have them."""
    chats = [
        Document.chat(f"{asked}.{said}", [
            {"role": "user", "content": f"question {asked}"},
            {"role": "assistant", "content": f"answer {said}"},
        ])
        for asked in range(12) for said in range(4)
    ]  # fmt: skip
    tokenizer = chat_tokenizer(CHATML)
    found = [
        tuple(prompt.tokens.tolist())
        for part, count in (("validation", 4), ("bench", 8))
        for prompt in held_out_prompts(tokenizer, chats, count, None, part=part, prefix="prompt")  # type: ignore[arg-type]
    ]
    assert len(set(found)) == len(found) == 12
    with pytest.raises(HeldOutError, match="48 held-out documents give 8 different prompts for"):
        held_out_prompts(tokenizer, chats, 9, None, prefix="prompt")


def test_prompts_of_chats_are_those_that_distillation_continues() -> None:
    tokenizer = train_tokenizer(CHATS, 270, 128)
    overrides = ["distill.prefix=prompt", "distill.prefix_tokens=30", "decode.validation_prompts=9"]
    recipe = load_recipe("quickstart", [*overrides, "decode.prompts=14"])
    parts = {
        part: recipe_prompts(recipe, tokenizer, CHATS, part, None)
        for part in ("validation", "bench")
    }
    spec = Distill(prefix="prompt", prefix_tokens=30)
    learnt = make_prefixes(spec, tokenizer, CHATS)
    continued = {tuple(learnt[i].tolist()) for i in range(len(learnt))}
    for prompts in parts.values():
        lengths = {len(prompt.tokens) for prompt in prompts}
        assert len(lengths) > 1 and max(lengths) <= 30
        for prompt in prompts:
            assert tuple(prompt.tokens.tolist()) in continued
            assert str(tokenizer.decode(prompt.tokens)).endswith("Assistant:")
    documents = {part: {p.document for p in prompts} for part, prompts in parts.items()}
    assert not documents["validation"] & documents["bench"]
    with pytest.raises(
        HeldOutError, match=r"give \d+ different prompts of at most 30 tokens for bench"
    ):
        held_out_prompts(tokenizer, CHATS, 900, 30, prefix="prompt")


def test_documents_that_are_too_short_are_counted() -> None:
    tokenizer = chat_tokenizer(CHATML, "<|im_end|>")
    documents = [Document(f"text:{n}", f"{n} " + "word " * (60 if n > 3 else 2)) for n in range(9)]
    for prefix in ("window", "start"):
        made = given_recipe(writer="own", prefix=prefix)
        with pytest.raises(HeldOutError) as error:
            recipe_prompts(made, tokenizer, documents, "validation", 512)
        assert "expected 8; 4 documents are shorter: lower decode.prefix_tokens, or give" in str(
            error.value
        )
        _, remedy = available_prompts(made, tokenizer, documents, 512)
        assert remedy.startswith("4 documents are shorter: lower decode.prefix_tokens, or")


LONG = [  # prompts of 65 to about 150 tokens, which are common
    Document.chat(f"long:{n}", [
        {"role": "user", "content": f"{n}? {'word ' * (12 + n % 18)}"},
        {"role": "assistant", "content": "yes"},
    ])
    for n in range(90)
]  # fmt: skip


def given_recipe(**distill: Any) -> Recipe:
    return parse_recipe({
        "name": "r", "target": {"model": "m"}, "drafter": {"family": "medusa"},
        "distill": {"writer": "given"} | distill,
    })  # fmt: skip


def test_prompts_of_given_answers_have_the_targets_context() -> None:
    tokenizer, made = chat_tokenizer(CHATML, "<|im_end|>"), given_recipe()
    assert prompt_settings(made, 512)["tokens"] == 512 - 128
    assert prompt_settings(made)["tokens"] is None
    for context in (512, None):
        found = recipe_prompts(made, tokenizer, LONG, "validation", context)
        assert len(found) == 8 and all(len(prompt.tokens) > 64 for prompt in found)
    assert prompt_settings(given_recipe(max_length=192), 512)["tokens"] == 64  # in which none fits


@pytest.mark.parametrize(
    ("made", "context", "remedy"),
    [
        (given_recipe(max_length=192), 512, "raise distill.max_length, set decode.prefix=window"),
        (given_recipe(), 192, "lower decode.new_tokens, set decode.prefix=window"),
        (given_recipe(writer="own", prefix="prompt"), 512, "raise distill.prefix_tokens"),
    ],
)  # fmt: skip
def test_prompts_that_are_too_long_are_counted(made: Recipe, context: int, remedy: str) -> None:
    tokenizer = chat_tokenizer(CHATML, "<|im_end|>")
    more = "give more documents, raise corpus.held_out or corpus.max_bytes"
    more = f"90 prompts are longer: {remedy}, or {more}"
    with pytest.raises(HeldOutError) as error:
        recipe_prompts(made, tokenizer, LONG, "validation", context)
    assert one_line(error.value) == (
        "90 held-out documents give 0 different prompts of at most 64 tokens for validation, "
        f"which has a third of them, expected 8; {more}, or lower decode.validation_prompts."
    )
    assert available_prompts(made, tokenizer, LONG, context) == (
        {"validation": 0, "bench": 0},
        more,
    )


def test_starts_and_windows() -> None:
    tokenizer = train_tokenizer(DOCUMENTS, 270, 128)
    recipe = load_recipe("quickstart", ["distill.prefix=start", "decode.prefix_tokens=10"])
    kind = prompt_settings(recipe)
    assert (kind["prefix"], kind["tokens"], kind["chat"]) == ("start", 10, "auto")
    starts = held_out_prompts(tokenizer, DOCUMENTS, 4, 10, prefix="start")
    texts = {document.id: tokenizer(document.text)["input_ids"] for document in DOCUMENTS}
    assert all(p.tokens.tolist() == texts[p.document][:10] for p in starts)
    overrides = ["distill.prefix=prompt", "decode.prefix=window"]
    assert prompt_settings(load_recipe("quickstart", overrides))["prefix"] == "window"


def test_texts_are_rendered_as_the_recipe_says() -> None:
    tokenizer = chat_tokenizer("{{ raise_exception('never') }}")
    with pytest.raises(DistillError, match=r"set distill\.chat=plain"):
        held_out_texts(tokenizer, CHATS, 4)
    assert held_out_texts(tokenizer, CHATS, 4, chat="plain")


def test_texts_of_few_and_short_documents() -> None:
    tokenizer = train_tokenizer(DOCUMENTS, 270, 128)
    first = DOCUMENTS[:1]
    ids = tokenizer(first[0].text)["input_ids"]
    assert {len(text) for text in held_out_texts(tokenizer, first, 4)} == {4}
    (whole,) = held_out_texts(tokenizer, first, 2 * len(ids))
    assert whole.tolist() == ids
