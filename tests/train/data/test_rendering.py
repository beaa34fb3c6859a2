"""Loss masks equal hand-made ones, and every answer follows the prompt that a model is given."""

import itertools
from typing import Any

import pytest
from tokenizers import decoders

from headstart.train.data import documents
from headstart.train.data.documents import ChatTemplateError
from headstart.train.data.parsing import parse_row
from headstart.train.data.rendering import ChatRenderer, Rendered
from headstart.train.recipe import Chat
from tests.support import chats
from tests.support.chats import chat_tokenizer

SYSTEM = {"role": "system", "content": "Be short."}
ASK, MORE = {"role": "user", "content": "Hi"}, {"role": "user", "content": "And the Tea?"}
HELLO, TEA = ({"role": "assistant", "content": text} for text in ("Hello the", "Té, at 5."))
CHAT = [ASK, HELLO, MORE, TEA]
THOUGHT = [
    ASK, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nHello the"},
    MORE, {"role": "assistant", "content": "<think>\nWell.\n</think>\n\nTé, at 5."},
]  # fmt: skip
NO_THINKING = {"template_kwargs": {"enable_thinking": False}}
HEAD3 = "<|start_header_id|>{}<|end_header_id|>\n\n"
LLAMA3_HEAD = f"<|begin_of_text|>{HEAD3.format('system')}Today Date: 26 Jul 2024\n\n"

# In each row, what stands in ⟦ ⟧ is supervised. Bytes of é are two tokens.
MASKS: dict[str, tuple[str, list[dict[str, str]], dict[str, Any], list[str]]] = {
    "chatml": (chats.CHATML, [SYSTEM, *CHAT], {}, [
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n⟦Hello the<|im_end|>⟧\n"
        "<|im_start|>user\nAnd the Tea?<|im_end|>\n"
        "<|im_start|>assistant\n⟦Té, at 5.<|im_end|>⟧",
    ]),
    "chatml, the last answer": (chats.CHATML, CHAT, {"supervise": "last", "system": "Obey."}, [
        "<|im_start|>system\nObey.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello the<|im_end|>\n<|im_start|>user\nAnd the Tea?<|im_end|>\n"
        "<|im_start|>assistant\n⟦Té, at 5.<|im_end|>⟧",
    ]),
    "llama-3": (chats.LLAMA3, [SYSTEM, *CHAT], {}, [
        f"{LLAMA3_HEAD}Be short.<|eot_id|>{HEAD3.format('user')}Hi<|eot_id|>"
        f"{HEAD3.format('assistant')}⟦Hello the<|eot_id|>⟧"
        f"{HEAD3.format('user')}And the Tea?<|eot_id|>"
        f"{HEAD3.format('assistant')}⟦Té, at 5.<|eot_id|>⟧",
    ]),
    "llama-3, another day": (chats.LLAMA3, CHAT[:2], {"date": "2026-01-02"}, [
        f"{LLAMA3_HEAD.replace('26 Jul 2024', '02 Jan 2026')}<|eot_id|>"
        f"{HEAD3.format('user')}Hi<|eot_id|>{HEAD3.format('assistant')}⟦Hello the<|eot_id|>⟧",
    ]),
    "mistral": (chats.MISTRAL, [SYSTEM, *CHAT], {}, [
        "<s>[INST] Be short.\n\nHi [/INST]⟦ Hello the</s>⟧"
        "[INST] And the Tea? [/INST]⟦ Té, at 5.</s>⟧",
    ]),
    "gemma": (chats.GEMMA, CHAT, {}, [
        "<bos><start_of_turn>user\nHi<end_of_turn>\n"
        "<start_of_turn>model\n⟦Hello the<end_of_turn>⟧\n"
        "<start_of_turn>user\nAnd the Tea?<end_of_turn>\n"
        "<start_of_turn>model\n⟦Té, at 5.<end_of_turn>⟧",
    ]),
    "qwen3, thinking": (chats.QWEN3, THOUGHT, {}, [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "⟦<think>\nHm.\n</think>\n\nHello the<|im_end|>⟧",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello the<|im_end|>\n"
        "<|im_start|>user\nAnd the Tea?<|im_end|>\n<|im_start|>assistant\n"
        "⟦<think>\nWell.\n</think>\n\nTé, at 5.<|im_end|>⟧",
    ]),
    "qwen3, answers without thinking": (chats.QWEN3, CHAT, NO_THINKING, [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n⟦Hello the<|im_end|>⟧",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello the<|im_end|>\n"
        "<|im_start|>user\nAnd the Tea?<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n⟦Té, at 5.<|im_end|>⟧",
    ]),
    "qwen3, thinking switched off": (chats.QWEN3, THOUGHT[:2], NO_THINKING, [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n⟦Hello the<|im_end|>⟧",
    ]),
    "a reasoner": (chats.REASONER, THOUGHT, {}, [
        "<s><|User|>Hi<|Assistant|><think>\n⟦Hm.\n</think>\n\nHello the</s>⟧",
        "<s><|User|>Hi<|Assistant|>\n\nHello the</s><|User|>And the Tea?<|Assistant|><think>\n"
        "⟦Well.\n</think>\n\nTé, at 5.</s>⟧",
    ]),
    "vicuna": (chats.VICUNA, CHAT, {}, [
        "A chat. USER: Hi ASSISTANT:⟦ Hello the</s>⟧ USER: And the Tea? ASSISTANT:⟦ Té, at 5.</s>⟧",
    ]),
    "zephyr": (chats.ZEPHYR, [SYSTEM, *CHAT], {}, [
        "<|system|>\nBe short.</s>\n<|user|>\nHi</s>\n<|assistant|>\n⟦Hello the</s>⟧\n"
        "<|user|>\nAnd the Tea?</s>\n<|assistant|>\n⟦Té, at 5.</s>⟧",
    ]),
    "phi": (chats.PHI, CHAT, {}, [
        "<|user|>\nHi<|end|>\n<|assistant|>\n⟦Hello the<|end|>⟧\n"
        "<|user|>\nAnd the Tea?<|end|>\n<|assistant|>\n⟦Té, at 5.<|end|>⟧",
    ]),
    "a template that marks answers": (chats.MARKED, CHAT, {}, [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello the<|im_end|>⟧\n"
        "<|im_start|>user\nAnd the Tea?<|im_end|>\n"
        "<|im_start|>assistant\n⟦Té, at 5.<|im_end|>⟧",
    ]),
    "no template": (None, CHAT, {}, [  # type: ignore[dict-item]
        "User: Hi\n\nAssistant:⟦ Hello the⟧\n\nUser: And the Tea?\n\nAssistant:⟦ Té, at 5.</s>⟧",
    ]),
}  # fmt: skip
PIECES = {"mistral", "vicuna", "zephyr", "gemma"}


def shown(tokenizer: Any, row: Rendered) -> str:
    """The row's text with ⟦ ⟧ around what is supervised."""
    runs = itertools.groupby(zip(row.tokens, row.supervised, strict=True), lambda pair: pair[1])
    text = ""
    for on, pairs in runs:
        pieces = tokenizer.convert_ids_to_tokens([token for token, _ in pairs])
        if isinstance(tokenizer.backend_tokenizer.decoder, decoders.Metaspace):
            words = "".join(pieces).replace("▁", " ")
        else:
            words = tokenizer.backend_tokenizer.decoder.decode(pieces)
        text += f"⟦{words}⟧" if on else words
    return text.lstrip(" ")  # that sentencepiece puts first


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("pieces", [False, True])
def test_masks_equal_hand_made_ones(name: str, pieces: bool) -> None:
    template, messages, settings, expected = MASKS[name]
    if pieces and name not in PIECES:
        pytest.skip("a dialect of tokenizers of bytes")
    if pieces:  # their alphabet is ASCII
        messages = [m | {"content": m["content"].replace("é", "e")} for m in messages]
        expected = [row.replace("é", "e") for row in expected]
    chat = Chat(**settings)
    tokenizer = chat_tokenizer(template, pieces=pieces)
    renderer = ChatRenderer(tokenizer, chat)
    rows = renderer.rows(messages)
    if chat.supervise == "last":
        rows = [rows[-1].last()]
    assert [shown(tokenizer, row) for row in rows] == expected
    # Every answer follows the ids that a model is prompted with, and both ends are supervised.
    answers = [at for at, m in enumerate(messages) if m["role"] == "assistant"]
    found = [(row, *answer) for row in rows for answer in row.answers]
    for at, (row, first, end) in zip(answers[-len(found) :], found, strict=True):
        assert row.tokens[:first].tolist() == renderer.prompt(messages[:at])
        assert row.supervised[first] and row.supervised[end - 1] and not row.supervised[first - 1]


@pytest.mark.parametrize("template", [chats.CHATML, None])
def test_an_answer_that_was_not_finished_has_no_end(template: str | None) -> None:
    tokenizer = chat_tokenizer(template)
    (row,) = ChatRenderer(tokenizer).rows(CHAT, open_end=True)
    assert shown(tokenizer, row).endswith(" at 5.⟧")


def test_a_template_that_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_SECONDS", 0.2)
    loop = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    tokenizer = chat_tokenizer(
        chats.CHATML + "{% if messages | length > 1 %}" + loop + "{% endif %}"
    )
    renderer = ChatRenderer(tokenizer)
    assert renderer.prompt([ASK])
    with pytest.raises(ChatTemplateError, match="does not end"):
        renderer.prompt([SYSTEM, ASK])
    with pytest.raises(ChatTemplateError, match="does not end"):
        renderer.rows(CHAT)


def call(arguments: Any) -> dict[str, Any]:
    called = {"type": "function", "function": {"name": "tea", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [called]}


@pytest.mark.parametrize("arguments", ['{ "at": 5 }', {"at": 5}])
def test_arguments_of_calls_are_encoded_once(arguments: Any) -> None:
    """A server writes them as a string of JSON, which `tojson` would quote."""
    tokenizer = chat_tokenizer(chats.TOOLS, "<|im_end|>")
    result = {"role": "tool", "content": "ready", "tool_call_id": "1"}
    document = parse_row({"messages": [ASK, call(arguments), result, HELLO]}, "rows:1")
    (row,) = ChatRenderer(tokenizer).rows(document.messages or [])
    written = '⟦<tool_call>{"name": "tea", "arguments": {"at": 5}}</tool_call><|im_end|>⟧'
    assert written in shown(tokenizer, row)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("", {}), (" ", {}), ("tea", "tea"), ("[5]", "[5]"), ("{", "{"),
        ('{"at": NaN}', '{"at": NaN}'), ("[" * 10_000, "[" * 10_000), (None, None),
    ],
)  # fmt: skip
def test_other_arguments_stay_as_they_are(written: Any, read: Any) -> None:
    document = parse_row({"messages": [ASK, call(written)]}, "rows:1")
    assert document.messages is not None
    assert document.messages[1]["tool_calls"][0]["function"]["arguments"] == read


SEARCH = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
NAMED = {"default": chats.ZEPHYR, "tool_use": chats.TOOLS}  # as Hermes 2 Pro and Command R


@pytest.mark.parametrize("names", [NAMED, chats.TOOLS])
def test_each_chat_is_rendered_by_the_template_for_its_tools(names: Any) -> None:
    tokenizer = chat_tokenizer(names, "<|im_end|>")
    renderer = ChatRenderer(tokenizer)
    for tools in (None, SEARCH, [], SEARCH):
        how: dict[str, Any] = {"tools": tools or None, "add_generation_prompt": True}
        own = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, **how)
        assert renderer.text(CHAT[:1], True, tools) == own
        assert ("search" in own) == bool(tools)
        (row,) = renderer.rows(CHAT, tools=tools)
        end = "</s>" if names is NAMED and not tools else "<|im_end|>"
        assert f"⟦Té, at 5.{end}⟧" in shown(tokenizer, row)  # the end of its own template
    of_recipe = ChatRenderer(tokenizer, Chat(tools=SEARCH))
    assert of_recipe.text(CHAT, True) == renderer.text(CHAT, True, SEARCH)


def test_the_hash_is_of_both_templates() -> None:
    def hash_of(template: Any, **settings: Any) -> str | None:
        return ChatRenderer(chat_tokenizer(template), Chat(**settings)).template_hash

    others = [NAMED, NAMED | {"default": chats.CHATML}, NAMED | {"tool_use": chats.CHATML}]
    assert len({hash_of(template) for template in [*others, chats.TOOLS, chats.ZEPHYR]}) == 5
    assert hash_of({"default": chats.ZEPHYR}) == hash_of(chats.ZEPHYR)


def test_templates_without_a_default_are_refused() -> None:
    with pytest.raises(ChatTemplateError, match="by the names rag, tool_use; expected one named"):
        ChatRenderer(chat_tokenizer({"tool_use": chats.TOOLS, "rag": chats.CHATML}))


def test_all_of_a_marked_answers_last_character_is_supervised() -> None:
    """Its bytes are several tokens, of which transformers marks the first."""
    renderer = ChatRenderer(chat_tokenizer(chats.MARKED))
    (row,) = renderer.rows([ASK, {"role": "assistant", "content": "Té"}])
    assert shown(renderer.tokenizer, row).endswith("assistant\n⟦Té<|im_end|>⟧")


def test_a_call_behind_an_answer_is_never_dropped() -> None:
    """The reasoner's template writes the answer otherwise than its prompt ends: no call is lost."""
    template = chats.REASONER.replace("</s>", "{{ m.tool_calls }}</s>")
    renderer = ChatRenderer(chat_tokenizer(template))
    thought = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\n"}
    assert renderer.rows([ASK, thought])
    with pytest.raises(ChatTemplateError, match="begins the answer otherwise"):
        renderer.rows([ASK, call({"at": 5}) | thought])


@pytest.mark.parametrize("template", [chats.CHATML, chats.ZEPHYR, None])
@pytest.mark.parametrize("said", ["", "Let me search."])
def test_calls_that_a_template_does_not_write_are_refused(template: str | None, said: str) -> None:
    """What is left would teach an answer that ends where its calls begin."""
    asked = [ASK, call({"at": 5}) | {"content": said}]
    chat, calls = [*asked, {"role": "tool", "content": "tea"}, HELLO], "leaves calls of tools out"
    renderer = ChatRenderer(chat_tokenizer(template))
    with pytest.raises(ChatTemplateError, match=calls):
        renderer.rows(chat)
    last = ChatRenderer(chat_tokenizer(template), Chat(supervise="last"))
    assert last.rows(chat)  # whose answer calls nothing
    with pytest.raises(ChatTemplateError, match=calls):
        last.rows(asked)
    assert ChatRenderer(chat_tokenizer(chats.TOOLS)).rows(chat)
