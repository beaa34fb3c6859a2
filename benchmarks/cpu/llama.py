"""llama.cpp on the same weights in bfloat16: alone, and with a draft model as a chain.

It runs in another process and environment (--python), which has llama-cpp-python and gguf, and
takes turns with ours. Its speculation is driven by `llama_worker.py`, over its C interface.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import headstart
from headstart.heads.draft_model import DraftModel

from .shapes import SHAPES, greedy_after, prompt_of, random_llama

_WORKER = Path(__file__).with_name("llama_worker.py")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--python", required=True, metavar="FILE", help="of an environment with llama-cpp-python")
    add("--shape", default="160m", choices=SHAPES)
    add("--target", metavar="DIR", help="a trained Llama, in place of random weights")
    add("--draft", metavar="DIR", help="a smaller Llama that drafts for it")
    add(
        "--agreeing",
        type=int,
        metavar="N",
        help="random weights, and a draft model of the first "
        "N layers that always agrees, since the other layers add nothing",
    )
    add("--chain", type=int, action="append", help="drafted tokens (default: 5)")
    add("--prompt", type=int, default=128, help="tokens of the prompt")
    add("--new-tokens", type=int, default=64)
    add("--repeats", type=int, default=5)


def run(options: argparse.Namespace) -> None:
    found = measure(options)
    print(json.dumps(found, indent=2) if options.json else _table(found))


class Worker:
    """llama.cpp in a process of its own."""

    def __init__(self, python: str):
        command = [python, str(_WORKER)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the process of llama.cpp has ended; its error stands above.")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def save_arrays(model: PreTrainedModel, folder: Path) -> None:
    """A Llama's config and weights, as `llama_worker.convert` reads them."""
    config: Any = model.config
    names = (
        "max_position_embeddings", "hidden_size", "num_hidden_layers", "intermediate_size",
        "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "vocab_size",
    )  # fmt: skip
    known = {name: getattr(config, name) for name in names}
    known["rope_theta"] = config.rope_parameters["rope_theta"]
    known["head_dim"] = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(known))
    arrays = {}
    for name, weight in model.state_dict().items():
        if weight.dtype == torch.bfloat16:
            arrays[name] = weight.view(torch.int16).numpy().view(np.uint16)
        else:
            arrays[name] = weight.numpy()
    np.savez(folder / "weights.npz", **arrays)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    models = _models(options)
    target, threads = models[0], torch.get_num_threads()
    ids = prompt_of(options.prompt, target.config.vocab_size)
    worker, files = Worker(options.python), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for number, model in enumerate(models):
            place = Path(folder) / str(number)
            save_arrays(model, place)
            files.append(f"{place}.gguf")
            worker.ask("convert", source=str(place), file=files[-1])
        context = options.prompt + options.new_tokens + 64
        version = worker.ask("load", files=files, threads=threads, context=context)["version"]
    chains = [0, *(options.chain or [5])] if len(models) > 1 else [0]
    greedy = greedy_after(ids, options.new_tokens)
    rows = []
    for chain in chains:
        given = {"drafter": DraftModel.of(models[1]), "tree": f"chain:{chain}"} if chain else {}
        ours = headstart.load(target, **given, compile=True)
        own, theirs, same = list[float](), list[float](), 0
        other: dict[str, Any] = {}
        for turn in range(options.repeats + 1):
            text = ours.generate(ids, **greedy)[0, ids.shape[1] :].tolist()
            given = {"ids": ids[0].tolist(), "new": options.new_tokens, "chain": chain}
            other = worker.ask("decode", **given)
            pairs = zip(text, other["tokens"], strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(text))
            if turn:  # the first one warms up
                own.append(1e3 * ours.stats.decode_seconds / max(ours.stats.tokens, 1))
                theirs.append(other["ms"])
        each = [b / a for a, b in zip(own, theirs, strict=True)]
        rows.append({
            "chain": chain, "ms": statistics.median(own), "llama.cpp ms": statistics.median(theirs),
            "times as fast": statistics.median(each), "tau": ours.stats.tau,
            "llama.cpp tau": other["tau"], "same first tokens": same,
        })  # fmt: skip
    worker.close()
    name = options.target or options.shape
    return {"target": name, "threads": threads, "llama-cpp-python": version, "ways": rows}


def _models(options: argparse.Namespace) -> list[PreTrainedModel]:
    if options.target is None:
        target = random_llama(options.shape, torch.bfloat16)
        return [target, *([first_layers(target, options)] if options.agreeing else [])]
    named = [name for name in (options.target, options.draft) if name is not None]
    load = AutoModelForCausalLM.from_pretrained
    return [load(name, dtype=torch.bfloat16).eval() for name in named]


@torch.no_grad()
def first_layers(target: Any, options: argparse.Namespace) -> PreTrainedModel:
    """A draft model of a target's first layers, after which the others are made to add nothing."""
    for layer in target.model.layers[options.agreeing :]:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    draft = random_llama(options.shape, torch.bfloat16, num_hidden_layers=options.agreeing)
    draft.load_state_dict(target.state_dict(), strict=False)
    return draft


def _table(found: dict[str, Any]) -> str:
    lines = [
        f"{found['target']}, bfloat16, {found['threads']} threads, llama-cpp-python "
        f"{found['llama-cpp-python']}; milliseconds a token, medians"
    ]
    for row in found["ways"]:
        way = f"chain of {row['chain']}" if row["chain"] else "plain"
        lines.append(
            f"  {way:12} ours {row['ms']:8.2f} (tau {row['tau']:.2f})   llama.cpp "
            f"{row['llama.cpp ms']:8.2f} (tau {row['llama.cpp tau']:.2f})   ours is "
            f"{row['times as fast']:.2f} times as fast; the first {row['same first tokens']} "
            "tokens are the same"
        )
    return "\n".join(lines)
