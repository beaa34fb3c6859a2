"""The lines that start other engines: what these ask of their flags, settings and names."""

import json
import shlex
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads import family
from headstart.heads.artifacts.engines import serve_line
from headstart.heads.artifacts.trimming import trimmed
from tests.support.drafters import deep, made
from tests.support.shipped_mtp import HYBRIDS
from tests.support.tiny import COMMON, VOCAB, tiny


def told(line: str | None) -> dict[str, Any]:
    """The settings that vLLM is given."""
    words = shlex.split(str(line), comments=True)
    return json.loads(words[words.index("--speculative-config") + 1])


def test_vllm() -> None:
    line = serve_line(made("pard", layers=1, depths=4), "vllm", "them/pard", "vllm")
    assert told(line) == {
        "method": "draft_model", "model": "them/pard", "num_speculative_tokens": 4,
        "parallel_drafting": True, "revision": "vllm",
    }  # fmt: skip
    line = serve_line(made("medusa", heads=3), "vllm", "out")
    assert told(line)["method"] == "medusa" and str(line).endswith("  # vLLM 0.32 or older")
    line = serve_line(made("mlp_speculator"), "vllm", "out")
    assert told(line)["method"] == "arctic" and str(line).startswith("ARCTIC_INFERENCE_ENABLED=1 v")
    assert str(line).endswith("  # pip install arctic-inference vllm==0.26.0")


@pytest.mark.parametrize("name", ["draft_model", "pard"])
@pytest.mark.parametrize("size", [VOCAB - 20, VOCAB, VOCAB + 20])
def test_of_other_tables_of_tokens_vllm_and_transformers_are_told(name: str, size: int) -> None:
    """Both refuse a drafter with another vocab_size unless they match its tokens by their text."""
    student = LlamaForCausalLM(LlamaConfig(**{**COMMON, "vocab_size": size}))
    kind: Any = family(name)
    options = {"mask_token_id": 3} if name == "pard" else {}
    drafter = kind.of(student, **options).bind(tiny("llama"))
    settings = told(serve_line(drafter, "vllm", "out"))
    assert settings.get("use_heterogeneous_vocab", False) == (size != VOCAB)
    line = str(serve_line(drafter, "transformers", "out"))
    assert ("tokenizer=tokenizer, assistant_tokenizer=assistant_tokenizer)" in line) == (
        size != VOCAB
    )


def test_names_with_spaces_are_one_word(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = made("eagle3", deep(), depths=5)
    monkeypatch.setattr(deep(), "name_or_path", "our own 7B")
    for form in ("vllm", "sglang", "tensorrt-llm", "llama.cpp", "speculators"):
        words = shlex.split(str(serve_line(drafter, form, "my runs/it's")))
        assert any("my runs/it's" in word for word in words), form
        assert "our own 7B" in words, form


@pytest.mark.parametrize("revision", [None, "speculators"])
def test_vllm_is_told_of_target_and_revision(revision: str | None) -> None:
    """By name, for of a drafter's own config it takes no folder, and no revision of the drafter."""
    for name, options, method in (
        ("eagle3", {}, "eagle3"),
        ("dflash", {}, "dflash"),
        ("dflash", {"markov_rank": 2, "sample_from_anchor": True}, "dspark"),
    ):
        drafter = made(name, depths=4, **options)
        line = serve_line(drafter, "speculators", "them/it", revision)
        assert told(line) == {
            "method": method, "model": "them/it", "num_speculative_tokens": 4,
            **({"revision": revision} if revision else {}),
        }  # fmt: skip
    parallel = made("eagle3", mask_token_id=7, depths=4)
    assert told(serve_line(parallel, "speculators", "out"))["parallel_drafting"] is True


WINDOWED = {"layers": 2, "window": 5, "causal_windows": False}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("eagle", {}),
        ("dflash", {"sample_from_anchor": True}),
        ("dflash", {"markov_rank": 2, **WINDOWED}),
        ("dflash", {"markov_rank": 2, "markov_head_type": "gated"}),
    ],
)
def test_what_vllm_does_not_run_gets_no_line(name: str, options: dict[str, Any]) -> None:
    assert serve_line(made(name, **options), "speculators", "out") is None


def test_vllm_runs_windows_both_ways_without_pairs_and_pairs_without_windows() -> None:
    for options in (WINDOWED, {"markov_rank": 2}):
        assert serve_line(made("dflash", **options), "speculators", "out") is not None


def test_a_module_is_put_into_its_targets_checkpoint() -> None:
    assert serve_line(made("mtp", tiny("qwen3")), "speculators", "out") is None
    target = HYBRIDS["qwen3-next"]()
    target.name_or_path = "them/target"
    line = serve_line(made("mtp", target, depths=3), "speculators", "me/it", "speculators")
    assert str(line).startswith(
        "hf download me/it --revision speculators --local-dir drafter && "
        "speculators stitch-mtp drafter them/target --output-path stitched && vllm serve stitched "
    )
    assert told(line) == {"method": "mtp", "num_speculative_tokens": 3}


def test_sglang_runs_dspark_by_a_name_of_its_own() -> None:
    for options, method in (({"markov_rank": 2}, "DSPARK"), ({"domino_rank": 2}, "DFLASH")):
        line = str(serve_line(made("dflash", **options), "sglang", "out"))
        assert f"--speculative-algorithm {method} " in line


def test_sglang_finds_the_tokens_of_a_trimmed_eagle1() -> None:
    """Of a branch it would look for the file on the main one, so that it is downloaded first."""
    few = trimmed(made("eagle"), torch.arange(9))
    line = str(serve_line(few, "sglang", "my runs/it's"))
    words = shlex.split(line)
    assert words[words.index("--speculative-token-map") + 1] == "my runs/it's/token_map.pt"
    line = str(serve_line(few, "sglang", "me/it", "sglang"))
    fetch, start = line.split(" && ")
    assert fetch == "hf download me/it token_map.pt --revision sglang --local-dir drafter"
    assert " --speculative-token-map drafter/token_map.pt " in start
    assert (
        " --speculative-draft-model-path me/it --speculative-draft-model-revision sglang" in start
    )
    assert "token" not in str(serve_line(made("eagle"), "sglang", "out")).replace(
        "draft-tokens", ""
    )
    in_tensors = trimmed(made("eagle3", deep()), torch.arange(9))  # d2t
    assert "token-map" not in str(serve_line(in_tensors, "sglang", "out"))


def test_tensorrt() -> None:
    def settings(line: str | None) -> dict[str, Any]:
        words = shlex.split(str(line))
        return json.loads(words[words.index("echo") + 1])["speculative_config"]

    line = serve_line(made("eagle3", deep(), depths=5), "tensorrt-llm", "out")
    assert settings(line) == {
        "decoding_type": "Eagle3", "max_draft_len": 5, "speculative_model": "out",
        "eagle3_layers_to_capture": [1, 2, 3],  # by their output
    }  # fmt: skip
    assert str(line).endswith(" --config speculative.yaml")
    line = serve_line(made("draft_model", layers=1), "tensorrt-llm", "out")
    assert settings(line)["decoding_type"] == "Draft_Target"
    line = serve_line(made("pard", layers=1, depths=4), "tensorrt-llm", "me/it", "tensorrt-llm")
    assert settings(line) == {
        "decoding_type": "PARD", "max_draft_len": 4, "speculative_model": "drafter",
    }  # fmt: skip
    assert str(line).startswith("hf download me/it --revision tensorrt-llm --local-dir drafter && ")


def test_llama_cpp(tmp_path: Any) -> None:
    """Its converter reads the target's config and tokenizer from a folder."""
    target = deep()
    name = target.name_or_path
    try:
        target.name_or_path = str(tmp_path)
        line = str(serve_line(made("eagle3", target, depths=5), "llama.cpp", "out"))
        assert f"convert_hf_to_gguf.py out --target-model-dir {tmp_path} --outfile" in line
        assert line.endswith("--spec-type draft-eagle3 --spec-draft-n-max 5")
        target.name_or_path = "them/target"
        line = str(serve_line(made("eagle3", target, depths=5), "llama.cpp", "out"))
        assert line.startswith("hf download them/target --exclude '*.safetensors' --local-dir tar")
        assert " --target-model-dir target " in line
    finally:
        target.name_or_path = name
    line = str(serve_line(made("dflash", depths=4, markov_rank=2), "llama.cpp", "out"))
    assert line.endswith("--spec-type draft-dspark --spec-draft-n-max 4")
    line = str(serve_line(made("draft_model", layers=1), "llama.cpp", "out"))
    assert line.startswith("python convert_hf_to_gguf.py out --outfile drafter.gguf && ")
