"""Tiny random models in float64, and plain helpers that the tests of heads and infer share."""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

VOCAB = 64

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def config_of(config: type, **options: Any) -> Any:
    """A config of `COMMON` and these options; `...` takes one of `COMMON` away."""
    return config(
        **{key: value for key, value in {**COMMON, **options}.items() if value is not ...}
    )


CONFIGS = {
    "llama": partial(config_of, tf.LlamaConfig),
    "mistral": partial(config_of, tf.MistralConfig, sliding_window=9),
    "qwen3": partial(config_of, tf.Qwen3Config),
    "gemma3": partial(
        config_of,
        tf.Gemma3TextConfig,
        num_hidden_layers=3,
        sliding_window=9,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gpt2": lambda: tf.GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=256,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
    ),
}

WINDOWED = ("mistral", "gemma3")


@cache
def tiny(name: str, seed: int = 1, **sizes: Any) -> Any:
    """The model of that family, random, float64, eval; the same object at every call.

    Typed loosely: what transformers mixes into its models at run time, checkers do not see.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return tf.AutoModelForCausalLM.from_config(CONFIGS[name](**sizes)).double().eval()


def large_enough(dtype: torch.dtype, name: str = "llama", **sizes: Any) -> Any:
    """A tiny model of that family whose layers are large enough for the kernels of a CPU."""
    config = copy.deepcopy(tiny(name).config)
    given: dict[str, Any] = {
        "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "intermediate_size": 512, "initializer_range": 0.1, **sizes,
    }  # fmt: skip
    for key, value in given.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model = type(tiny(name))(config).to(dtype).eval()
    for part, weight in model.named_parameters():
        if "norm" in part:  # else ones, which hide what is left out
            weight.data = torch.rand(weight.shape).add(0.5).to(dtype)
    return model


def random_parents(nodes: int, generator: torch.Generator) -> list[int]:
    """A random tree in the order of TokenTree: parents before children."""
    draw = torch.rand(nodes, generator=generator).tolist()
    return [-1, *(int(draw[node] * node) for node in range(1, nodes))]


def path_to(parents: list[int], node: int) -> list[int]:
    """The nodes from the root to `node`, by walking up."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def prompts(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random prompts of these lengths, padded on the left with 0, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(1, VOCAB, (len(lengths), width), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : width - length] = 0
        mask[row, : width - length] = 0
    return ids, mask


def one_line(error: BaseException) -> str:
    """The message, asserted to be a single line that says something."""
    message = str(error)
    assert "\n" not in message and len(message) > 30, message
    return message


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer whose token i is the character number 48 + i."""
    vocabulary = {chr(48 + i): i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
