"""The lines that start other engines with an exported drafter and its target.

They are those of vLLM 0.33, SGLang 0.5.23, speculators 0.9, and of TensorRT-LLM and llama.cpp as
of autumn 2026.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..drafter import Drafter

TOKEN_MAP = "token_map.pt"
"""The file that SGLang reads by `torch.load(…, weights_only=True)`: a list of the target's ids."""

_VLLM = {
    "dflash": "dflash", "eagle": "eagle", "eagle3": "eagle3", "medusa": "medusa",
    "draft_model": "draft_model", "pard": "draft_model", "mlp_speculator": "arctic",
}  # fmt: skip
_SGLANG = {"dflash": "DFLASH", "eagle": "EAGLE", "eagle3": "EAGLE3"}
_SGLANG |= dict.fromkeys(("draft_model", "pard"), "STANDALONE")  # one token after another


def _vllm(drafter: Drafter, method: str, place: str, tokens: int, revision: str | None) -> str:
    settings: dict[str, Any] = {"method": method, "model": place}
    settings["num_speculative_tokens"] = tokens
    if drafter.config.family_name() in ("eagle3", "pard") and drafter.independent:
        settings["parallel_drafting"] = True
    if _vocabularies_differ(drafter):
        settings["use_heterogeneous_vocab"] = True
    settings |= {"revision": revision} if revision else {}
    return _vllm_line(_target(drafter), settings)


def _vllm_line(target: str, settings: dict[str, Any]) -> str:
    return f"vllm serve {shlex.quote(target)} --speculative-config {_json(settings)}"


def _serve_vllm(drafter: Drafter, place: str, tokens: int, revision: str | None) -> str:
    if _in_target(drafter):
        return _vllm_line(place, {"method": "mtp", "num_speculative_tokens": tokens})
    method = _VLLM[drafter.config.family_name()]
    line = _vllm(drafter, method, place, tokens, revision)
    if method == "arctic":
        hint = "pip install arctic-inference vllm==0.26.0"  # its only version of vLLM
        return f"ARCTIC_INFERENCE_ENABLED=1 {line}  # {hint}"
    return f"{line}  # vLLM 0.32 or older" if method == "medusa" else line


def _serve_sglang(drafter: Drafter, place: str, tokens: int, revision: str | None) -> str:
    at = f" --speculative-draft-model-revision {shlex.quote(revision)}" if revision else ""
    name = drafter.config.family_name()
    chain = f"--speculative-num-steps {tokens} --speculative-eagle-topk 1 "
    chain += f"--speculative-num-draft-tokens {tokens + 1}"
    if _in_target(drafter):
        start = f"python -m sglang.launch_server --model-path {shlex.quote(place)}"
        return f"{start} --speculative-algorithm NEXTN {chain}"
    method = "DSPARK" if getattr(drafter.config, "markov_rank", 0) else _SGLANG[name]
    line = (
        f"python -m sglang.launch_server --model-path {shlex.quote(_target(drafter))} "
        f"--speculative-algorithm {method} "
        f"--speculative-draft-model-path {shlex.quote(place)}{at}"
    )
    if name == "dflash":  # its config says how many
        return line
    fetch = ""
    if name == "eagle" and drafter.draft_vocabulary is not None:
        if revision:  # SGLang would look for the file on the repository's main branch
            place, fetch = _downloaded(place, revision, TOKEN_MAP)
        line = f"{line} --speculative-token-map {shlex.quote(f'{place}/{TOKEN_MAP}')}"
    return f"{fetch}{line} {chain}"


_TENSORRT = {
    "dflash": "DFlash", "eagle3": "Eagle3", "draft_model": "Draft_Target", "pard": "PARD",
}  # fmt: skip


def _serve_tensorrt(drafter: Drafter, place: str, tokens: int, revision: str | None) -> str:
    name = drafter.config.family_name()
    place, fetch = _downloaded(place, revision)
    settings: dict[str, Any] = {"decoding_type": _TENSORRT[name], "max_draft_len": tokens}
    settings["speculative_model"] = place
    if name == "eagle3":  # it counts layers by their output
        settings["eagle3_layers_to_capture"] = [n - 1 for n in drafter.config.feature_layers]
    return (
        f"{fetch}echo {_json({'speculative_config': settings})} > speculative.yaml && "
        f"trtllm-serve {shlex.quote(_target(drafter))} --config speculative.yaml"
    )


_LLAMA_CPP = {"dflash": "draft-dflash", "eagle3": "draft-eagle3"}
_LLAMA_CPP |= dict.fromkeys(("draft_model", "pard"), "draft-simple")


def _serve_llama_cpp(drafter: Drafter, place: str, tokens: int, revision: str | None) -> str:
    if _in_target(drafter):
        return (
            f"python convert_hf_to_gguf.py {shlex.quote(place)} --outfile target.gguf && "
            f"llama-server -m target.gguf --spec-type draft-mtp --spec-draft-n-max {tokens}"
        )
    name, target, of_target = drafter.config.family_name(), _target(drafter), ""
    place, fetch = _downloaded(place, revision)
    if name in ("eagle3", "dflash"):  # the converter reads the target's config and tokenizer
        if not Path(target).is_dir():
            small = f"hf download {shlex.quote(target)} --exclude '*.safetensors'"
            fetch += f"{small} --local-dir target && "
            target = "target"
        of_target = f" --target-model-dir {shlex.quote(target)}"
    kind = "draft-dspark" if getattr(drafter.config, "markov_rank", 0) else _LLAMA_CPP[name]
    return (
        f"{fetch}python convert_hf_to_gguf.py {shlex.quote(place)}{of_target} "
        f"--outfile drafter.gguf && llama-server -m TARGET.gguf -md drafter.gguf "
        f"--spec-type {kind} --spec-draft-n-max {tokens}"
    )


def _downloaded(place: str, revision: str | None, file: str = "") -> tuple[str, str]:
    """A local folder for an engine that reads no branch of the Hub, and what fetches it there.

    Args:
        file: the one that is fetched, by default all.
    """
    if revision is None:
        return place, ""
    what = f"{place} {file}".rstrip()
    return (
        "drafter",
        f"hf download {what} --revision {shlex.quote(revision)} --local-dir drafter && ",
    )


def _serve_speculators(
    drafter: Drafter, place: str, tokens: int, revision: str | None
) -> str | None:
    """vLLM names the target too, since it takes none from a drafter's config that is a folder.

    It reads no EAGLE-1 of this form, runs no DFlash whose newest token's place drafts, runs every
    window of a DSpark as a causal one, and knows its vanilla term alone. A module for MTP is put
    into its target's checkpoint first.
    """
    own: Any = drafter.config
    name = own.family_name()
    if name == "mtp":
        if own.layer["model_type"] == "qwen3":  # which has no such module in vLLM
            return None
        place, fetch = _downloaded(place, revision)
        settings = {"method": "mtp", "num_speculative_tokens": tokens}
        both = f"{shlex.quote(place)} {shlex.quote(_target(drafter))}"
        stitch = f"speculators stitch-mtp {both} --output-path stitched"
        return f"{fetch}{stitch} && {_vllm_line('stitched', settings)}"
    pairs = bool(getattr(own, "markov_rank", 0))
    if name == "eagle" or (name == "dflash" and own.sample_from_anchor and not pairs):
        return None
    if pairs and (own.markov_head_type != "vanilla" or own.windows_both_ways):
        return None
    method = "dspark" if pairs else _VLLM[name]
    return _vllm(drafter, method, place, tokens, revision)


def _serve_transformers(drafter: Drafter, place: str, tokens: int, revision: str | None) -> str:
    at = f" at revision {revision}" if revision else ""
    if _vocabularies_differ(drafter):
        both = "tokenizer=tokenizer, assistant_tokenizer=assistant_tokenizer"
        what = f"a causal LM and its tokenizer from {place}{at}"
        return f"model.generate(**inputs, assistant_model=assistant, {both})  # {what}"
    return f"model.generate(**inputs, assistant_model=assistant)  # a causal LM from {place}{at}"


def _in_target(drafter: Drafter) -> bool:
    """Whether what is written for an engine is the target's checkpoint with the drafter in it."""
    return type(drafter).in_target


def _vocabularies_differ(drafter: Drafter) -> bool:
    """Whether the drafter is a language model whose `vocab_size` is not its target's."""
    models = [drafter.language_model, drafter.target]
    sizes = {m.config.get_text_config(decoder=True).vocab_size for m in models if m is not None}
    return len(sizes) > 1


def _target(drafter: Drafter) -> str:
    return str(drafter.target.name_or_path)


def _json(settings: dict[str, Any]) -> str:
    """Settings as one word of a command line."""
    return shlex.quote(json.dumps(settings))


FORMATS: dict[str, Callable[[Drafter, str, int, str | None], str | None] | None] = {
    "vllm": _serve_vllm,
    "sglang": _serve_sglang,
    "tensorrt-llm": _serve_tensorrt,
    "llama.cpp": _serve_llama_cpp,
    "speculators": _serve_speculators,
    "transformers": _serve_transformers,
    "original": None,
}
"""Every format, and how its engine is told of a drafter, its place (a folder, or a repository, then
with the revision), and tokens a round; None where there is no engine."""


def serve_line(drafter: Drafter, form: str, place: str, revision: str | None = None) -> str | None:
    """The line that starts a format's engine with a drafter and its target; None without one.

    Args:
        place: the folder of the export, or its repository, where it is the branch `revision`.
    """
    serve = FORMATS[form]
    depth = drafter.max_depth or getattr(drafter.config, "depths", 5)
    return serve and serve(drafter, place, depth, revision)
