"""Which causal language models of transformers decode here as `generate` does.

    python -m benchmarks.architectures [--type NAME] [--output architectures.jsonl]

Every model type that `AutoModelForCausalLM` knows is made at a tiny size with random weights in
float64, and continues one prompt and a batch of two greedily, without a drafter and with one of
each of several families, as training would start it. Texts are compared with those of `generate`.
Each type runs in a process of its own; what is in the file is not run again.

A type is `not made` where none of the tiny configs tried here fits it, or `generate` fails on it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

from headstart.heads import HeadstartError, TrainableDrafter, UnsupportedTarget, family
from headstart.heads.core import brief
from headstart.infer import Speculator

SAME, DIFFERS, REFUSED, NOT_MADE = "same text", "differs", "refused", "not made"
ALONE = "same text; where it is padded, that of `generate` without padding"
FAILED = "failed"  # an error that names no reason of headstart's own, or no answer in time

FAMILIES = ("lookup", "medusa", "eagle", "eagle3", "mtp", "draft_model", "dflash")

_VOCABULARY, _LAYERS = 97, 3
_SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), _VOCABULARY),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "embedding_size",
         "word_embed_proj_dim"), 32
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size",
         "encoder_ffn_dim", "decoder_ffn_dim"), 48
    ),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_intermediate_size"),
        16,
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), _LAYERS
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
         "encoder_attention_heads"), 4
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("head_dim", "attention_head_size", "kv_channels", "d_kv"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim"), 16),
    **dict.fromkeys(
        ("n_group", "topk_group", "num_shared_experts", "n_shared_experts",
         "first_k_dense_replace", "bos_token_id"), 1
    ),
    **dict.fromkeys(("sliding_window", "attention_window"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_d_state", "state_size"), 8),
    "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "num_key_value_heads": 2,
    "encoder_layers": 2, "rotary_dim": 4, "mamba_expand": 2, "pad_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
"""Small sizes, by the names that configs have for them."""

_LISTS = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types")
_VARIANTS: tuple[tuple[tuple[str, ...], dict[str, int]], ...] = (
    ((), {}),
    (("head_dim", "rotary_dim"), {"num_key_value_heads": 4}),
    (("head_dim",), {}),
    (_LISTS, {}),
    ((*_LISTS, "head_dim"), {"num_key_value_heads": 4}),
    ((), {"num_key_value_heads": 4, "head_dim": 16}),
    ((), {"num_key_value_heads": 4, "num_experts_per_tok": 1}),
)
"""What is left at a config's own default, and what is set otherwise, until a model can be made."""

_MOST = 60_000_000  # parameters
_NEW, _SECONDS = 24, 180


def small_config(kind: str, left: tuple[str, ...], changed: dict[str, int]) -> Any:
    """A tiny config of a model type's language model; see `_VARIANTS`."""
    text: Any = CONFIG_MAPPING[kind]().get_text_config(decoder=True)
    given: dict[str, Any] = {}
    for name, value in text.to_dict().items():
        if name in left:
            continue
        if name in _SIZES:
            given[name] = {**_SIZES, **changed}[name]
        elif name in _LISTS and isinstance(value, list) and value:
            kinds = list(dict.fromkeys(value))
            given[name] = [kinds[number % len(kinds)] for number in range(_LAYERS)]
    return type(text)(**given)


def small_model(kind: str) -> Any:
    """A tiny random model of a type that `generate` can run, in float64.

    Raises:
        RuntimeError: there is none, with the reasons.
    """
    reasons: dict[str, None] = {}
    for left, changed in _VARIANTS:
        try:
            model = _made(small_config(kind, left, changed))
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.dim() > 1:
                        weight.normal_(std=max(weight.shape[-1], 1) ** -0.5)
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0
            model.generate(prompt(), max_new_tokens=4, do_sample=False)
            return model
        except Exception as error:  # whatever a config of these sizes leads to
            reasons[f"{type(error).__name__}: {brief(error, 100)}"] = None
    raise RuntimeError("; ".join(reasons))


def _made(config: Any) -> Any:
    with torch.device("meta"):
        sizes = [weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters()]
    if (count := sum(sizes)) > _MOST:
        raise RuntimeError(f"{count:,} parameters, too many")
    torch.manual_seed(0)
    try:  # grouped products know no float64
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float64, experts_implementation="eager"
        )
    except (TypeError, ValueError):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    return model.eval()


def prompt() -> torch.Tensor:
    """[1, 24] int64."""
    return torch.randint(3, 90, (1, 24), generator=torch.Generator().manual_seed(1))


def try_type(kind: str) -> dict[str, Any]:
    """What becomes of a model type: `status`, and for each of the `drafters` that or the error."""
    try:
        model = small_model(kind)
    except RuntimeError as error:
        return {"type": kind, "status": NOT_MADE, "error": str(error)}
    try:
        plain = _compared(Speculator(model))
    except UnsupportedTarget as error:
        return {"type": kind, "status": REFUSED, "error": str(error)}
    found = {name: _with_drafter(name, model) for name in FAMILIES}
    wrong = [status for status in (plain, *found.values()) if status.startswith((DIFFERS, FAILED))]
    return {"type": kind, "status": wrong[0] if wrong else plain, "drafters": found}


def _with_drafter(name: str, model: Any) -> str:
    cls: Any = family(name)
    layers = {"layers": model.config.get_text_config(decoder=True).num_hidden_layers}
    try:
        torch.manual_seed(3)
        config = cls.config_class.for_target(model, **(layers if name == "draft_model" else {}))
        drafter = cls(config).double().eval().bind(model)
        if isinstance(drafter, TrainableDrafter):
            drafter.init_from_target(torch.ones(config.vocab_size))
        return _compared(Speculator(model, drafter))
    except HeadstartError as error:
        return f"{REFUSED}: {error}"
    except Exception as error:
        return f"{FAILED}: {type(error).__name__}: {brief(error, 200)}"


def _compared(speculator: Speculator) -> str:
    """Whether greedy text is that of `generate`, of a prompt and of a batch that is padded."""
    ids, mask = prompt().expand(2, -1), torch.ones(2, 24, dtype=torch.long)
    mask[1, :5] = 0
    options: dict[str, Any] = {"max_new_tokens": _NEW, "do_sample": False}
    model: Any = speculator.model
    one = model.generate(ids[:1], **options)
    if not torch.equal(speculator.generate(ids[:1], **options), one):
        return DIFFERS
    both = model.generate(ids, attention_mask=mask, **options)
    ours = speculator.generate(ids, attention_mask=mask, **options)
    if torch.equal(ours, both):
        return SAME
    alone = model.generate(ids[1:, 5:], **options)[:, -_NEW:]
    same = torch.equal(ours[:1], one) and torch.equal(ours[1:, -_NEW:], alone)
    return ALONE if same else f"{DIFFERS} where it is padded"


def _answer(kind: str, end: Connection) -> None:
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    torch.set_num_threads(1)
    end.send(try_type(kind))


def results(kinds: list[str]) -> Iterator[dict[str, Any]]:
    """Of each type in turn, from a process of its own."""
    context = multiprocessing.get_context("fork")
    for kind in kinds:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_answer, args=(kind, theirs))
        started = time.monotonic()
        process.start()
        theirs.close()
        try:
            found = ours.recv() if ours.poll(_SECONDS) else None
        except EOFError:
            found = None
        process.kill()
        process.join()
        found = found or {"type": kind, "status": FAILED, "error": "no answer"}
        yield {**found, "seconds": round(time.monotonic() - started, 1)}


def main() -> None:
    """Try the types, and print how many became what."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--type", action="append", dest="types", metavar="NAME")
    parser.add_argument("--output", type=Path, default=Path("architectures.jsonl"))
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    there = options.output.read_text().splitlines() if options.output.is_file() else []
    done = {found["type"]: found for found in map(json.loads, there)}
    wanted = options.types or sorted(NAMES)
    with options.output.open("a") as file:
        for found in results([kind for kind in wanted if kind not in done]):
            done[found["type"]] = found
            print(json.dumps(found), file=file, flush=True)
            print(f"{found['type']}: {found['status']}", file=sys.stderr)
    for status, count in Counter(done[kind]["status"] for kind in wanted).most_common():
        print(f"{status}: {count}")


if __name__ == "__main__":
    main()
