"""Log-probabilities of an answer are the target's own, of the tokens whose text it has."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.import_utils import is_serve_available

from headstart.infer import Emitted, LogProbabilities
from headstart.train.figures.pieces import PieceReader
from tests.support.chats import CHATML, chat_tokenizer

pytestmark = pytest.mark.skipif(
    not is_serve_available(), reason="needs fastapi, uvicorn and openai"
)
ASKED = [{"role": "user", "content": "say something"}]
CHAT: dict[str, Any] = {"model": "talker", "messages": ASKED, "max_tokens": 20, "logprobs": True}
TEXT: dict[str, Any] = {"model": "talker", "prompt": "once upon", "max_tokens": 20}
_E = str(chat_tokenizer(CHATML).convert_tokens_to_ids("e"))
SAMPLED: dict[str, Any] = {"temperature": 0.7, "seed": 5, "logit_bias": {_E: 3}}


def by_hand(spoken: Any, prompt: list[int], answer: str) -> torch.Tensor:
    """Log-probabilities [new, V] of the tokens of a text, by one forward of the target."""
    ids = [*prompt, *spoken.tokenizer.encode(answer)]
    with torch.no_grad():
        logits = spoken.model(torch.tensor([ids])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


def prompt_of(spoken: Any) -> list[int]:
    return spoken.tokenizer.apply_chat_template(ASKED, add_generation_prompt=True).input_ids


@pytest.mark.parametrize("how", [{"temperature": 0}, SAMPLED], ids=["greedy", "sampled"])
def test_a_chat_tells_them_of_each_token(client: Any, spoken: Any, how: dict[str, Any]) -> None:
    """Before the temperature and the bias; streamed or not, and beside others without."""
    with ThreadPoolExecutor(4) as pool:
        asked = [{"top_logprobs": 3}, {"logprobs": False}, {"top_logprobs": 0}, {}]
        create = client.chat.completions.create
        waiting = [pool.submit(create, **CHAT | how | each) for each in asked]
        first, without, *others = [each.result(60).choices[0] for each in waiting]
    text = first.message.content
    expected = by_hand(spoken, prompt_of(spoken), text)
    ids = spoken.tokenizer.encode(text)
    assert without.logprobs is None and without.message.content == text
    tokens = first.logprobs.content
    assert [each.token for each in tokens] == list(text)
    assert [bytes(each.bytes).decode() for each in tokens] == list(text)
    for each, row, token in zip(tokens, expected, ids, strict=True):
        assert each.logprob == pytest.approx(float(row[token]), abs=1e-6)
        best = [other.logprob for other in each.top_logprobs]
        assert best == pytest.approx(row.topk(3).values.tolist(), abs=1e-6)
    for other in others:
        assert [each.logprob for each in other.logprobs.content] == pytest.approx(
            [each.logprob for each in tokens], abs=1e-6
        )
        assert all(each.top_logprobs == [] for each in other.logprobs.content)
    with create(**CHAT | how, top_logprobs=3, stream=True) as parts:
        chunks = [part.choices[0] for part in parts if part.choices]
    streamed = [token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.content]
    assert [each.token for each in streamed] == list(text)
    assert [each.logprob for each in streamed] == pytest.approx(
        [each.logprob for each in tokens], abs=1e-6
    )
    told = [chunk for chunk in chunks if chunk.logprobs]
    assert len(told) > 1 and all(
        "".join(each.token for each in chunk.logprobs.content) == chunk.delta.content
        for chunk in told
    )


def test_a_completion_tells_them_with_places_in_its_text(client: Any, spoken: Any) -> None:
    for how in ({"temperature": 0}, SAMPLED):
        found = client.completions.create(**TEXT | how, logprobs=2).choices[0]
        told = found.logprobs
        expected = by_hand(spoken, spoken.tokenizer.encode(TEXT["prompt"]), found.text)
        ids = torch.tensor(spoken.tokenizer.encode(found.text))
        chosen = expected.gather(1, ids[:, None]).flatten().tolist()
        assert told.tokens == list(found.text)
        assert told.text_offset == list(range(len(found.text)))
        assert told.token_logprobs == pytest.approx(chosen, abs=1e-6)
        for token, own, best in zip(told.tokens, chosen, told.top_logprobs, strict=True):
            assert best[token] == pytest.approx(own, abs=1e-6) and 2 <= len(best) <= 3
        with client.completions.create(**TEXT | how, logprobs=2, stream=True) as parts:
            chunks = [part.choices[0].logprobs for part in parts if part.choices]
        parts = [chunk for chunk in chunks if chunk]
        assert [each for chunk in parts for each in chunk.tokens] == told.tokens
        assert [each for chunk in parts for each in chunk.text_offset] == told.text_offset
    own = client.completions.create(**TEXT, logprobs=0, temperature=0).choices[0].logprobs
    assert all(len(best) == 1 for best in own.top_logprobs)
    assert client.completions.create(**TEXT).choices[0].logprobs is None


def test_no_token_is_told_whose_text_is_not_there(client: Any) -> None:
    """Neither of a stop string, nor the end token."""
    create = client.chat.completions.create
    text = create(**CHAT, temperature=0).choices[0].message.content
    stop = text[7:10]
    found = create(**CHAT, temperature=0, stop=stop).choices[0]
    assert [each.token for each in found.logprobs.content] == list(text[: text.index(stop)])
    with create(**CHAT, temperature=0, stop=stop, stream=True) as parts:
        chunks = [part.choices[0].logprobs for part in parts if part.choices]
    told = [each.token for chunk in chunks if chunk for each in chunk.content]
    assert told == list(text[: text.index(stop)])
    asked = CHAT | {"max_tokens": 200, "temperature": 1.5, "seed": 2}
    ended = create(**asked)
    assert ended.choices[0].finish_reason == "stop"
    tokens = ended.choices[0].logprobs.content
    assert len(tokens) == ended.usage.completion_tokens - 1
    said = b"".join(bytes(each.bytes) for each in tokens).decode()
    assert said == ended.choices[0].message.content
    with create(**asked, stream=True) as parts:
        chunks = [part.choices[0].logprobs for part in parts if part.choices]
    assert sum(len(chunk.content) for chunk in chunks if chunk) == len(tokens)


def test_a_response_tells_them_of_its_text(client: Any) -> None:
    """As a chat does; streamed or not."""
    how: dict[str, Any] = {"temperature": 0, "top_logprobs": 2}
    chat = client.chat.completions.create(**CHAT | how).choices[0].logprobs.content
    asked = {"model": "talker", "input": ASKED, "max_output_tokens": 20, **how}
    asked["include"] = ["message.output_text.logprobs"]
    whole = client.responses.create(**asked)
    (part,) = whole.output[0].content
    with client.responses.create(**asked, stream=True) as events:
        found = list(events)
    deltas = [each for each in found if each.type == "response.output_text.delta"]
    for told in (part.logprobs, [each for delta in deltas for each in delta.logprobs]):
        assert [each.token for each in told] == [each.token for each in chat]
        assert [each.logprob for each in told] == pytest.approx([each.logprob for each in chat])
        assert all(len(each.top_logprobs) == 2 for each in told)
    last = found[-1].response.output[0].content[0]
    assert [each.token for each in last.logprobs] == list(part.text) and whole.top_logprobs == 2


def told_of(tokenizer: Any, ids: list[int], stops: tuple[str, ...] = ()) -> list[list[Any]]:
    """The tokens that a log hands on after each of these, given one by one, and at the end."""
    from headstart.serving.probabilities import Log

    log, found = Log(stops, {tokenizer.eos_token_id}), []
    reader = PieceReader(tokenizer)
    for place, token in enumerate(ids):
        best = np.array([[[token, 0]]]), np.array([[[-0.5, -np.inf]]])
        own = LogProbabilities(np.array([[-float(place)]]), *best)
        text = "".join(piece.text for piece in reader.add([token], [0]))
        log.add(Emitted(np.array([1]), np.array([1]), np.array([[token]]), logprobs=own), [text])
        found.append(log.take())
    return [*found, log.end()]


def pieces() -> PreTrainedTokenizerFast:
    """A tokenizer as sentencepiece makes them, with tokens for bytes."""
    known = ["<unk>", "</s>", "▁", "b", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: number for number, piece in enumerate(known)}
    model = models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    space = decoders.Replace("▁", " ")
    backend.decoder = decoders.Sequence(
        [space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


@pytest.mark.parametrize("make", [lambda: chat_tokenizer(CHATML), pieces], ids=["bytes", "pieces"])
def test_a_part_of_a_character_is_called_by_its_bytes(make: Callable[[], Any]) -> None:
    from headstart.serving.probabilities import Spelling

    tokenizer = make()
    spelling, ids = Spelling(tokenizer), tokenizer.encode("b é", add_special_tokens=False)
    named = [spelling.of(token) for token in ids]
    assert b"".join(own for _, own in named).decode().strip() == "b é"
    assert [text for text, _ in named[-2:]] == ["\\xc3", "\\xa9"]
    found = told_of(tokenizer, [*ids, tokenizer.eos_token_id])
    assert [len(each) for each in found[-4:]] == [0, 2, 0, 0]
    first, second = found[-3]
    assert first.start == second.start
    chat = spelling.of_chat([first])["content"][0]
    assert (chat["token"], chat["bytes"], chat["logprob"]) == ("\\xc3", [0xC3], first.logprob)
    assert [each["logprob"] for each in chat["top_logprobs"]] == [-0.5, -9999.0]
    completion = spelling.of_completion([first, second])
    assert completion["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert completion["top_logprobs"][0]["bytes:\\xc3"] == -0.5
    assert spelling.of(tokenizer.eos_token_id) == ("</s>", b"</s>")


def test_bytes_that_are_no_text_end_no_answer() -> None:
    """A stream of `tokenizers` refuses some; and what is left of a character is told at the end."""
    from headstart.serving.streamers import Cut

    tokenizer, draw = pieces(), random.Random(0)

    def written(*rounds: list[int]) -> str:
        said = list[Any]()
        cut = Cut(tokenizer, said.append, threading.Event())
        for each in ([0], *rounds):
            cut.put(torch.tensor(each))
        cut.end()
        return "".join(said)

    for _ in range(200):
        ids = [draw.randrange(2, len(tokenizer)) for _ in range(6)]
        assert written(ids[:1], ids[1:4], ids[4:]) == written(ids)
    broken: Any = tokenizer.convert_tokens_to_ids(["b", "<0x2D>", "<0xCA>", "▁", "<0xC3>"])
    assert written(broken) == "b-\ufffd \ufffd"


def test_tokens_that_may_begin_a_stop_string_are_held_back() -> None:
    tokenizer: Any = chat_tokenizer(CHATML)
    ids = tokenizer.encode("abcabd", add_special_tokens=False)
    counts = [len(each) for each in told_of(tokenizer, ids, ("abd",))]
    assert counts == [0, 0, 3, 0, 0, 0, 0]
    counts = [len(each) for each in told_of(tokenizer, ids[:5], ("abd",))]
    assert counts == [0, 0, 3, 0, 0, 2]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": [], "logprobs": 3}, "logprobs is 3; expected true or false; top_logprobs"),
        ({"messages": [], "top_logprobs": 3}, "top_logprobs is 3 without logprobs; give"),
        ({"messages": [], "logprobs": True, "top_logprobs": 21}, "from 0 to 20"),
        ({"messages": [], "logprobs": True, "top_logprobs": True}, "from 0 to 20"),
        ({"prompt": "a", "logprobs": True}, "logprobs is True; expected a whole number from 0"),
        ({"prompt": "a", "logprobs": -1}, "logprobs is -1; expected a whole number from 0 to 20"),
        ({"prompt": "a", "top_logprobs": 2}, "of /v1/chat/completions; give logprobs: 2"),
        ({"input": "a", "top_logprobs": 2}, "include has no 'message.output_text.logprobs'; give"),
    ],
)
def test_what_asks_for_no_probabilities_is_refused(body: dict[str, Any], said: str) -> None:
    from headstart.serving.probabilities import asked_probabilities

    with pytest.raises(ValueError, match=said):
        asked_probabilities(body)
