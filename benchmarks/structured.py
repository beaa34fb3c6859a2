"""Tokens per round of JSON, with drafts that stay within its schema and with drafts that need not.

    python -m benchmarks.structured PATH/OF/stories260k

Eight texts of the schema, greedy and sampled; the text is the same either way.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from transformers import AutoTokenizer

from benchmarks.stories import story_writer
from headstart.heads import load_drafter
from headstart.infer import Grammar, Speculator, round

TEXT = {"type": "string", "maxLength": 30}
CHARACTER = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["girl", "boy", "dog", "cat", "bird"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "title": TEXT,
        "characters": {"type": "array", "minItems": 1, "maxItems": 3, "items": CHARACTER},
        "happy_end": {"type": "boolean"},
    },
    "required": ["title", "characters", "happy_end"],
    "additionalProperties": False,
}
DRAFTERS = {
    "lookup": "chain:6", "recycling": "chain:6", "lookup+recycling": "chain:6+chain:4",
}  # fmt: skip


@contextmanager
def free_drafts() -> Iterator[None]:
    """Let drafters propose what the schema excludes."""
    with mock.patch.object(
        round, "MaskedProposals", lambda members, *form: SimpleNamespace(members=members)
    ):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    name = parser.parse_args().target
    model, prompts = story_writer(name)
    tokenizer, grammar = AutoTokenizer.from_pretrained(name), Grammar.json_schema(SCHEMA)
    model.generation_config.eos_token_id = tokenizer.eos_token_id

    def write(names: str, tree: str, temperature: float) -> tuple[list[torch.Tensor], float]:
        drafters = [load_drafter(each, model) for each in names.split("+")]
        speculator = Speculator(model, drafters, tree=tree, tokenizer=tokenizer)
        how: dict[str, Any] = {"do_sample": False}
        if temperature:
            how = {"do_sample": True, "temperature": temperature, "top_k": 0}
        texts, tokens, rounds = [], 0, 0
        for seed, prompt in enumerate(prompts[:8]):
            ids = prompt.unsqueeze(0)
            own = {**how, "seed": seed} if temperature else how
            texts.append(speculator.generate(ids, max_new_tokens=300, grammar=grammar, **own))
            tokens, rounds = tokens + speculator.stats.tokens, rounds + speculator.stats.rounds
        return texts, tokens / rounds

    for names, tree in DRAFTERS.items():
        for temperature in (0.0, 1.0):
            with free_drafts():
                expected, free = write(names, tree, temperature)
            texts, within = write(names, tree, temperature)
            same = all(map(torch.equal, texts, expected))
            print(
                f"{names:18} temperature {temperature:g}   τ {free:.2f}, within the schema "
                f"{within:.2f}   the same text: {'yes' if same else 'no'}",
                flush=True,
            )


if __name__ == "__main__":
    main()
