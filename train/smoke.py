"""`--smoke`: a run of any recipe in seconds, offline, to see that it works from end to end.

Stages, drafter, losses and decoding are the recipe's. Replaced are the target, by a random one of
its architecture with few small layers, its tokenizer and chat template, by small ones made here,
the corpus, by chats made here, and all amounts: rows, steps and tokens. The drafter that it makes
is of no use.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from headstart.heads.core import causal_class, loaded_whole
from headstart.heads.core.files import write_atomically
from headstart.heads.core.layer_sizes import layer_configs
from headstart.heads.parts.own_layers import attending_layers, keep_layers

from .estimate import model_config
from .fit.arguments import training_arguments
from .processes.agreement import on_process_0
from .recipe import Corpus, Distill, DrafterSpec, Recipe, Scratch, TargetSpec, Train
from .scratch_target import byte_level_bpe

LAYERS = 4
"""Decoder layers of the tiny target; feature layers are spread over them as over the real one's."""

_CONTEXT = 512
_SIZES = {  # of whatever a config has of these
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16,
    "max_position_embeddings": _CONTEXT, "moe_intermediate_size": 32, "num_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.3,
    # of recurrent layers, by the names of several families
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_num_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_head_dim": 16,
    "mamba_n_heads": 4, "n_mamba_heads": 4, "mamba_num_heads": 4, "mamba_d_head": 32,
    "mamba_headdim": 32, "mamba_head_dim": 32, "mamba_d_state": 16, "ssm_state_size": 16,
    "mamba_d_ssm": 128, "n_groups": 1, "attention_hidden_size": 128, "attention_head_dim": 32,
    "num_experts_per_token": 2, "shared_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 32,
}  # fmt: skip


@dataclass(frozen=True)
class Style:
    """Special tokens and a chat template in the style of a model's own."""

    start: str | None  # what every text begins with
    end: str  # of an answer
    others: tuple[str, ...]
    template: str


_TURNS = "{% for m in messages %}"
_ROLE = "{{ m['role'] }}"
_TEXT = "{{ m['content'] | trim }}"
_STYLES = {
    "llama": Style(
        "<|begin_of_text|>", "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>"),
        "{{ bos_token }}" + _TURNS + "<|start_header_id|>" + _ROLE + "<|end_header_id|>\n\n" + _TEXT
        + "<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
        "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    ),
    "mistral": Style(
        "<s>", "</s>", ("[INST]", "[/INST]"),
        "{{ bos_token }}" + _TURNS + "{% if m['role'] == 'assistant' %} " + _TEXT
        + "{{ eos_token }}{% else %}[INST] " + _TEXT + "[/INST]{% endif %}{% endfor %}",
    ),
    "": Style(  # Qwen's, and of all others
        None, "<|im_end|>", ("<|endoftext|>", "<|im_start|>"),
        _TURNS + "<|im_start|>" + _ROLE + "\n" + _TEXT + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}"
        "<think>\n\n</think>\n\n{% endif %}{% endif %}",
    ),
}  # fmt: skip


def smoke(recipe: Recipe) -> Recipe:
    """The recipe of a smoke run, in `output/NAME-smoke`, after writing there what it reads."""
    small = replace(recipe, name=f"{recipe.name}-smoke", shares=None, hardware=None)
    folder = small.folder.resolve() / "inputs"
    # Before anything asks for the processes: these arguments set them up.
    training_arguments(Train(), folder / "unused", recipe.seed)
    with loaded_whole():
        on_process_0(lambda: _write_inputs(recipe, folder))
    scratch, name = recipe.target.scratch, str(folder / "target")
    if scratch is not None:
        layers, vocab = scratch.layers, 320
        own = Scratch(
            vocab_size=vocab, hidden_size=64, layers=LAYERS, heads=4, intermediate_size=128,
            context=_CONTEXT, sequence_length=32, max_seconds=None, max_tokens=2048,
        )  # fmt: skip
        small.target = TargetSpec(scratch=own, dtype=recipe.target.dtype)
    else:
        config = model_config(str(recipe.target.model)).get_text_config(decoder=True)
        layers, vocab = config.num_hidden_layers, 256
        exact = {"4bit": "float32"}.get(recipe.target.dtype, recipe.target.dtype)
        small.target = TargetSpec(model=name, dtype=exact)
    small.corpus = Corpus(source=str(folder / "chats.jsonl"), held_out=0.5)
    small.distill = _distill(recipe.distill)
    small.train = replace(
        recipe.train, batch_size=2, gradient_accumulation=2, rows_per_step=None, max_steps=4,
        epochs=None, max_seconds=None, eval_every=2, optimizer="adamw", compile=False, from_=None,
        extend=False, report_to=[], packed_length=None,
    )  # fmt: skip
    tree = recipe.decode.tree
    if isinstance(tree, str) and tree.startswith("sparse:"):
        tree = "sparse:8"
    small.decode = replace(
        recipe.decode, tree=tree, prompts=2, prefix_tokens=16, new_tokens=8, validation_prompts=2
    )
    options = _drafter_options(recipe.drafter.options, layers, vocab, folder)
    small.drafter = DrafterSpec(recipe.drafter.family, options)
    return small


def _distill(spec: Distill) -> Distill:
    tokens = 128 if spec.prefix == "prompt" else 16
    writer = "given" if spec.writer == "given" else "own"
    return replace(
        spec, writer=writer, openai=None, drafter=None, use_drafter="where_faster", examples=16,
        prefix_tokens=tokens, new_tokens=12, max_length=None, batch_size=16,
        shards=max(spec.rounds, 2), round_steps=None, max_seconds=None,
    )  # fmt: skip


def _drafter_options(
    options: dict[str, Any], layers: int, vocab: int, folder: Path
) -> dict[str, Any]:
    """The drafter's options for a target of `LAYERS` layers in place of `layers`."""

    def scaled(layer: int) -> int:
        return layer if layer < 0 else round(layer * (LAYERS - 1) / max(layers - 1, 1))

    small = dict(options)
    for name in ("feature_layers", "layers"):
        if isinstance(small.get(name), list):
            small[name] = sorted({scaled(layer) for layer in small[name]})
    if isinstance(small.get("layers"), int):
        small["layers"] = min(small["layers"], LAYERS)
    if small.get("model") is not None:
        small["model"] = str(folder / "student")
    if small.get("draft_vocab_size"):
        small["draft_vocab_size"] = min(small["draft_vocab_size"], vocab // 2)
    if small.get("mask_token_id") is not None:
        small["mask_token_id"] = min(small["mask_token_id"], vocab - 1)
    if small.get("exit_dim"):
        small["exit_dim"] = 128
    if "rank" in small:
        small["rank"] = min(small["rank"], 4)
    return small


def _write_inputs(recipe: Recipe, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"messages": chat}) + "\n" for chat in chats()]
    write_atomically(folder / "chats.jsonl", "".join(lines))
    if recipe.target.model is None:
        return
    config = model_config(recipe.target.model)
    tokenizer = tiny_tokenizer(config.model_type)
    _write_model(config, tokenizer, folder / "target", recipe.seed)
    if student := recipe.drafter.options.get("model"):
        _write_model(model_config(student), tokenizer, folder / "student", recipe.seed + 1)


def _write_model(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast, folder: Path, seed: int
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        small = shrunk(config, tokenizer)
        model = causal_class(small).from_config(small, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def shrunk(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    """A config of the same architecture with `LAYERS` layers, 64 wide, for a tokenizer.

    They are the first ones, or the first that attends in the place of the last of them. Parts that
    read images have one layer.
    """
    small = copy.deepcopy(config)
    text: Any = small.get_text_config(decoder=True)
    count, heads = text.num_hidden_layers, text.num_attention_heads
    chosen, attending = list(range(LAYERS)), attending_layers(text, alone=False)
    if attending and attending[0] >= LAYERS:
        chosen[-1] = attending[0]
    if count >= LAYERS:
        keep_layers(text, chosen)
    groups = (getattr(layer_configs(text)[0], "num_key_value_heads", None) or heads) / heads
    sizes = _SIZES | {
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": max(round(groups * _SIZES["num_attention_heads"]), 1),
        "vocab_size": len(tokenizer),
    }
    for name, value in text.to_dict().items():
        if name in sizes and value is not None:
            setattr(text, name, sizes[name])
        elif isinstance(value, list) and len(value) == count:  # of something for every layer
            setattr(text, name, (value + value[-1:] * LAYERS)[:LAYERS])
    if getattr(text, "is_heterogeneous", False):
        text.per_layer_config = {
            layer: {name: sizes.get(name, value) for name, value in each.items()}
            for layer, each in text.to_dict()["per_layer_config"].items()
        }
    if getattr(text, "sliding_window", None):
        text.sliding_window = min(text.sliding_window, 64)
    rope = getattr(text, "rope_parameters", None) or {}
    if "original_max_position_embeddings" in rope:  # must stay below the extended context
        rope["original_max_position_embeddings"] = _CONTEXT // 2
    if "mrope_section" in rope:
        rope["mrope_section"] = [2, 3, 3]  # of half a head
    parts = (getattr(small, name, None) for name in small.sub_configs)
    for part, name in product(parts, ("num_hidden_layers", "depth")):
        if part is not None and part is not text and getattr(part, name, None):
            setattr(part, name, 1)
    text.bos_token_id, text.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    text.pad_token_id = tokenizer.pad_token_id
    return small


@cache
def tiny_tokenizer(model_type: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE of the built-in chats, with the chat template of a kind of model."""
    style = _STYLES.get(model_type, _STYLES[""])
    special = [token for token in (style.start, style.end, *style.others) if token]
    texts = (turn["content"] for chat in chats() for turn in chat)
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(texts, len(special) + 256 + 60, special),
        bos_token=style.start,
        eos_token=style.end,
        pad_token=style.end,
        chat_template=style.template,
        model_max_length=_CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def chats() -> Iterator[list[dict[str, str]]]:
    """Chats of two turns, all different.

    >>> [turn["content"] for turn in next(chats())]
    ['What is 2 times 3?', '2 times 3 is 6.', 'And one more?', 'One more than 6 is 7.']
    """
    for a in range(2, 10):
        for b in range(a + 1, 11):
            turns = (
                f"What is {a} times {b}?", f"{a} times {b} is {a * b}.",
                "And one more?", f"One more than {a * b} is {a * b + 1}.",
            )  # fmt: skip
            roles = ("user", "assistant") * 2
            pairs = zip(roles, turns, strict=True)
            yield [{"role": role, "content": content} for role, content in pairs]
