"""Rows that are filled anew as they end write what each prompt gives alone."""

import copy
from collections import deque
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from headstart.heads import FAMILIES, OptionError
from headstart.infer import Speculator
from headstart.infer.prompts import Prompt
from headstart.infer.stream import decode_stream
from tests.support.covering import covering
from tests.support.families import TREES, drafter
from tests.support.tiny import VOCAB, one_line, tiny

NEW = 14
LAST = Prompt("last", [1, 2, 3], 5, seed=7)


def asked(count: int = 13) -> list[Prompt]:
    """Prompts of different lengths and budgets."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    return [
        Prompt(
            number,
            torch.randint(1, VOCAB, (length,), generator=generator).tolist(),
            3 + (5 * number) % NEW,
            seed=1000 + number,
        )
        for number, length in enumerate(lengths)
    ] + [Prompt("one", [7], 6, seed=5)]


EOS = [3, 9]  # of 64 tokens


@cache
def expected(model: Any, temperature: float) -> dict[Any, list[int]]:
    """What each prompt gives alone."""
    return {p.key: alone(model, p, temperature) for p in [*asked(), LAST]}


def alone(model: Any, prompt: Prompt, temperature: float, **how: Any) -> list[int]:
    how |= {"do_sample": temperature > 0, "max_new_tokens": prompt.new_tokens}
    if temperature:
        how |= {"seed": [prompt.seed], "temperature": temperature, "top_k": 0, "top_p": 1.0}
    text = Speculator(model).generate(torch.tensor([prompt.tokens]), eos_token_id=EOS, **how)
    return text[0, len(prompt.tokens) :].tolist()


def streamed(speculator: Speculator, prompts: list[Prompt], batch: int, **how: Any) -> dict:
    ready = deque(prompts)
    found = {}
    longest = max(len(p.tokens) + p.new_tokens for p in prompts)

    def next_prompt() -> Prompt | None:
        return ready.popleft() if ready else None

    for prompt, text in decode_stream(speculator, next_prompt, batch, longest, **how):
        assert prompt.key not in found
        found[prompt.key] = text
        if prompt.key == 0:  # what is written may lead to another prompt
            ready.append(LAST)
    return found


def check(speculator: Speculator, batch: int, temperature: float = 0.0) -> None:
    model = speculator.model
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = EOS
    try:
        found = streamed(speculator, asked(), batch, temperature=temperature)
    finally:
        model.generation_config.eos_token_id = before
    assert found == expected(model, temperature)
    assert len({len(text) for text in found.values()}) > 3


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2"])
@pytest.mark.parametrize("batch", [1, 4, 20])
def test_plain(name: str, batch: int) -> None:
    check(Speculator(tiny(name)), batch)


def test_sampled() -> None:
    check(Speculator(tiny("llama")), 4, temperature=0.8)


@pytest.mark.parametrize(
    ("name", "graphs", "temperature"), covering([*product(FAMILIES, (False, True), (0.0, 1.0))])
)
def test_drafted(name: str, graphs: bool, temperature: float) -> None:
    tree = TREES[1] if name != "redrafter" else "beam:3,3"
    speculator = Speculator(tiny("llama"), drafter(name, "tiny"), tree=tree, graphs=graphs)
    check(speculator, 4, temperature)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_stream_has_the_processors_of_the_generation_config(temperature: float) -> None:
    """As `generate` has, which is asked for it by name here."""
    model = copy.deepcopy(tiny("llama"))
    config = {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_length": 12}
    config |= {"suppress_tokens": [8, 9]}
    model.generation_config.update(**config, eos_token_id=EOS)
    speculator = Speculator(model, drafter("medusa", "tiny").bind(model), tree=TREES[1])
    found = streamed(speculator, asked(), 3, temperature=temperature)
    plain, same = tiny("llama"), 0
    for prompt in [*asked(), LAST]:
        text = alone(plain, prompt, temperature, **config)
        assert found[prompt.key] == text
        same += text == expected(plain, temperature)[prompt.key]
    assert same < len(found) / 2, "they change nothing here"


def test_graphs_serve_a_stream_and_then_a_request() -> None:
    speculator = Speculator(tiny("llama"), drafter("medusa", "tiny"), graphs=True)
    check(speculator, 3)
    ids = torch.tensor([[5, 6, 7]])
    plain = Speculator(tiny("llama")).generate(ids, max_new_tokens=9, do_sample=False)
    assert torch.equal(speculator.generate(ids, max_new_tokens=9, do_sample=False), plain)
    check(speculator, 3)


def test_prompts_that_cannot_be_decoded_are_refused() -> None:
    for prompt in (Prompt(0, [], 4), Prompt(0, [5] * 9, 4)):
        ready: list[Prompt | None] = [None, None, prompt]
        stream = decode_stream(Speculator(tiny("llama")), lambda: ready.pop(), 2, 12)  # noqa: B023
        with pytest.raises(OptionError) as error:
            next(stream)
        assert "at most 12 in all" in one_line(error.value)
        ready.clear()
