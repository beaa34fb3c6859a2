"""DFlash: the published definition, other projects' checkpoints, trees of it, its options."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import rotate_half

from headstart.heads import ArtifactError, OptionError, family, load_drafter
from headstart.heads.artifacts.export import export_drafter
from headstart.heads.dflash import DFlash, spread_layers
from headstart.infer import Speculator
from headstart.train.fit.target_with_drafter import TargetWithDrafter
from headstart.train.losses.draft_loss import head_labels, some_starts, unbroken
from tests.support import published_dflash as published
from tests.support.best import found_by_kernels
from tests.support.drafters import deep
from tests.support.published_dflash import Form, by_hand
from tests.support.tiny import VOCAB, one_line, prompts, tiny

FORMS = {
    "DFlash": Form(),
    "one layer": Form(layers=1, block=2),
    "JetSpec": Form(causal=True),
    "DSpark": Form(dspark=True, rank=6),
    "DSpark without a term": Form(dspark=True),
    "DFlash with a term": Form(rank=3),
    "DSpark with a gate": Form(dspark=True, rank=6, kind="gated"),
    "DSpark with a cell": Form(dspark=True, rank=6, kind="rnn"),
    "DFlash with a cell": Form(rank=4, kind="rnn"),
    "Domino": Form(domino=5, from_anchor=True),
    "Domino from a mask": Form(domino=7, plain=0),
    "Domino after two drafts": Form(domino=7, plain=2, causal=True),
    "windows": Form(layers=3, window=3, seeing_all=2),
    "windows alone": Form(window=4, seeing_all=-1),
    "windows both ways": Form(window=3, both_ways=True),
    "causal windows": Form(window=3, causal=True),
    "DSpark with windows": Form(window=4, dspark=True, rank=6),
    "DFlash2": Form(
        kernel=2, selector=6, multiplier=0.2, cap=20.0, window=4, seeing_all=-1, both_ways=True
    ),
    "DFlash2 of three taps": Form(kernel=3, selector=4, top_k=60),
    "a share of each head": Form(share=0.5, causal=True),
    "DFlash2 of a share": Form(kernel=2, selector=6, share=0.25, both_ways=True),
    "scaled": Form(multiplier=0.5, cap=3.0),
}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def loaded(form: Form, folder: Path) -> Any:
    place = write(folder, form.config, form.tensors)
    found: Any = load_drafter(place, tiny("llama"), dtype=torch.float64)
    assert isinstance(found, DFlash)
    return found.eval()


@torch.no_grad()
def drafted(drafter: Any, features: Tensor, tokens: list[int], prompt: int) -> Tensor:
    """Logits [K, V] after features [T, F], of which the first `prompt` come with the prompt."""
    text, depths = len(features), drafter.max_depth
    ids = torch.tensor([tokens])
    state = drafter.start(1, text + 16)
    drafter.reserve(state, prompt, 2 * depths + 2)
    drafter.prefill(state, features[None, :prompt], ids[:, :prompt], torch.tensor([prompt]))
    at = prompt - 1
    while True:  # rounds that commit two tokens each, with a third of padding, then one
        count = min(2, text - at)
        feed = torch.nn.functional.pad(features[None, at : at + count], (0, 0, 0, 3 - count))
        new = torch.nn.functional.pad(ids[:, at + 1 : at + 1 + count], (0, 3 - count))
        drafter.reserve(state, at + count, 2 * depths + 2)
        step = drafter.begin(state, feed, new, torch.tensor([count]))
        at += count
        if at == text:
            break
    if drafter.independent:
        return step.logits[0]
    levels = [step.logits[0, 0]]
    for depth in range(1, depths):
        token = ids[:, text + depth, None]
        levels.append(drafter.extend(state, token, torch.tensor([[depth - 2]])).logits[0, 0])
    return torch.stack(levels)


@pytest.mark.parametrize("name", FORMS)
def test_published_checkpoints_draft_as_defined(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    drafter = loaded(form, tmp_path)
    assert drafter.max_depth == form.block - (not form.dspark and not form.from_anchor)
    assert drafter.independent == (not form.rank and not form.selector and not form.domino)
    assert list(drafter.config.feature_layers) == [1, 2], "the outputs of layers 0 and 1"
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(9, 64, generator=generator, dtype=torch.float64)
    tokens = torch.randint(VOCAB, (9 + form.block + 1,), generator=generator).tolist()
    expected = by_hand(form, features, tokens)
    for prompt in (1, 4, 9):
        found = drafted(drafter, features, tokens, prompt)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # float32 angles
    # The controls: the features' order, and each option, matter.
    flipped = by_hand(form, features.flip(0), tokens) - expected
    assert flipped.nan_to_num(posinf=1, neginf=1).abs().max() > 1e-2
    if form.block > 2:
        others = [replace(form, causal=not form.causal)] * (form.seeing_all >= 0)
        if form.window:
            others.append(replace(form, window=form.window + 1))
            others += [replace(form, both_ways=not form.both_ways)] * (not form.causal)
        for other in others:
            moved = (by_hand(other, features, tokens) - expected).nan_to_num(posinf=1, neginf=1)
            assert moved.abs().max() > 1e-3


@pytest.mark.parametrize("name", ["DFlash", "windows both ways", "scaled", "DFlash2"])
@pytest.mark.parametrize("form", ["vllm", "original"])
def test_it_goes_out_bit_for_bit(name: str, form: str, tmp_path: Path) -> None:
    """The exported file has the published tensors, and comes back with the same settings."""
    write(tmp_path / "theirs", FORMS[name].config, FORMS[name].tensors)
    drafter: Any = load_drafter(tmp_path / "theirs", deep())
    export_drafter(drafter, form, tmp_path / "ours")
    found, tensors = load_file(tmp_path / "ours" / "model.safetensors"), FORMS[name].tensors
    assert found.keys() == tensors.keys()
    assert all(found[each].equal(tensors[each]) for each in tensors)
    again: Any = load_drafter(tmp_path / "ours", deep())
    assert again.config.to_dict() == drafter.config.to_dict()


@pytest.mark.parametrize(
    ("kind", "form", "said"),
    [
        ("dflash", Form(layers=3, window=3, seeing_all=2), {}),
        ("dflash", FORMS["windows both ways"], {"sliding_window_non_causal": True}),
        ("dflash", FORMS["windows alone"], {"sliding_window_non_causal": False}),
        ("dspark", FORMS["DSpark with windows"], {"sliding_window_non_causal": False}),
        ("dflash2", replace(FORMS["DFlash2"], multiplier=1.0, cap=0.0), {}),
        ("dflash2", Form(kernel=3, selector=4), {"sliding_window_non_causal": True}),
    ],
)
def test_windows_as_speculators_names_them(
    kind: str, form: Form, said: dict[str, Any], tmp_path: Path
) -> None:
    """Where nothing is said, a window of DFlash2 is seen both ways, and of the others is not."""
    place = write(tmp_path, form.in_speculators(kind, **said), form.tensors)
    found: Any = load_drafter(place, tiny("llama"), dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(9, 64, generator=generator, dtype=torch.float64)
    tokens = torch.randint(VOCAB, (9 + form.block + 1,), generator=generator).tolist()
    expected = by_hand(form, features, tokens)
    torch.testing.assert_close(
        drafted(found.eval(), features, tokens, 4), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("architecture", ["DSparkSpeculator", "Qwen3DSparkModel"])
def test_of_speculators_the_newest_place_drafts_where_it_is_said(
    architecture: str, tmp_path: Path
) -> None:
    """vLLM and llama.cpp read no setting as false, unlike in DSpark's own checkpoints."""
    form = FORMS["DSpark"]
    config = form.in_speculators("dspark", architectures=[architecture])
    for said, expected in ((True, True), (False, False), (None, False)):
        config |= {"sample_from_anchor": said}
        written = {name: value for name, value in config.items() if value is not None}
        place = write(tmp_path / str(said), written, form.tensors)
        found: Any = load_drafter(place, tiny("llama"))
        assert found.config.sample_from_anchor == expected
        assert found.max_depth == form.block - (not expected)


def test_layers_that_no_config_names_are_the_published_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the authors' code, SGLang and AngelSlim choose them: here 2 and 5 of 7."""
    form = Form()
    found: Any = {}
    for name, ids in (("unnamed", {}), ("named", {"target_layer_ids": [1, 4]})):
        caplog.clear()
        config = form.config | {"dflash_config": {"mask_token_id": published.MASK, **ids}}
        config |= {"architectures": ["QwenDFlashDraftModel"]}  # AngelSlim's
        found[name] = load_drafter(write(tmp_path / name, config, form.tensors), deep())
        assert ("it reads the inputs of layers 2, 5, those" in caplog.text) == (not ids)
    assert list(found["unnamed"].config.feature_layers) == [2, 5]
    assert found["unnamed"].config.to_dict() == found["named"].config.to_dict()


@pytest.mark.skipif(
    not hasattr(transformers, "MuseGlimmerAssistantModel"), reason="this transformers has none"
)
def test_it_is_what_transformers_runs(tmp_path: Path) -> None:
    """The only block drafter that transformers has a class for, with layers that see all."""
    form = FORMS["DFlash"]
    drafter, config = loaded(form, tmp_path), form.config
    sizes = {
        name: config[name]
        for name in (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "rms_norm_eps", "layer_types", "block_size",
        )
    }  # fmt: skip
    theirs: Any = transformers.MuseGlimmerAssistantModel(  # type: ignore[attr-defined]
        transformers.MuseGlimmerAssistantConfig(  # type: ignore[attr-defined]
            **sizes, mask_token_id=published.MASK, target_layer_ids=published.TARGET_LAYERS,
            rope_parameters={"rope_type": "default", "rope_theta": published.THETA},
        )
    ).double().eval()  # fmt: skip
    names = {
        "fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight",
    }  # fmt: skip
    theirs.load_state_dict({names.get(name, name): t for name, t in form.tensors.items()})
    features = torch.randn(7, 64, dtype=torch.float64)
    tokens = torch.randint(VOCAB, (8,)).tolist()
    ids = torch.tensor([[tokens[7]] + [published.MASK] * (form.block - 1)])
    with torch.no_grad():
        block = tiny("llama").model.embed_tokens(ids)
        left = theirs(noise_embeds=block, context_hidden_states=features[None]).last_hidden_state
        expected = tiny("llama").lm_head(left)[0, 1:]
    found = drafted(drafter, features, tokens, 3)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "name", ["DFlash", "DSpark", "DSpark with a cell", "Domino", "windows", "DFlash2"]
)
@pytest.mark.parametrize("tree", ["chain:4", "best-first:9,4,3", "cartesian:2,2,1"])
def test_it_decodes_what_the_target_says(name: str, tree: str, tmp_path: Path) -> None:
    ids, mask = prompts([9, 4, 7])
    target: Any = tiny("llama")
    drafter = loaded(FORMS[name], tmp_path)
    expected = target.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    found = Speculator(target, drafter, tree=tree).generate(
        ids, attention_mask=mask, max_new_tokens=20
    )
    assert torch.equal(found, expected)


def test_the_selector_finds_its_tokens_by_the_kernel_for_the_best(tmp_path: Path) -> None:
    drafter = loaded(FORMS["DFlash2"], tmp_path)
    features, tokens = torch.randn(7, 64, dtype=torch.float64), torch.randint(VOCAB, (16,)).tolist()
    expected = drafted(drafter, features, tokens, 3)
    with found_by_kernels() as asked:
        found = drafted(drafter, features, tokens, 3)
    assert {*asked} == {drafter.config.selector_top_k}
    assert torch.equal(found, expected) and bool(found.isinf().any())


def changed(form: Form, tensors: dict[str, Tensor] | None = None, **config: Any) -> Any:
    return form.config | config, form.tensors | (tensors or {})


def renamed(form: Form, **prefixes: str) -> dict[str, Tensor]:
    """Tensors by names that begin otherwise; `all` is put before each of them."""
    first, found = prefixes.pop("all", ""), {}
    for name, tensor in form.tensors.items():
        for old, new in prefixes.items():
            name = name.replace(old, new, 1) if name.startswith(old) else name
        found[first + name] = tensor
    return found


def windows_outside(form: Form) -> dict[str, Any]:
    """A config of speculators with its windows at the top, where vLLM reads them, too."""
    config = form.in_speculators("dflash")
    names = ("layer_types", "sliding_window", "use_sliding_window")
    return config | {name: config["transformer_layer_config"].pop(name) for name in names}


ONE, TERM, FROM_ANCHOR = Form(layers=1), FORMS["DSpark"], FORMS["DSpark without a term"]
DOMINO = FORMS["Domino"]
VERIFIER = {"verifier_norm.weight": torch.ones(32), "verifier_lm_head.weight": torch.ones(64, 32)}
SIXTEEN = Form(block=16)
UNSAID = {key: value for key, value in SIXTEEN.config.items() if key != "block_size"}
TORCHSPEC = {"fc.": "context_proj.", "hidden_norm.": "context_norm.", "norm.": "final_norm."}
SHIFTED = FROM_ANCHOR.in_speculators("dflash", sample_from_anchor=None, shift_label=True)


@pytest.mark.parametrize(
    ("form", "config", "tensors"),
    [
        (Form(), Form().config, renamed(Form(), all="model.")),
        (ONE, ONE.config, renamed(ONE, **{"layers.0.": "midlayer."})),
        (TERM, TERM.config | {"architectures": ["DSparkDraftModel"]},
         renamed(TERM, markov_head="logit_head.markov_head",
                 confidence_head="logit_head.confidence_head")),
        (TERM, {k: v for k, v in TERM.config.items() if k not in ("block_size", "dflash_config")}
         | {"dspark_config": TERM.config["dflash_config"] | {"block_size": TERM.block}},
         TERM.tensors),
        (DOMINO, DOMINO.config | {"architectures": ["DominoDraftModel"]},
         renamed(DOMINO, prefix_gru="logit_head.prefix_gru", embed_proj="logit_head.embed_proj")),
        (Form(), Form().config, Form().tensors | VERIFIER),
        (FORMS["windows"], windows_outside(FORMS["windows"]), FORMS["windows"].tensors),
        (FORMS["windows"], FORMS["windows"].in_speculators("dflash", layer_types=None),
         FORMS["windows"].tensors),
        (FROM_ANCHOR, SHIFTED, FROM_ANCHOR.tensors),
        (SIXTEEN, UNSAID | {"model_type": "dflash"}, renamed(SIXTEEN, **TORCHSPEC)),
    ],
    ids=["prefixed", "midlayer", "SpecForge's first", "dspark_config", "Domino's", "verifier's",
         "windows outside", "nothing outside", "shifted", "TorchSpec's"],
)  # fmt: skip
def test_other_ways_to_write_it(form: Form, config: Any, tensors: Any, tmp_path: Path) -> None:
    features = torch.randn(7, 64, dtype=torch.float64)
    tokens = torch.randint(VOCAB, (30,)).tolist()
    expected = drafted(loaded(form, tmp_path / "usual"), features, tokens, 3)
    found: Any = load_drafter(write(tmp_path / "other", config, tensors), tiny("llama"))
    assert torch.equal(drafted(found.eval(), features, tokens, 3), expected)


def test_a_trimmed_vocabulary_without_an_output_layer_has_the_targets_rows(tmp_path: Path) -> None:
    """As SpecForge saves them."""
    ids, tensors = torch.tensor([1, 4, 9, 20, 61]), dict(TERM.tensors)
    tensors["d2t"], tensors["t2d"] = ids - torch.arange(5), torch.isin(torch.arange(VOCAB), ids)
    last = "markov_head.markov_w2.weight"
    place = write(tmp_path / "trimmed", TERM.config, tensors | {last: tensors[last][ids]})
    found: Any = load_drafter(place, tiny("llama"), dtype=torch.float64)
    features = torch.randn(7, 64, dtype=torch.float64)
    tokens = torch.randint(VOCAB, (16,)).tolist()
    expected = drafted(loaded(TERM, tmp_path / "whole"), features, tokens, 3)[:, ids]
    assert torch.equal(found.draft_vocabulary, ids)
    torch.testing.assert_close(drafted(found.eval(), features, tokens, 3), expected)


WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention"] * 2}  # which is not in use
SWA = {"mask_token_id": 3, "target_layer_ids": [0, 1], "use_swa": True, "swa_window_size": 4}
VALUES = {"mask_token_id": 3, "target_layer_ids": [0, 1], "attention_value_scale": 0.5}
OTHER = {"mask_token_id": 3, "target_layer_ids": [0, 1], "swa_window_size": 5}
NORMS = ("q_norm.weight", "k_norm.weight")
NORMLESS = {name: t for name, t in Form().tensors.items() if not name.endswith(NORMS)}


@pytest.mark.parametrize(
    ("config", "tensors", "said"),
    [
        (*changed(Form(), **WINDOW), "names sliding_attention without a window"),
        (*changed(Form(), dflash_config=SWA), "gives layers a window by use_swa"),
        (*changed(Form(), use_gemma_norm=True), "sets use_gemma_norm to True, which is not run"),
        (*changed(Form(), is_neox_style=False), "sets is_neox_style to False, which is not run"),
        (*changed(Form(), rope_is_neox_style=False), "expected True or no such setting"),
        (*changed(Form(), dflash_config=VALUES), "sets attention_value_scale to 0.5"),
        (*changed(Form(), dflash_config=OTHER), "sets swa_window_size to 5, which is not run"),
        (*changed(Form(window=4), dflash_config=OTHER), "expected 4 or no such setting"),
        (Form().config, NORMLESS, "have no norms of queries and keys"),
        (*changed(Form(), {"fc.weight": torch.ones(32, 96)}, dflash_config={"mask_token_id": 3}),
         "no target_layer_ids, and fc reads 96 entries, not those of 2 layers"),
        (*changed(Form(), dflash_config={"mask_token_id": 3, "target_layer_ids": [1]}),
         "target_layer_ids for 1 layers"),
        (*changed(Form(), dflash_config={"target_layer_ids": [0, 1]}), "mask_token_id None"),
        (*changed(Form(), block_size=5.5), "mask_token_id 61, block_size 5.5 and"),
        (*changed(Form(), dflash_config={"mask_token_id": 61, "target_layer_ids": [-2, 0]}),
         "names the layers [-2, 0] of the target; expected a list of whole numbers, at least -1"),
        (*changed(Form(), input_embedding_scale=float("nan")), "reads embeddings times nan"),
        (*changed(Form(), dflash_config={"mask_token_id": 99, "target_layer_ids": [0, 1]}),
         "mask_token_id is 99; expected 0 … 63"),
        (*changed(Form(), dflash_config={"mask_token_id": 9, "target_layer_ids": [0, 7]}),
         "it reads the input of layer 8 of its target"),
        (*changed(Form(), architectures=["DFlashLinearDraftModel"]), "calls it 'DFlashLinearDraft"),
        (*changed(Form(), architectures=["DominoDraftModel"]),
         "says that it is a Domino, and prefix_gru.weight_ih_l0 is missing"),
        (*changed(Form(rank=3), markov_head_type="gated"),
         "found markov_head.gate_proj.bias missing, expected [3]"),
        (*changed(Form(rank=3), markov_head_type="fir"), "says markov_head_type 'fir'"),
        (*changed(Form(), input_embedding_scale=5.0), "reads embeddings times 5"),
        (*changed(Form(), {"prefix_gru.bias_ih_l0": torch.ones(2)}), "a part that is not run"),
        (*changed(Form(), speculators_model_type="xpress"), "calls it 'xpress'"),
        (*changed(Form(), {"layers.1.self_attn.kv_a_proj_with_mqa.weight": torch.ones(9, 32)}),
         "its layers have multi-head latent attention (kv_a_proj_with_mqa), which is not run here"),
        (*changed(Form(), {"layers.0.self_attn.attention_sink_bias": torch.ones(4)}),
         "it has a part that is not run"),
    ],
)  # fmt: skip
def test_refused(config: Any, tensors: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as caught:
        load_drafter(write(tmp_path / "heads", config, tensors), tiny("llama"))
    assert said in one_line(caught.value)


def test_settings_without_effect_are_read(tmp_path: Path) -> None:
    form = Form(window=4)
    config: Any = form.config | {"use_gemma_norm": False, "is_neox_style": True}
    config["dflash_config"] |= {"attention_value_scale": 1.0, "swa_window_size": 4}
    found: Any = load_drafter(write(tmp_path / "heads", config, form.tensors), tiny("llama"))
    assert found.config.window == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"depths": 0}, "drafter.depths is 0; expected at least 1."),
        ({"markov_rank": -1}, "drafter.markov_rank is -1; expected at least 0."),
        ({"mask_token_id": VOCAB}, f"drafter.mask_token_id is {VOCAB}; expected 0 … {VOCAB - 1}."),
        ({"heads": 3}, "drafter.heads is not an option of 'dflash'"),
        ({"window": 8, "layers": 1}, "drafter.window is 8 with one layer"),
        ({"markov_rank": 2, "selector_rank": 3}, "expected one of these terms"),
        ({"domino_rank": 2, "markov_rank": 3}, "drafter.markov_rank is 3 and drafter.domino_rank"),
        ({"gru_hidden_dim": 64}, "drafter.gru_hidden_dim"),
        ({"conv_kernel_size": 2, "conv_group_size": 5}, "does not divide the hidden size 32"),
    ],
)
def test_options_are_checked(options: dict[str, Any], said: str) -> None:
    kind: Any = family("dflash").config_class
    with pytest.raises(OptionError, match=said):
        kind.for_target(tiny("llama"), **options)


@pytest.mark.parametrize(
    ("layers", "count", "outputs"),
    [(36, 5, [1, 9, 17, 25, 33]), (32, 1, [16]), (28, 3, [1, 13, 25]), (2, 2, [0, 1]),
     (6, 2, [1, 3])],
)  # fmt: skip
def test_layers_are_spread_as_published(layers: int, count: int, outputs: list[int]) -> None:
    config = transformers.LlamaConfig(num_hidden_layers=layers)

    class Target:
        pass

    target: Any = Target()
    target.config = config
    assert [layer - 1 for layer in spread_layers(target, count)] == outputs


def test_at_first_masks_attend_to_the_newest_token() -> None:
    """Of keys of the embeddings' mean, the nearest; the control has keys of another input."""
    target: Any = tiny("llama")
    kind: Any = family("dflash")
    drafter = kind(kind.config_class.for_target(target, layers=2)).double().bind(target)
    counts = torch.arange(VOCAB) + 1
    drafter.init_from_target(counts)
    layer = drafter.model.layers[1]
    embedding = target.get_input_embeddings().weight
    mean = (counts.double() / counts.sum()) @ embedding.double()
    mask = embedding[VOCAB - 1].double()

    def scores(read: Tensor) -> Tensor:
        """Of a mask's query with the keys of one input, 0 … 7 places before it, by head.  # [H]"""
        attention = layer.self_attn
        split = (-1, attention.head_dim)
        query = attention.q_norm(attention.q_proj(layer.input_layernorm(mask)).view(split))
        key = attention.k_norm(attention.k_proj(layer.input_layernorm(read)).view(split))
        keys = key[:, None].expand(-1, 8, -1)
        cos, sin = drafter.model.rotary_emb(keys, torch.arange(8)[None])
        turned = keys * cos + rotate_half(keys) * sin
        times = len(query) // len(key)
        return torch.einsum("hd,hsd->hs", query, turned.repeat_interleave(times, 0))

    with torch.no_grad():
        found, other = scores(mean), scores(torch.randn_like(mean))
        drafter.init_from_target(None)
    assert (found.argmax(1) == 0).all() and (found[:, 0] > found[:, 1:].amax(1)).all()
    assert not (other.argmax(1) == 0).all()
    drafter.config.mask_token_id = 3
    with torch.no_grad():
        kept = embedding[3].clone()
        try:
            embedding[3] = 0
            drafter.init_from_target(counts)
        finally:
            embedding[3] = kept
    assert all(parameter.isfinite().all() for parameter in drafter.parameters())


def test_a_step_drafts_from_some_positions() -> None:
    tokens = torch.randint(1, VOCAB, (3, 40))
    supervised = torch.rand(3, 40) < 0.8
    supervised[2, 9:] = False  # fewer than are asked for
    labels = head_labels(tokens, supervised, 3)
    counted = (labels != -100).any(0)
    found = some_starts(labels, tokens, supervised, 11, step=5)
    kept = (found != -100).any(0)
    assert kept.sum(1).tolist() == [11, 11, min(11, int(counted[2].sum()))]
    assert (found[:, kept] == labels[:, kept]).all() and not (kept & ~counted).any()
    # The same in another batch, padded further; others in another step; all where there are fewer.
    one, its = (torch.nn.functional.pad(each[1:2], (0, 30)) for each in (tokens, supervised))
    again = some_starts(head_labels(one, its, 3), one, its, 11, step=5)
    assert torch.equal(again[:, 0, :40], found[:, 1])
    assert not torch.equal(some_starts(labels, tokens, supervised, 11, step=6), found)
    assert torch.equal(some_starts(labels, tokens, supervised, 40, step=5), labels)


def test_blocks_begin_and_end_within_an_answer() -> None:
    """The label past the gap, and those of blocks that begin in the prompt, are no round's."""
    tokens = torch.tensor([[10, 11, 12, 13, 14, 15, 16, 17]])
    supervised = torch.tensor([[False, False, True, True, True, False, True, True]])
    none, at = -100, head_labels(tokens, supervised, 3)
    assert at[:, 0, 0].tolist() == [12, 13, 14] and at[:, 0, 2].tolist() == [14, none, 16]
    expected = [
        [none, 13, 14, none, none, 17, none, none],
        [none, 14, none, none, none, none, none, none],
        [none] * 8,
    ]
    assert unbroken(at, supervised)[:, 0].tolist() == expected
    target = tiny("llama")
    for name, found in (("dflash", expected), ("medusa", at[:, 0].tolist())):
        kind: Any = family(name)
        options = {"depths": 3} if name == "dflash" else {"heads": 3}
        drafter = kind(kind.config_class.for_target(target, **options)).bind(target)
        module = TargetWithDrafter(target, drafter, 1.0)
        assert module.labels(tokens, supervised)[:, 0].tolist() == found
        module.release()


def test_of_the_text_itself_a_block_reads_the_newest_token_alone(tmp_path: Path) -> None:
    drafter = loaded(Form(), tmp_path)
    features = torch.randn(9, 64, dtype=torch.float64)
    tokens = torch.randint(1, VOCAB, (15,)).tolist()
    one = drafted(drafter, features, tokens, 2)
    earlier, newest = [0] * 9 + tokens[9:], [*tokens[:9], 0, *tokens[10:]]
    assert torch.equal(drafted(drafter, features, earlier, 2), one)
    assert (drafted(drafter, features, newest, 2) - one).abs().max() > 1e-3
