"""Several answers to one request: each is written as that of a request of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from .shapes import Refused, wrong

MOST = 128
"""Answers to one request, at most."""

_PROMPT = "a text, token ids, or a list of either"
END = "data: [DONE]\n\n"
"""What the stream of an answer ends with."""


def each_answer(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A request for each answer that a request asks for, in the order of the choices: `n` of them
    to each prompt.

    The seeds of a prompt's answers count up from the request's.

    Raises:
        ValueError: `n` is no number of answers, or `prompt` neither a prompt nor a list of some.

    >>> each_answer({"prompt": ["a", "b"], "n": 2, "seed": 7})[1:3]
    [{'prompt': 'a', 'seed': 8}, {'prompt': 'b', 'seed': 7}]
    """
    count, prompts = answers_to_each(body), _prompts(body.get("prompt"))
    if (total := count * len(prompts)) > MOST:
        raise Refused(
            f"the request asks for {total:,} answers, n to each prompt; expected at most {MOST}: "
            "send several requests",
            "n",
        )
    found, seed = [], body.get("seed")
    for prompt in prompts:
        for number in range(count):
            own = {name: value for name, value in body.items() if name != "n"}
            if prompt is not None:
                own["prompt"] = prompt
            if type(seed) is int:
                own["seed"] = seed + number
            found.append(own)
    return found


def answers_to_each(body: Mapping[str, Any]) -> int:
    """How many answers a request asks for to each of its prompts."""
    count = 1 if body.get("n") is None else body["n"]
    if type(count) is not int or not 1 <= count <= MOST:
        raise wrong("n", count, f"a whole number from 1 to {MOST}")
    return count


def _prompts(given: Any) -> list[Any]:
    if not isinstance(given, list) or _are_ids(given):
        return [given]
    texts = all(isinstance(each, str) for each in given)
    if not given or not (texts or all(isinstance(each, list) and _are_ids(each) for each in given)):
        raise wrong("prompt", given, _PROMPT)
    return given


def _are_ids(value: list[Any]) -> bool:
    return bool(value) and all(type(each) is int for each in value)


def merged(answers: Sequence[dict[str, Any]], count: int, name: str) -> dict[str, Any]:
    """One answer with the choices of all.

    Args:
        name: the answer's id.
        count: so many of them follow one another to each prompt, whose tokens are counted once.
    """
    choices = [{**answer["choices"][0], "index": number} for number, answer in enumerate(answers)]
    usage = _added([answer["usage"] for answer in answers], count)
    return {**answers[0], "id": name, "choices": choices, "usage": usage}


def _added(usages: Sequence[dict[str, Any]], count: int) -> dict[str, Any]:
    of_prompts, details = usages[::count], "prompt_tokens_details"
    prompt = sum(each["prompt_tokens"] for each in of_prompts)
    cached = sum(each[details]["cached_tokens"] for each in of_prompts)
    written = sum(each["completion_tokens"] for each in usages)
    found = {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        details: {"cached_tokens": cached},
    }
    if (details := "completion_tokens_details") in usages[0]:
        thoughts = sum(each[details]["reasoning_tokens"] for each in usages)
        found[details] = {"reasoning_tokens": thoughts}
    return found


async def merged_stream(streams: Sequence[Any], count: int, name: str) -> AsyncIterator[str]:
    """One stream with the choices of all, each chunk as it comes; the last tells the usage.

    Args:
        count, name: see `merged`.
    """
    chunks: asyncio.Queue[tuple[int, str | None]] = asyncio.Queue()

    async def read(number: int, stream: Any) -> None:
        async with contextlib.aclosing(stream):
            async for part in stream:
                for chunk in part.split("\n\n"):
                    chunks.put_nowait((number, chunk))
        chunks.put_nowait((number, None))

    reading = [asyncio.ensure_future(read(*each)) for each in enumerate(streams)]
    usages, going, shared = dict[int, dict[str, Any]](), len(reading), dict[str, Any]()
    try:
        while going:
            number, chunk = await chunks.get()
            if chunk is None:
                going -= 1
            elif chunk and f"{chunk}\n\n" != END:
                found = json.loads(chunk.removeprefix("data: "))
                if "choices" in found:  # it is no error
                    shared = shared or {"id": name, "created": found.get("created")}
                    found |= shared
                for choice in found.get("choices", ()):
                    choice["index"] = number
                usage = found.pop("usage", None)
                if usage is not None:
                    usages[number] = usage
                    if len(usages) == len(reading):
                        every = [usages[place] for place in range(len(reading))]
                        found["usage"] = _added(every, count)
                    elif not found["choices"]:
                        continue
                yield f"data: {json.dumps(found)}\n\n"
    finally:  # when the client leaves, each writer is told
        for each in reading:
            each.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
    yield END
