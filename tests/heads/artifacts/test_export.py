"""Exports: what other engines ask of names, shapes and settings, and the same logits on return."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads import ArtifactError, family, load_drafter
from headstart.heads.artifacts.engines import FORMATS
from headstart.heads.artifacts.export import export_drafter, formats_of, largest_difference
from headstart.heads.artifacts.merging import save_merged
from headstart.heads.artifacts.trimming import trimmed
from headstart.heads.core import FeatureTap
from headstart.heads.families import FAMILIES
from headstart.heads.parts.published.layer_ids import ids_by_input, ids_by_output, read_layer_ids
from headstart.infer import Speculator
from tests.support.drafters import deep, made
from tests.support.tiny import COMMON, VOCAB, letters, one_line, prompts, tiny

SIZE, KEPT = COMMON["hidden_size"], 20


def shapes(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every tensor of a folder."""
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, "pt") as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
        return {n: (tuple(s.get_shape()), s.get_dtype()) for n, s in slices.items()}


OF_LANGUAGE_MODELS = ("vllm", "sglang", "tensorrt-llm", "llama.cpp", "transformers")
OF_MANY_LAYERS = ("eagle3", "dflash")
"""Families that are tried with a target of more layers than the others: engines want them in order,
each once."""


def suited(name: str) -> Any:
    """A target for a family."""
    return deep() if name in OF_MANY_LAYERS else tiny("qwen3" if name == "mtp" else "llama")


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("medusa", "vllm", {"layers": 2}),
    ("medusa", "vllm", {"output": "own"}),
    ("medusa", "original", {"output": "own"}),
    ("medusa", "original", {}),
    ("hydra", "original", {"heads": 3, "layers": 2}),
    ("hydra", "original", {"heads": 1}),
    ("hydra", "original", {"heads": 2, "layers": 2, "prefix": True, "output": "own"}),
    ("redrafter", "original", {}),
    ("redrafter", "original", {"exit_dim": 48, "layers": 1}),
    ("redrafter", "original", {"rnn": False, "layers": 0}),
    *(("eagle", form, {"bias": False}) for form in ("vllm", "sglang", "speculators", "original")),
    *(("eagle", form, {}) for form in ("sglang", "speculators", "original")),
    *(("eagle3", form, {}) for form in ("vllm", "sglang", "speculators", "original")),
    *(
        ("eagle3", form, {"output": "trimmed", "draft_vocab_size": KEPT})
        for form in ("vllm", "sglang", "speculators", "original")
    ),
    ("eagle3", "vllm", {"norm_before_residual": True}),
    ("eagle3", "speculators", {"norm_before_residual": True}),
    ("eagle3", "vllm", {"norm_before_fc": True, "norm_output": True}),
    ("eagle3", "speculators", {"fc_norm": True, "norm_output": True}),
    *(("eagle3", form, {}) for form in ("tensorrt-llm", "llama.cpp")),
    *(
        ("eagle3", form, {"fc_norm": True, "norm_output": True})
        for form in ("sglang", "tensorrt-llm")
    ),
    *(
        ("eagle3", form, {"norm_before_fc": True})
        for form in ("sglang", "tensorrt-llm", "llama.cpp")
    ),
    *(("eagle3", form, {"feature_layers": [0, 1]}) for form in ("vllm", "sglang", "speculators")),
    ("eagle3", "tensorrt-llm", {"feature_layers": [1, 2, 4, 5]}),
    ("eagle3", "llama.cpp", {"feature_layers": [5, 1, 6]}),
    ("eagle3", "llama.cpp", {"norm_before_residual": True}),
    *(
        ("dflash", form, {"layers": 2, "depths": 4})
        for form in ("vllm", "sglang", "tensorrt-llm", "llama.cpp", "original")
    ),
    *(
        ("dflash", form, {"layers": 1, "depths": 3, "causal": True})
        for form in ("vllm", "sglang", "llama.cpp", "original")
    ),
    *(
        ("dflash", form, {"layers": 2, "depths": 4, "window": 5})
        for form in ("vllm", "sglang", "tensorrt-llm", "original")
    ),
    (
        "dflash",
        "vllm",
        {"layers": 2, "window": 5, "output": "trimmed", "draft_vocab_size": KEPT},
    ),
    *(
        ("dflash", form, {"layers": 2, "depths": 4, "window": 5, "causal_windows": False})
        for form in ("vllm", "sglang", "llama.cpp", "speculators")
    ),
    ("dflash", "llama.cpp", {"layers": 2, "depths": 4, "window": 5, "causal": True}),
    ("dflash", "speculators", {"layers": 2, "depths": 4}),
    *(
        (
            "dflash",
            form,
            {"selector_rank": 3, "conv_kernel_size": 2, "conv_group_size": 8, "layers": 2},
        )
        for form in ("vllm", "sglang", "llama.cpp", "speculators", "original")
    ),
    *(
        (
            "dflash",
            form,
            {
                "layers": 1,
                "depths": 3,
                "output": "trimmed",
                "draft_vocab_size": KEPT,
                "sample_from_anchor": True,
                "markov_rank": 4,
            },
        )
        for form in ("speculators", "llama.cpp")
    ),
    *(
        ("dflash", form, options | {"layers": 1, "depths": 3})
        for forms, options in (
            (
                ("sglang", "speculators"),
                {"markov_rank": 4, "markov_head_type": "rnn", "sample_from_anchor": True},
            ),
            (("sglang",), {"markov_rank": 4, "sample_from_anchor": True}),
            (("sglang", "original"), {"domino_rank": 4, "gru_hidden_dim": 6}),
            (
                ("sglang", "original"),
                {"domino_rank": 4, "gru_hidden_dim": 6, "sample_from_anchor": True},
            ),
        )
        for form in forms
    ),
    *(
        ("mlp_speculator", form, options)
        for form in ("vllm", "original")
        for options in (
            {},
            {"heads": 1, "scale_input": False},
            {"heads": 3, "tied": False, "inner_dim": 24},
            {"heads": 3, "cell": "lstm", "inner_dim": 24},
        )
    ),
    ("mtp", "speculators", {"depths": 3}),
    *(("draft_model", form, {"layers": 1}) for form in OF_LANGUAGE_MODELS),
    *(("pard", form, {"layers": 1, "depths": 4}) for form in OF_LANGUAGE_MODELS),
]


@pytest.mark.parametrize(("name", "form", "options"), CASES)
def test_it_comes_back_with_the_same_logits(
    name: str, form: str, options: dict[str, Any], tmp_path: Path
) -> None:
    target = suited(name)
    drafter = made(name, target, **options)
    tokenizer = letters()
    line = export_drafter(drafter, form, tmp_path / "out", tokenizer)
    unread = name in ("eagle", "mtp") or options.get("markov_head_type", "vanilla") != "vanilla"
    unread = form == "speculators" and unread  # by the vLLM of today
    assert (line is None) == (form == "original" or unread)
    assert line is None or str(tmp_path / "out") in line
    again = load_drafter(tmp_path / "out", target, tokenizer, dtype=torch.float32)
    assert type(again) is type(drafter)
    assert largest_difference(drafter, again, seed=7) <= 1e-5
    assert list(again.config.feature_layers) == list(drafter.config.feature_layers)


def test_every_format_of_every_family_is_tried() -> None:
    tried = {(name, form) for name, form, _ in CASES}
    tried |= {("mtp", form) for form in ("vllm", "sglang", "llama.cpp", "original")}  # other tests
    assert tried == {(n, form) for n in FAMILIES if n != "medusa2" for form in formats_of(n)}
    assert {form for _, form in tried} == set(FORMATS)


LAYER = {
    "self_attn.q_proj.weight": (SIZE, 2 * SIZE), "self_attn.k_proj.weight": (16, 2 * SIZE),
    "self_attn.v_proj.weight": (16, 2 * SIZE), "self_attn.o_proj.weight": (SIZE, SIZE),
    "mlp.gate_proj.weight": (48, SIZE), "mlp.up_proj.weight": (48, SIZE),
    "mlp.down_proj.weight": (SIZE, 48), "input_layernorm.weight": (SIZE,),
    "hidden_norm.weight": (SIZE,), "post_attention_layernorm.weight": (SIZE,),
}  # fmt: skip
NARROW = {
    name: (rows, SIZE) if name.startswith(("self_attn.q", "self_attn.k", "self_attn.v")) else
    (rows, *rest)
    for name, (rows, *rest) in LAYER.items()
    if name not in ("input_layernorm.weight", "hidden_norm.weight")
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": SIZE, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB,
    "hidden_act": "silu", "rope_theta": 10_000.0, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
EAGLE3 = LLAMA | {
    "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": KEPT,
    "target_hidden_size": SIZE,
}  # fmt: skip
TRIMMED = {"output": "trimmed", "draft_vocab_size": KEPT}
DFLASH2 = {"selector_rank": 3, "conv_kernel_size": 2, "conv_group_size": 8}
HEAD3 = {
    "fc.weight": (SIZE, 3 * SIZE), "norm.weight": (SIZE,), "lm_head.weight": (KEPT, SIZE),
    "d2t": (KEPT,), "t2d": (VOCAB,),
}  # fmt: skip
ASKED: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any], dict[str, tuple[int, ...]]]] = {
    ("eagle3", "vllm"): (
        TRIMMED, EAGLE3 | ids_by_input([2, 3, 4]),
        HEAD3 | {f"midlayer.{n}": s for n, s in LAYER.items()},
    ),
    ("eagle3", "sglang"): (
        TRIMMED, EAGLE3 | ids_by_output([2, 3, 4]),
        HEAD3 | {f"midlayer.{n}": s for n, s in LAYER.items()},
    ),
    ("eagle3", "original"): (
        # Beside a target_hidden_size the authors' code would not read the target's embeddings.
        TRIMMED, EAGLE3 | ids_by_input([2, 3, 4]) | {"target_hidden_size": None},
        HEAD3 | {f"midlayer.{n}": s for n, s in LAYER.items()},
    ),
    ("eagle3", "speculators"): (
        TRIMMED,
        {
            "speculators_model_type": "eagle3", "draft_vocab_size": KEPT,
            "norm_before_residual": False, "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
        },
        HEAD3
        | {"embed_tokens.weight": (VOCAB, SIZE)}
        | {f"layers.0.{n}": s for n, s in LAYER.items()},
    ),
    ("eagle3", "vllm EAGLE-3.1"): (
        {"fc_norm": True, "norm_output": True, "norm_before_residual": True, **TRIMMED},
        EAGLE3 | {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
        HEAD3
        | {f"fc_norm.{i}.weight": (SIZE,) for i in range(3)}
        | {f"midlayer.{n}": s for n, s in LAYER.items()},
    ),
    ("eagle3", "vllm norm_before_fc"): (
        {"norm_before_fc": True, **TRIMMED}, EAGLE3 | {"norm_before_fc": True},
        HEAD3 | {"input_norm.weight": (3 * SIZE,)}
        | {f"midlayer.{n}": s for n, s in LAYER.items()},
    ),
    ("eagle3", "vllm of two layers"): (
        {"feature_layers": [0, 1], **TRIMMED},
        EAGLE3 | ids_by_input([0, 1]) | {"num_aux_hidden_states": 2},
        HEAD3 | {"fc.weight": (SIZE, 2 * SIZE)}
        | {f"midlayer.{n}": s for n, s in LAYER.items()},
    ),
    ("eagle3", "sglang EAGLE-3.1"): (
        {"fc_norm": True, "norm_output": True, **TRIMMED},
        EAGLE3 | {"fc_norm": True, "norm_output": True},
        HEAD3
        | {f"fc_norm.{i}.weight": (SIZE,) for i in range(3)}
        | {f"midlayer.{n}": s for n, s in LAYER.items()},
    ),
    ("eagle3", "vllm P-EAGLE"): (
        {"mask_token_id": 7, "depths": 4},
        EAGLE3 | {"draft_vocab_size": VOCAB, "ptd_token_id": 7},
        {n: HEAD3[n] for n in ("fc.weight", "norm.weight")}
        | {"lm_head.weight": (VOCAB, SIZE), "mask_hidden": (1, 3 * SIZE)}
        | {f"midlayer.{n}": s for n, s in LAYER.items()},
    ),
    ("eagle", "speculators"): (
        {},
        {"speculators_model_type": "eagle", "layernorms": False, "fusion_bias": True,
         "transformer_layer_architecture": "LlamaDecoderLayer"},
        {"fusion_fc.weight": (SIZE, 2 * SIZE), "fusion_fc.bias": (SIZE,)}
        | {f"transformer.{n}": s for n, s in NARROW.items()},
    ),
    ("eagle", "vllm"): (
        {"bias": False}, LLAMA | {"architectures": ["LlamaForCausalLM"]},
        {"fc.weight": (SIZE, 2 * SIZE)} | {f"layers.0.{n}": s for n, s in NARROW.items()},
    ),
    ("eagle", "sglang"): (
        {"bias": False}, LLAMA | {"architectures": ["LlamaForCausalLMEagle"], "bias": False},
        {"fc.weight": (SIZE, 2 * SIZE), "fc.bias": (SIZE,)}
        | {f"layers.0.{n}": s for n, s in NARROW.items()},
    ),
    ("medusa", "vllm"): (
        {"heads": 2, "layers": 2, "output": "own"},
        {
            "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": SIZE,
            "vocab_size": VOCAB, "truncated_vocab_size": VOCAB, "num_heads": 2,
            "num_hidden_layers": 2, "medusa_fc_bias": True, "original_lm_head": False,
        },
        {f"lm_heads.{k}.weight": (VOCAB, SIZE) for k in range(2)}
        | {f"blocks.{k}.layers.{n}.weight": (SIZE, SIZE) for k in range(2) for n in range(2)}
        | {f"blocks.{k}.layers.{n}.bias": (SIZE,) for k in range(2) for n in range(2)},
    ),
}  # fmt: skip
"""What an engine's loader asks for: our options, its settings, and the shapes of its tensors."""


@pytest.mark.parametrize(("name", "form"), ASKED)
def test_what_an_engine_asks_for(name: str, form: str, tmp_path: Path) -> None:
    options, settings, tensors = ASKED[name, form]
    export_drafter(made(name, suited(name), **options), form.split()[0], tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: config.get(key) for key in settings} == settings
    found = shapes(tmp_path / "out")
    assert {each: shape for each, (shape, _) in found.items()} == tensors  # and not one more
    dtypes = {"d2t": "I64", "t2d": "BOOL"}
    assert all(dtype == dtypes.get(each, "F32") for each, (_, dtype) in found.items())


@pytest.mark.parametrize("form", OF_LANGUAGE_MODELS)
def test_a_draft_model_is_an_ordinary_model(form: str, tmp_path: Path) -> None:
    """Engines read it by its architecture, with the names that transformers gives its tensors."""
    export_drafter(made("draft_model", layers=1), form, tmp_path / "out", letters())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: config[key] for key in ("architectures", "model_type", "num_hidden_layers")} == {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1,
    }  # fmt: skip
    expected = LlamaForCausalLM(LlamaConfig(**config)).state_dict()
    found = {name: shape for name, (shape, _) in shapes(tmp_path / "out").items()}
    assert found == {name: tuple(tensor.shape) for name, tensor in expected.items()}
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_engines_with_older_transformers_find_a_draft_models_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They know no `rope_parameters`, and would take positions of base 10,000."""
    scaled = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    rope = scaled | {"rope_theta": 500_000.0}
    torch.manual_seed(2)
    target: Any = LlamaForCausalLM(LlamaConfig(**COMMON, rope_parameters=rope)).double().eval()
    drafter = made("draft_model", target, layers=1)
    export_drafter(drafter, "tensorrt-llm", tmp_path / "out", letters())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_parameters"] == rope and config["torch_dtype"] == config["dtype"]
    assert config["rope_theta"] == 500_000.0 and config["rope_scaling"] == scaled
    assert LlamaConfig(**config).rope_parameters == rope
    assert "left out" not in caplog.text


def test_the_layer_named_is_the_layer_read(tmp_path: Path) -> None:
    """Both conventions lead to the hidden states that the drafter was made for."""
    target, ids = deep(), prompts([7])[0]
    drafter = made("eagle3", target, feature_layers=[0, 1, 3], **TRIMMED)
    states: list[Any] = []
    hooked = [target.model.layers[i] for i in (0, 2)]
    hooks = [layer.register_forward_hook(lambda m, a, out: states.append(out)) for layer in hooked]
    with torch.no_grad(), FeatureTap(target, [1, 3]) as tap:
        target(ids)
        read = tap.take()
    for hook in hooks:
        hook.remove()
    assert torch.equal(read, torch.cat(states, -1))  # the input of layer 1 is the output of layer 0
    for form, key in (("vllm", [0, 1, 3]), ("sglang", [-1, 0, 2])):
        export_drafter(drafter, form, tmp_path / form)
        config = json.loads((tmp_path / form / "config.json").read_text())
        place = config if form == "vllm" else config["eagle_config"]
        assert place["eagle_aux_hidden_state_layer_ids"] == key
        assert read_layer_ids(config) == [0, 1, 3]


ENGINES = ("vllm", "speculators", "sglang", "tensorrt-llm")
SORTED: dict[str, str] = dict.fromkeys(ENGINES, "gets each once, in ascending")
NO_INPUT, NO_OUTPUT = "the input of the first layer", "the output of the last layer"
FIXED = {"original": "gets those of 2, L/2 and L - 3 of L layers (here 2, 3 and 4), each once"}
LAYERS: list[tuple[str, list[int], dict[str, str]]] = [
    *((n, [2, 3, 4], {}) for n in OF_MANY_LAYERS),
    ("eagle3", [3, 2, 4], SORTED | FIXED),
    ("eagle3", [2, 2, 4], SORTED | FIXED),
    ("dflash", [3, 2, 4], SORTED),
    ("dflash", [2, 2, 4], SORTED),
    ("eagle3", [0, 3, 4], {"tensorrt-llm": NO_INPUT, **FIXED}),
    ("dflash", [0, 3, 4], {"sglang": NO_INPUT, "tensorrt-llm": NO_INPUT}),
    ("eagle3", [2, 3, 7], {"sglang": NO_OUTPUT, **FIXED}),
    ("dflash", [2, 3, 7], {"sglang": NO_OUTPUT}),
    ("eagle3", [4], {"llama.cpp": "reads 1 layers", **FIXED,
                     **dict.fromkeys(("sglang", "tensorrt-llm"), "is not put through fc")}),
    ("dflash", [4], {}),
    *((n, [2, 3, -1], dict.fromkeys(FORMATS, "the target's last norm")) for n in OF_MANY_LAYERS),
]  # fmt: skip
"""Layers of a target that has seven, and what is said in the formats that refuse them."""


@pytest.mark.parametrize(("name", "layers", "refused"), LAYERS)
def test_layers_that_an_engine_hands_over_otherwise(
    name: str, layers: list[int], refused: dict[str, str], tmp_path: Path
) -> None:
    drafter = made(name, deep(), feature_layers=layers)
    for form in formats_of(name):
        if form not in refused:
            export_drafter(drafter, form, tmp_path / form)
            again = load_drafter(tmp_path / form, deep())
            assert list(again.config.feature_layers) == layers
            continue
        with pytest.raises(ArtifactError) as caught:
            export_drafter(drafter, form, tmp_path / form)
        assert refused[form] in one_line(caught.value)


@pytest.mark.parametrize(
    ("form", "options", "settings"),
    [
        ("sglang", {"causal": True}, {"is_causal": True}),
        ("sglang", {"window": 5}, {"use_sliding_window": True, "sliding_window": 5}),
        ("llama.cpp", {"window": 5, "causal_windows": False}, {"is_causal": False}),
        ("llama.cpp", {"window": 5, "causal": True}, {"is_causal": True}),
        ("llama.cpp", {"markov_rank": 2}, {"architectures": ["DSparkSpeculator"]}),
        ("speculators", {}, {"sliding_window_non_causal": None}),
        (
            "speculators",
            {"window": 5, "causal_windows": False},
            {"sliding_window_non_causal": True, "speculators_model_type": "dflash"},
        ),
    ],
)
def test_what_a_place_of_a_block_sees(
    form: str, options: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    """Each engine reads it from settings of its own; where none is set, a layer's type decides."""
    drafter = made("dflash", deep(), layers=2, depths=4, **options)
    export_drafter(drafter, form, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: config.get(key) for key in settings} == settings
    if options == {"window": 5}:
        assert "is_causal" not in config and "causal" not in config["dflash_config"]


def test_windows_alone_are_one_setting(tmp_path: Path) -> None:
    """Where every layer has a window, what holds in one layer holds in all."""
    drafter = made("dflash", layers=2, depths=4, window=5)
    drafter.config.layer["layer_types"] = ["sliding_attention"] * 2
    drafter = type(drafter)(drafter.config).float().bind(tiny("llama")).eval()
    for form, settings in (
        ("llama.cpp", {"is_causal": True}),
        ("speculators", {"sliding_window_non_causal": False}),
    ):
        export_drafter(drafter, form, tmp_path / form)
        config = json.loads((tmp_path / form / "config.json").read_text())
        assert {key: config[key] for key in settings} == settings


def test_d2t_is_an_offset(tmp_path: Path) -> None:
    drafter = made("eagle3", deep(), **TRIMMED)
    export_drafter(drafter, "vllm", tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        offsets, mask = file.get_tensor("d2t"), file.get_tensor("t2d")
    assert torch.equal(offsets + torch.arange(KEPT), drafter.vocabulary)
    assert torch.equal(mask.nonzero().flatten(), drafter.vocabulary)


@pytest.mark.parametrize(
    ("name", "form", "options", "said"),
    [
        ("eagle", "vllm", {}, "has a bias"),
        ("eagle3", "sglang", {"norm_before_residual": True}, "norm_before_residual"),
        ("eagle3", "original", {"feature_layers": [2, 3]}, "inputs of the layers [2, 3], and gets"),
        ("eagle3", "original", {"fc_norm": True}, "fc_norm); export it to vllm or sglang or spec"),
        ("eagle3", "original", {"norm_output": True}, "norm_output); export it to vllm"),
        ("eagle3", "llama.cpp", {"fc_norm": True}, "fc_norm); export it to vllm"),
        ("eagle3", "llama.cpp", {"feature_layers": [0, 1]}, "reads 2 layers"),
        ("dflash", "sglang", TRIMMED, "knows 20 of its target's tokens"),
        ("dflash", "vllm", {"markov_rank": 2}, "term of DSpark (markov_rank); train it with dra"),
        (
            "dflash",
            "vllm",
            {"markov_rank": 2, "markov_head_type": "rnn", "sample_from_anchor": True},
            "drafter.markov_rank=0, or export it to sglang",
        ),
        ("dflash", "sglang", {"markov_rank": 2}, "place drafts nothing, as in DSpark it does"),
        ("dflash", "vllm", {"domino_rank": 2}, "the term of Domino; export it to sglang"),
        ("dflash", "speculators", {"domino_rank": 2}, "the term of Domino; export it to sglang"),
        (
            "dflash",
            "sglang",
            {"domino_rank": 2, "pure_draft_prefix_len": 0},
            "begins after 0 drafts, and there after one",
        ),
        ("dflash", "llama.cpp", {"markov_rank": 2, "markov_head_type": "gated"}, "is gated, exp"),
        ("dflash", "vllm", {"selector_rank": 2}, "expected both"),
        ("dflash", "speculators", {"selector_rank": 2}, "one of DFlash2's parts, expected both"),
        *(
            ("dflash", form, DFLASH2 | {"selector_top_k": 0}, "drafter.selector_top_k=16")
            for form in ("vllm", "speculators")
        ),
        ("dflash", "tensorrt-llm", DFLASH2, "the selector and the convolutions of DFlash2"),
        ("dflash", "speculators", DFLASH2 | TRIMMED, "knows 20 tokens, as a DFlash2"),
        ("dflash", "llama.cpp", {"causal": True, "markov_rank": 2}, "does not see those after it"),
        (
            "dflash",
            "vllm",
            {"sample_from_anchor": True},
            "place drafts (sample_from_anchor); train",
        ),
        (
            "dflash",
            "tensorrt-llm",
            {"causal": True},
            "sees those before it alone (causal); export it to v",
        ),
        ("dflash", "speculators", {"causal": True}, "sees those before it alone (causal)"),
        *(
            (
                "dflash",
                form,
                {"window": 5, "layers": 2},
                "in its layers with a window alone a place does not see those after it",
            )
            for form in ("speculators", "llama.cpp")
        ),
        (
            "dflash",
            "tensorrt-llm",
            {"window": 5, "layers": 2, "causal_windows": False},
            "a place sees those after it (causal_windows=false)",
        ),
        *(
            ("medusa", form, TRIMMED, "20 of 64 tokens; export the drafter that it was trimmed fr")
            for form in ("vllm", "original")
        ),
        ("medusa", "sglang", {}, "expected one of: vllm, original"),
        ("mlp_speculator", "vllm", TRIMMED, "20 of 64 tokens"),
        ("mlp_speculator", "original", {"cell": "lstm", "heads": 1}, "no second projection"),
        ("mtp", "speculators", {}, "its layer is one of llama"),
        ("hydra", "vllm", {}, "eagle, eagle3, medusa, medusa2, mlp_speculator, mtp, pard"),
        ("hydra", "original", {"layers": 3}, "differ"),
        ("medusa", "original", {"layers": 2}, "its blocks differ, and theirs are one block"),
        ("redrafter", "original", TRIMMED, "20 of 64 tokens"),
        ("medusa2", "original", {}, "headstart merge"),
        ("medusa", "gguf", {}, "found format 'gguf', expected one of: vllm"),
    ],
)
def test_what_an_engine_cannot_run_is_refused(
    name: str, form: str, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ArtifactError) as caught:
        target = deep() if name in OF_MANY_LAYERS else tiny("llama")
        export_drafter(made(name, target, **options), form, tmp_path / "out")
    assert said in one_line(caught.value)
    assert not list(tmp_path.iterdir())


def with_layer(name: str, target: Any, layer: dict[str, Any]) -> Any:
    """A drafter whose decoder layer has further settings."""
    config = made(name, target).config
    config.layer |= layer
    return family(name)(config).float().bind(target).eval()


def test_the_authors_code_of_eagle1_has_biases_of_queries_keys_and_values(tmp_path: Path) -> None:
    drafter = with_layer("eagle", tiny("llama"), {"attention_bias": True})
    attention = drafter.model.layers[0].self_attn
    with torch.no_grad():
        for each in "qkvo":
            getattr(attention, f"{each}_proj").bias.normal_()
    with pytest.raises(ArtifactError, match="the output projection of its attention has a bias"):
        export_drafter(drafter, "original", tmp_path / "no")
    with torch.no_grad():
        attention.o_proj.bias.zero_()
    export_drafter(drafter, "original", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["qkv_bias"] is True
    found = {name for name in shapes(tmp_path / "out") if "self_attn" in name and "bias" in name}
    assert found == {f"layers.0.self_attn.{each}_proj.bias" for each in "qkv"}


@pytest.mark.parametrize(
    ("name", "layer", "said"),
    [
        ("eagle3", {"attention_bias": True}, "its attention has biases; export it to vllm or spec"),
        ("eagle", {"head_dim": 16}, "its 4 heads of 16 are not together 32 wide; export it to v"),
        *(
            (name, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
             "its rotary positions are scaled (rope_scaling); export it to vllm")
            for name in ("eagle", "eagle3")
        ),
    ],
)  # fmt: skip
def test_layers_that_the_authors_of_eagle_have_not(
    name: str, layer: dict[str, Any], said: str, tmp_path: Path
) -> None:
    drafter = with_layer(name, suited(name), layer)
    with pytest.raises(ArtifactError) as caught:
        export_drafter(drafter, "original", tmp_path / "out")
    assert said in one_line(caught.value)
    export_drafter(drafter, "speculators", tmp_path / "speculators")


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_engines_know_one_activation(name: str, tmp_path: Path) -> None:
    drafter = with_layer(name, deep(), {"hidden_act": "gelu"})
    for form in ("vllm", "llama.cpp"):
        with pytest.raises(ArtifactError, match="activation gelu, expected silu; export it to sp"):
            export_drafter(drafter, form, tmp_path / form)
    export_drafter(drafter, "original", tmp_path / "original")
    assert json.loads((tmp_path / "original" / "config.json").read_text())["hidden_act"] == "gelu"


def test_vllm_reads_a_block_drafters_own_ends(tmp_path: Path) -> None:
    drafter = made("dflash", layers=2, depths=4, **TRIMMED)
    drafter.config.embedding = "own"
    drafter = type(drafter)(drafter.config).float().bind(tiny("llama")).eval()
    with torch.no_grad():
        drafter.embed_tokens.weight.normal_()
        drafter.vocabulary.copy_(torch.arange(KEPT) * 2)
    export_drafter(drafter, "vllm", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["draft_vocab_size"] == KEPT
    found = {name: shape for name, (shape, _) in shapes(tmp_path / "out").items()}
    ends = {
        "lm_head.weight": (KEPT, SIZE), "embed_tokens.weight": (VOCAB, SIZE), "d2t": (KEPT,),
        "t2d": (VOCAB,),
    }  # fmt: skip
    assert {name: found[name] for name in ends} == ends
    with pytest.raises(ArtifactError, match="embeddings are not its target's; export it to vllm"):
        export_drafter(drafter, "sglang", tmp_path / "no")


def test_scaled_embeddings_of_a_target(tmp_path: Path) -> None:
    """Gemma's are read times the root of their width. Engines give drafters the table as it is."""
    target = tiny("gemma3")
    drafter = made("dflash", target, layers=2, depths=4)
    for form in ("sglang", "llama.cpp"):
        export_drafter(drafter, form, tmp_path / form)
        config = json.loads((tmp_path / form / "config.json").read_text())
        scale = config["dflash_config"]["input_embedding_scale"]
        assert scale == pytest.approx(target.config.hidden_size**0.5, rel=0.01)
    for form in ("vllm", "speculators"):
        with pytest.raises(ArtifactError, match=f"and {form} as they are; export it to sglang"):
            export_drafter(drafter, form, tmp_path / form)
    second = made("dflash", target, layers=2, depths=4, **DFLASH2)
    export_drafter(second, "vllm", tmp_path / "second")
    with pytest.raises(ArtifactError, match="which others read as they are; decode with it here"):
        export_drafter(made("eagle", target, bias=False), "vllm", tmp_path / "eagle")
    export_drafter(made("eagle3", target), "vllm", tmp_path / "eagle3")  # which norms them first


def test_vllm_makes_no_output_layer_for_eagle1(tmp_path: Path) -> None:
    cls: Any = family("eagle")
    config = cls.config_class.for_target(tiny("llama"), bias=False)
    config.output = "own"
    drafter = cls(config).float().bind(tiny("llama"))
    with pytest.raises(ArtifactError, match="its output layer is not its target's; export"):
        export_drafter(drafter, "vllm", tmp_path / "out")


def test_sglang_takes_the_targets_rows_for_the_tokens_of_a_map(tmp_path: Path) -> None:
    target, ids = tiny("llama"), torch.arange(3, VOCAB, 5)
    few = trimmed(made("eagle", target), ids)
    line = export_drafter(few, "sglang", tmp_path / "out")
    assert f" --speculative-token-map {tmp_path}/out/token_map.pt " in str(line)
    assert torch.load(tmp_path / "out" / "token_map.pt", weights_only=True) == ids.tolist()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == VOCAB  # SGLang sizes the head by it before it takes the rows
    assert not {"hot_vocab_size", "draft_vocab_size"} & config.keys()
    found = shapes(tmp_path / "out")
    assert found["lm_head.hot_token_ids"] == ((len(ids),), "I64") and "lm_head.weight" not in found
    again: Any = load_drafter(tmp_path / "out", target, dtype=torch.float32)
    assert again.draft_vocabulary.equal(ids) and largest_difference(few, again, seed=7) <= 1e-5
    # The rows of the whole one: nothing is written beside the weights.
    export_drafter(made("eagle", target), "sglang", tmp_path / "whole")
    assert not (tmp_path / "whole" / "token_map.pt").exists()
    for form in ("vllm", "speculators", "original"):
        with pytest.raises(ArtifactError, match="knows 13 of 64 tokens; export the drafter it was"):
            export_drafter(few, form, tmp_path / form)
    with torch.no_grad():
        few.lm_head.weight[4, 5] += 1e-3
    with pytest.raises(ArtifactError, match=r"for 13 tokens was trained.*takes the target's"):
        export_drafter(few, "sglang", tmp_path / "trained")
    assert not (tmp_path / "trained").exists()


def test_where_engines_look_for_norms(tmp_path: Path) -> None:
    """TensorRT-LLM finds that of all features in eagle_config alone; q_norm is Qwen3's in vLLM."""
    drafter = made("eagle3", deep(), norm_before_fc=True)
    export_drafter(drafter, "tensorrt-llm", tmp_path / "trt")
    config = json.loads((tmp_path / "trt" / "config.json").read_text())
    assert config["eagle_config"] == {"norm_before_fc": True}
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    drafter.config.layer["qk_norm"] = True
    drafter = type(drafter)(drafter.config).float().bind(deep()).eval()
    export_drafter(drafter, "vllm", tmp_path / "vllm")
    config = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert config["architectures"] == ["Eagle3Qwen3ForCausalLM"] and config["norm_before_fc"]
    assert config["model_type"] == "qwen3"
    drafter.config.layer["attention_bias"] = True
    with pytest.raises(ArtifactError, match="both norms of queries and keys, and biases; decode"):
        export_drafter(drafter, "vllm", tmp_path / "biased")


def test_what_stands_in_the_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    with pytest.raises(ArtifactError, match="is not empty"):
        export_drafter(made("medusa"), "vllm", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_wrong_name_is_found_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = made("eagle3", deep())
    write = type(drafter).exports["vllm"]

    def swapped(each: Any) -> Any:
        written = write(each)
        gate, up = (f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up"))
        tensors = written.tensors
        tensors[gate], tensors[up] = tensors[up], tensors[gate]
        return written

    monkeypatch.setattr(type(drafter), "exports", {"vllm": swapped})
    with pytest.raises(ArtifactError, match="other logits"):
        export_drafter(drafter, "vllm", tmp_path / "out")
    assert not list(tmp_path.iterdir())


@torch.no_grad()
def test_transformers_decodes_with_the_exported_draft_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    export_drafter(made("draft_model", layers=1), "transformers", tmp_path / "out", letters())
    assistant = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    ids = prompts([9])[0]
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    alone = tiny("llama").generate(ids, **options)
    assert torch.equal(tiny("llama").generate(ids, assistant_model=assistant, **options), alone)


@torch.no_grad()
def test_merging(tmp_path: Path) -> None:
    """The merged folder decodes as the adapted target does, and its drafter belongs to it."""
    from transformers import AutoModelForCausalLM

    target = LlamaForCausalLM(tiny("llama").config).double().eval()
    target.load_state_dict(tiny("llama").state_dict())
    cls: Any = family("medusa2")
    drafter = cls(cls.config_class.for_target(target, heads=2, rank=2)).double().bind(target)
    drafter.init_from_target(None)
    drafter.adapter.attach(target)
    for parameter in drafter.adapter.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    drafter.adapter.merge()
    ids, options = prompts([8])[0], {"max_new_tokens": 10, "do_sample": False}
    expected = Speculator(target, drafter.eval()).generate(ids, **options)
    heads = save_merged(drafter, tmp_path / "merged", letters())
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    assert torch.equal(merged.generate(ids, **options), expected)
    alone = load_drafter(heads, merged)
    assert type(alone) is family("medusa")
    speculator = Speculator(merged, alone)
    assert torch.equal(speculator.generate(ids, **options), expected)
    with pytest.raises(ArtifactError, match="nothing to merge"):
        save_merged(alone, tmp_path / "again", None)
