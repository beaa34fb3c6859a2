"""Texts of a form: greedy ones are those of `generate` with the same processor, and all have it."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from headstart.heads import family
from headstart.heads.core.forms import FormsByRow
from headstart.infer import Batcher, Grammar, Speculator
from headstart.infer.grammars import GrammarForm, GrammarTokens
from tests.support.chats import CHATML, chat_tokenizer
from tests.support.talker import talker
from tests.support.together import decode_together

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
NEW = 120
GRAMMARS = {
    "schema": lambda: Grammar.json_schema(SCHEMA),
    "regex": lambda: Grammar.regex("[0-9]{3}-(ab)+!"),
    "noted": lambda: Grammar.json_schema({"type": "string", "format": "path", "maxLength": 3}),
    "choice": lambda: Grammar.choice(['a "word"\n', "a worm", "ünder"]),
    "lark": lambda: Grammar.lark('start: "(" start ")" | /[x-z]{2}/'),
}


@pytest.fixture(scope="module")
def speculator() -> Speculator:
    tokenizer = chat_tokenizer(CHATML)
    torch.manual_seed(0)
    model = talker(tokenizer, "<|im_end|>", eagerness=1.0, context=256).double()
    lookup: Any = family("lookup")
    return Speculator(model, lookup.of_target(model).bind(model), tokenizer=tokenizer)


def asked(speculator: Speculator, *prompts: str) -> dict[str, Any]:
    tokenizer: Any = speculator.tokenizer
    tokenizer.padding_side = "left"
    return {**tokenizer(list(prompts), return_tensors="pt", padding=True), "max_new_tokens": NEW}


def ended(speculator: Speculator, output: torch.Tensor, width: int) -> list[str]:
    """The texts after the prompts of rows [B, T], of those that the end token ended."""
    tokenizer: Any = speculator.tokenizer
    end = speculator.model.generation_config.eos_token_id  # type: ignore[union-attr]
    rows = [row[width:].tolist() for row in output]
    return [tokenizer.decode(row[: row.index(end)]) for row in rows if end in row]


def fits(name: str, text: str) -> bool:
    if name == "schema":
        found = json.loads(text)
        return (
            list(found) == ["name", "age", "tags"]
            and len(found["name"]) <= 4
            and 0 <= found["age"] <= 999
            and len(found["tags"]) <= 2
            and {*found["tags"]} <= {"red", "green"}
        )
    if name == "noted":
        return len(json.loads(text)) <= 3
    if name == "choice":
        return text in ('a "word"\n', "a worm", "ünder")
    pattern = {"regex": "[0-9]{3}-(ab)+!", "lark": r"\(*[x-z]{2}\)*"}[name]
    return bool(re.fullmatch(pattern, text)) and text.count("(") == text.count(")")


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_greedy_text_is_that_of_generate(speculator: Speculator, name: str) -> None:
    inputs, grammar = asked(speculator, "a b a b a", "once"), GRAMMARS[name]()
    width = inputs["input_ids"].shape[1]
    tokens = GrammarTokens(speculator.tokenizer, tokens_of(speculator, "<|im_end|>"))
    form = GrammarForm(grammar, tokens, width)
    processor = FormsByRow([form, form.again()])
    expected: Any = speculator.model.generate(  # type: ignore[operator]
        **inputs, do_sample=False, logits_processor=[processor]
    )
    found = speculator.generate(**inputs, do_sample=False, grammar=grammar)
    assert torch.equal(found, expected)
    free = speculator.generate(**inputs, do_sample=False)
    assert found.shape != free.shape or not torch.equal(found, free)


@pytest.mark.parametrize("rule", [None, "rejection", "match"])
@pytest.mark.parametrize("name", GRAMMARS)
def test_a_sampled_text_has_the_form(speculator: Speculator, name: str, rule: str | None) -> None:
    ours = Speculator(
        speculator.model, speculator.drafter, rule=rule, tokenizer=speculator.tokenizer
    )
    plain = Speculator(speculator.model, tokenizer=speculator.tokenizer)
    inputs, grammar = asked(speculator, "a b a b a", "once", "x"), GRAMMARS[name]()
    count = 0
    for seed in range(3):
        options = {**inputs, "do_sample": True, "temperature": 3.0, "seed": seed}
        found = ours.generate(**options, grammar=grammar)
        if rule != "rejection":
            assert torch.equal(found, plain.generate(**options, grammar=grammar))
        for text in ended(speculator, found, inputs["input_ids"].shape[1]):
            assert fits(name, text), text
            count += 1
    assert count > 1


def test_a_batcher_decodes_them_beside_others(
    speculator: Speculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with different forms or none, greedy and sampled, of which some join late."""
    monkeypatch.setattr(Batcher, "_by_itself", None)
    requests = []
    for number, name in enumerate([None, *GRAMMARS, "regex", None, "choice", "schema"]):
        options = asked(speculator, ["a b a b a", "once", "x y"][number % 3])
        options["max_new_tokens"] = 10 + 20 * (number % 4)
        if number % 2:
            options |= {"do_sample": True, "temperature": 3.0, "seed": number}
        if name is not None:
            options["grammar"] = GRAMMARS[name]()
        requests.append(options)
    expected = [speculator.generate(**options) for options in requests]
    found = decode_together(Batcher(speculator, rows=4), requests)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_a_row_whose_form_cannot_be_had_fails_alone(speculator: Speculator) -> None:
    batcher, options = Batcher(speculator, rows=4), asked(speculator, "a b a b a")
    ends = tokens_of(speculator, "<|im_end|>")
    bias = {"sequence_bias": {(ends[0],): -torch.inf}}
    wrong = {**options, **bias, "grammar": Grammar.regex("ab")}
    expected = speculator.generate(**options)
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(batcher.generate, **options) for _ in range(2)]
        with pytest.raises(ValueError, match="check its weights, processors and grammar"):
            batcher.generate(**wrong)
        for each in others:
            assert torch.equal(each.result(), expected)


def test_it_is_asked_about_any_text_in_any_order(speculator: Speculator) -> None:
    tokens = GrammarTokens(speculator.tokenizer, tokens_of(speculator, "<|im_end|>"))
    processor = FormsByRow([GrammarForm(GRAMMARS["regex"](), tokens, 2)])
    scores = torch.zeros(1, len(speculator.tokenizer))  # type: ignore[arg-type]
    texts = ["zz", "zz1", "zz123-ab", "zz12", "zz123-ab!", "zz124-", "zz", "zz123-abab"]
    seen = {text: processor(row_of(speculator, text), scores) for text in texts}
    for text in reversed(texts):
        fresh = FormsByRow([GrammarForm(GRAMMARS["regex"](), tokens, 2)])
        again = processor(row_of(speculator, text), scores)
        assert torch.equal(again, seen[text])
        assert torch.equal(fresh(row_of(speculator, text), scores), again)
    allowed = seen["zz123-ab!"].isfinite().nonzero()[:, 1].tolist()
    assert allowed == tokens.ends
    assert len({tuple(found.isfinite().flatten().tolist()) for found in seen.values()}) == 4


def tokens_of(speculator: Speculator, text: str) -> list[int]:
    tokenizer: Any = speculator.tokenizer
    return tokenizer(text, add_special_tokens=False).input_ids


def row_of(speculator: Speculator, text: str) -> torch.Tensor:
    return torch.tensor([tokens_of(speculator, text)])


@pytest.mark.parametrize(
    ("text", "follows"),
    [
        ("zz", "12["),  # the form, or thoughts
        ("zz[", "12[x"),
        ("zz[1x", "12[x"),
        ("zz[1x]", "12"),
        ("zz1", "12"),
        ("[z", "12[x"),  # thoughts that the prompt has begun
        ("[z1x]", "12"),
        ("[]", "12"),  # a prompt that says that there are none
        ("]x", "12["),  # of an earlier answer
    ],
)
def test_thoughts_come_first(speculator: Speculator, text: str, follows: str) -> None:
    tokens = GrammarTokens(speculator.tokenizer, tokens_of(speculator, "<|im_end|>"))
    grammar = Grammar.regex("[0-9]+-").after_thoughts("[", "]")
    processor = FormsByRow([GrammarForm(grammar, tokens, 2)])
    scores = torch.zeros(1, len(speculator.tokenizer))  # type: ignore[arg-type]
    found = processor(row_of(speculator, text), scores)[0].isfinite()
    letters = (letter for letter in "12[x" if found[tokens_of(speculator, letter)[0]])
    assert "".join(letters) == follows
    assert not found[tokens.ends].any()  # which none of them may be followed by


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        found = {"type": "array", "items": found}
    return found


def accepts(grammar: Grammar, text: str) -> bool:
    import llguidance

    tokens = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokens, grammar.source)
    ids = tokens.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("more", [{}, {"additionalProperties": {"type": "string"}}])
def test_a_property_cannot_escape_its_schema_by_another_spelling(more: dict[str, Any]) -> None:
    grammar = Grammar.json_schema({"type": "object", "properties": {"a": {"const": 1}}, **more})
    assert accepts(grammar, '{"a": 1, "b\\n": "\\t\\\\"}')
    for name in ("a", "\\u0061"):
        assert not accepts(grammar, f'{{"{name}": "x"}}')


@pytest.mark.parametrize("text", ["a\x01", "\x1f", 'ü"\b\f\n\r\t\\/'])
def test_a_constant_may_hold_control_characters(text: str) -> None:
    grammar = Grammar.json_schema({"enum": [text]})
    assert accepts(grammar, json.dumps(text, ensure_ascii=False))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Grammar.regex("[0-"), "regular expression cannot be used: unclosed character"),
        (lambda: Grammar.regex("(?=a)b"), "look-around"),
        (lambda: Grammar.json_schema({"type": "objec"}), "JSON schema cannot be used: Invalid typ"),
        (lambda: Grammar.json_schema({"uniqueItems": True}), "Unimplemented keys"),
        (
            lambda: Grammar.json_schema(
                {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}
            ),
            "members of oneOf that may hold together are not supported",
        ),
        (lambda: Grammar.json_schema("{"), "JSON schema is no JSON"),
        (lambda: Grammar.json_schema({1, 2}), "JSON schema is no JSON"),  # type: ignore[arg-type]
        (lambda: Grammar.json_schema({"minimum": float("nan")}), "is no JSON: Out of range float"),
        (lambda: Grammar.json_schema(nested(200)), "cannot be used: recursion limit exceeded"),
        (lambda: Grammar.json_schema("[1]"), r"JSON schema is \[1\]; expected an object"),
        (lambda: Grammar.json_schema("true"), "JSON schema is true; expected an object"),
        (lambda: Grammar.choice([]), "expected a list of texts"),
        (lambda: Grammar.choice("ab"), "expected a list of texts"),
        (lambda: Grammar.lark("start"), "the grammar cannot be used: .*Expected"),
    ],
)
def test_what_is_no_form_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_what_cannot_be_followed_is_refused(speculator: Speculator) -> None:
    inputs = asked(speculator, "a")
    for options, said in (
        ({"grammar": "x"}, "grammar is 'x'; expected a Grammar"),
        ({"grammar": Grammar.regex("a"), "eos_token_id": -1}, "token that ends the text"),
    ):
        with pytest.raises(ValueError, match=said):
            speculator.generate(**inputs, **options)  # type: ignore[arg-type]
    judged = Speculator(speculator.model, speculator.drafter, rule="traversal")
    judged.tokenizer = speculator.tokenizer
    with pytest.raises(ValueError, match=r"'traversal' judges nodes off .*, found a grammar"):
        judged.generate(**inputs, do_sample=True, grammar=Grammar.regex("a"))
    bare = Speculator(speculator.model)
    with pytest.raises(ValueError, match="needs the target's tokenizer, a fast one, found none"):
        bare.generate(**inputs, grammar=Grammar.regex("a"))
    ends = tokens_of(speculator, "<|im_end|>")
    with pytest.raises(ValueError, match="check its weights, processors and grammar"):
        speculator.generate(**inputs, grammar=Grammar.regex("a"), suppress_tokens=ends)
