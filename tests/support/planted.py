"""A small chat model whose way of answering its template decides, and a drafter for one way.

A chat names a topic k and a word, and an answer goes on from word x to word π[(x + k) mod 32]. The
permutation π is that of the template's answers, of its thoughts, of another template's answers, or
of another model.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

WORDS, TOPICS = 32, 8
MARKS = ("<pad>", "<end>", "<user>", "<assistant>", "<think>", "</think>", "[INST]", "[/INST]")
TEMPLATE = (
    "{% set unsaid = '<think> </think> ' if enable_thinking is defined and not enable_thinking %}"
    "{% for m in messages %}<{{ m.role }}> {{ unsaid if m.role == 'assistant' else '' }}"
    "{{ m.content }} <end> {% endfor %}{% if add_generation_prompt %}<assistant> {{ unsaid }}"
    "{% endif %}"
)
OTHER_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST] "
    "{% else %}{{ m.content }} <end> {% endif %}{% endfor %}"
)
ANSWERS, THOUGHTS, OTHERS, STRANGERS = range(4)  # whose permutation


def tokenizer() -> PreTrainedTokenizerFast:
    names = [*MARKS, *(f"t{i}" for i in range(TOPICS)), *(f"w{i}" for i in range(WORDS))]
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    made = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")
    made.chat_template = TEMPLATE
    return made


def path(way: int, topic: int, word: int, count: int) -> list[str]:
    """What is written after a word."""
    order = torch.randperm(WORDS, generator=torch.Generator().manual_seed(way)).tolist()
    said = []
    for _ in range(count):
        word = order[(word + topic) % WORDS]
        said.append(f"w{word}")
    return said


def question(generator: torch.Generator) -> tuple[int, int]:
    topic = int(torch.randint(TOPICS, (1,), generator=generator))
    return topic, int(torch.randint(WORDS, (1,), generator=generator))


def chats(count: int, seed: int, turns: int = 1, way: int = ANSWERS, length: int = 12) -> list[Any]:
    """Conversations of so many turns, each a list of messages that ends with an answer."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        messages = []
        for _ in range(turns):
            topic, word = question(generator)
            answer = " ".join(path(way, topic, word, length))
            messages += [
                {"role": "user", "content": f"t{topic} w{word}"},
                {"role": "assistant", "content": answer},
            ]
        found.append(messages)
    return found


def _texts(count: int, length: int, generator: torch.Generator, stranger: bool) -> list[str]:
    """Training texts of the target: the three ways in turn, one word in twelve a random one."""
    forms = {
        ANSWERS: "<user> {} <end> <assistant> <think> </think>",
        THOUGHTS: "<user> {} <end> <assistant>",
        OTHERS: "[INST] {} [/INST]",
    }
    found = []
    for number in range(count):
        way = number % len(forms)
        topic, word = question(generator)
        prompt = forms[way].format(f"t{topic} w{word}")
        said, at = [], word
        of = STRANGERS if stranger else way
        for _ in range(length):
            step = path(of, topic, at, 1)[0]
            if torch.rand((), generator=generator) < 1 / 12:
                step = f"w{int(torch.randint(WORDS, (1,), generator=generator))}"
            said.append(step)
            at = int(step[1:])
        found.append(f"{prompt} {' '.join(said)}")
    return found


def train(model: Any, steps: int, seed: int = 0, stranger: bool = False, rate: float = 3e-3) -> Any:
    """Train a target on all three ways, or on one that is a stranger's."""
    encode, generator = tokenizer(), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.1)
    pool = _texts(1536, 40, generator, stranger)
    ids = encode(pool, padding=True, return_tensors="pt").input_ids
    model.train()
    for _ in range(steps):
        batch = ids[torch.randint(len(ids), (32,), generator=generator)]
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
        wanted = batch[:, 1:].masked_fill(batch[:, 1:] < len(MARKS), -100)
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def new_target() -> Any:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=len(MARKS) + TOPICS + WORDS, hidden_size=64, intermediate_size=128,
        num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=512, sliding_window=None, bos_token_id=None, eos_token_id=1,
        pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    return MistralForCausalLM(config)


def fine_tuned(target: Any, steps: int = 60) -> Any:
    return train(copy.deepcopy(target), steps, seed=1, stranger=True)


def recipe(folder: Path, **changes: Any) -> dict[str, Any]:
    """The recipe of the drafter, whose corpus and target are in a folder."""
    return {
        "name": "planted", "output": str(folder / "runs"),
        "target": {"model": str(folder / "target")},
        "corpus": {"source": str(folder / "chats.jsonl"), "held_out": 0.1},
        "chat": {"template_kwargs": {"enable_thinking": False}},
        "distill": {
            "examples": 192, "prefix": "prompt", "prefix_tokens": 64, "new_tokens": 40,
            "batch_size": 64, "shards": 1,
        },
        "drafter": {
            "family": "eagle3", "output": "trimmed", "draft_vocab_size": WORDS, "depths": 3,
            "feature_layers": [1, 3, 4],
        },
        "train": {"batch_size": 16, "max_steps": 120, "learning_rate": 3e-3,
                  "loss": "soft_cross_entropy"},
        "decode": {"tree": "chain:4", "prompts": 4, "new_tokens": 24, "validation_prompts": 4},
    } | changes  # fmt: skip


def write_pair(folder: Path, steps: int = 300) -> Path:
    """Train target and drafter, and return the artifact's folder."""
    target = train(new_target(), steps)
    for part in (target, tokenizer()):
        part.save_pretrained(folder / "target")
    return train_drafter(folder)


def train_drafter(folder: Path, way: int = ANSWERS, **changes: Any) -> Path:
    """Train a drafter of the folder's target on questions, or on a way's answers to them."""
    from headstart.train import pipeline
    from headstart.train.recipe import parse_recipe

    rows = [{"messages": messages} for messages in chats(240, seed=2, way=way, length=36)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)  # as `no_pictures`
        return pipeline.train(parse_recipe(recipe(folder, **changes)))


def rounded(target: Any, bits: int = 3) -> Any:
    """A target whose layers are rounded row by row, as a quantised checkpoint gives them back."""
    target = copy.deepcopy(target)
    with torch.no_grad():
        for layer in target.model.layers.parameters():
            if layer.dim() == 2:
                unit = layer.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
                layer.copy_((layer / unit).round() * unit)
    target.config.quantization_config = {"quant_method": "gptq", "bits": bits}
    return target
