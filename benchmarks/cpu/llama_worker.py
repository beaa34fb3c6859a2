"""Runs llama.cpp in an environment of its own, which has llama-cpp-python and gguf, not headstart.

The other side is `llama.py`. Each line of stdin is a JSON request, each line of stdout its answer:
`convert` writes a GGUF file of weights saved as numpy arrays, `load` opens one or two, `decode`
writes greedily after a prompt and tells how long that took.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found]
import llama_cpp  # type: ignore[import-not-found]
import numpy as np

_LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def convert(source: str, file: str) -> dict[str, Any]:
    """Write a Llama, `config.json` and `weights.npz`, as GGUF; bfloat16 comes as 16-bit numbers."""
    config = json.loads((Path(source) / "config.json").read_text())
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    weights = np.load(Path(source) / "weights.npz")
    for name in weights.files:
        values = weights[name]
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _turned(values, heads if "q_proj" in name else groups)
        if values.dtype == np.uint16 and values.ndim == 1:  # norms are kept in float32 there
            values = (values.astype(np.uint32) << 16).view(np.float32)
        if values.dtype == np.uint16:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(_name(name), values.view(np.uint8), raw_dtype=kind)
        else:
            writer.add_tensor(_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"bytes": os.path.getsize(file)}


def _turned(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key layer as llama.cpp rotates them: pairs stand side by side."""
    rows, size = values.shape
    return values.reshape(heads, 2, rows // heads // 2, size).swapaxes(1, 2).reshape(rows, size)


def _name(name: str) -> str:
    found = {
        "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }  # fmt: skip
    if name in found:
        return found[name]
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER[part.removesuffix('.weight')]}.weight"


class Model:
    """One model, read greedily: `logits` of the last token, or of all that were given."""

    def __init__(self, file: str, threads: int, context: int):
        # A model without a vocabulary has no special tokens to look up, which `Llama` would do.
        options = llama_cpp.llama_model_default_params()
        options.use_mmap = False
        self.model = llama_cpp.llama_model_load_from_file(file.encode(), options)
        assert self.model, f"llama.cpp does not load {file}"
        runs = llama_cpp.llama_context_default_params()
        runs.n_ctx, runs.n_batch, runs.n_ubatch = context, context, context
        runs.n_threads = runs.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, runs)
        self.memory = llama_cpp.llama_get_memory(self.context)
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.size = llama_cpp.llama_vocab_n_tokens(vocab)
        self.batch = llama_cpp.llama_batch_init(context, 0, 1)
        self.length = 0

    def keep(self, length: int) -> None:
        """Forget all but the first tokens."""
        llama_cpp.llama_memory_seq_rm(self.memory, 0, length, -1)
        self.length = length

    def run(self, tokens: list[int], every: bool = False) -> list[int]:
        """The likeliest token after the last of these, or after every one."""
        batch, count = self.batch, len(tokens)
        batch.n_tokens = count
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, self.length + place
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            batch.logits[place] = every or place == count - 1
        assert llama_cpp.llama_decode(self.context, batch) == 0
        self.length += count
        asked = range(count) if every else [count - 1]
        return [int(self._logits(place).argmax()) for place in asked]

    def _logits(self, place: int) -> np.ndarray:
        found = llama_cpp.llama_get_logits_ith(self.context, place)
        return np.ctypeslib.as_array(found, (self.size,))


def decode(target: Model, draft: Model | None, ids: list[int], new: int, chain: int) -> Any:
    """Greedy decoding, with a chain of `chain` drafted tokens where there is a draft model."""
    target.keep(0)
    text = [*ids, *target.run(ids)]
    if draft is not None and chain:
        draft.keep(0)
        draft.run(ids[:-1])
    start, rounds = time.perf_counter(), 0
    while len(text) < len(ids) + new:
        drafted: list[int] = []
        if draft is not None and chain:
            drafted = draft.run(text[draft.length :])
            while len(drafted) < chain:
                drafted += draft.run(drafted[-1:])
        target.keep(len(text) - 1)
        found = target.run([text[-1], *drafted], every=True)
        right = 0
        while right < len(drafted) and drafted[right] == found[right]:
            right += 1
        text += found[: right + 1]
        rounds += 1
        if draft is not None and chain:
            draft.keep(min(draft.length, len(text) - 1))
    taken = time.perf_counter() - start
    written = len(text) - len(ids) - 1
    return {"ms": 1e3 * taken / written, "tau": written / rounds, "tokens": text[len(ids) :][:new]}


def main() -> None:
    llama_cpp.llama_backend_init()
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, None)
    models: list[Model | None] = [None, None]
    for line in sys.stdin:
        request = json.loads(line)
        kind = request.pop("do")
        if kind == "convert":
            answer = convert(**request)
        elif kind == "load":
            files, rest = request.pop("files"), request
            models = [Model(file, **rest) for file in files] + [None] * (2 - len(files))
            answer = {"version": llama_cpp.__version__}
        else:
            assert models[0] is not None
            answer = decode(models[0], models[1], **request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
