"""MTP for targets with recurrent layers: the modules in their files, and new ones."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.heads import OptionError, load_drafter, save_drafter
from headstart.heads.artifacts.export import export_drafter
from headstart.heads.artifacts.manifest import Manifest, fingerprint
from headstart.heads.mtp import Mtp, MtpConfig
from headstart.heads.parts.own_layers import norm_scale
from headstart.infer import Speculator
from tests.support.families import LENGTHS
from tests.support.recurrent import RECURRENT
from tests.support.shipped_mtp import HYBRIDS, hybrid_with_module, ours, transformers_own
from tests.support.tiny import one_line, prompts

GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
REFUSED = {
    "olmo-hybrid": r"transformers makes no olmo_hybrid of the layers .2. alone",
    "falcon-h1": "falcon_h1 has no layer that attends without a recurrent part",
    "zamba2": "zamba2 has no layer that attends without a recurrent part",
}


def new(target: Any, **options: Any) -> Any:
    torch.manual_seed(5)
    made: Any = Mtp(MtpConfig.for_target(target, **options)).to(target.dtype).bind(target)
    made.init_from_target(torch.arange(target.config.vocab_size))
    return made.eval()


def check_decoding(target: Any, drafter: Any) -> None:
    """Greedy text is that of `generate`, drafted in a tree and in a chain."""
    ids, mask = prompts(LENGTHS)
    written = target.generate(ids, attention_mask=mask, **GREEDY)
    for tree in ("best-first:8,3,3", "chain:3"):
        speculator = Speculator(target, drafter, tree=tree)
        assert torch.equal(speculator.generate(ids, attention_mask=mask, **GREEDY), written)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_shipped_module_drafts_what_it_does_in_transformers(kind: str, tmp_path: Path) -> None:
    """`use_mtp` of transformers has no such targets, but its class for the module reads it."""
    target = hybrid_with_module(kind, tmp_path)
    drafter = load_drafter("mtp", target)
    check_decoding(target, drafter)
    target.config.num_mtp_layers, target.config.mtp_layer_types = 1, ["full_attention"]
    ids, _ = prompts([12])
    try:
        expected = transformers_own(target, ids)
    except RuntimeError as error:
        assert "weights are missing" in str(error)
        pytest.skip("this transformers does not know the names of its tensors")
    found = ours(target, drafter, ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max())


def test_training_starts_from_the_shipped_module(tmp_path: Path) -> None:
    target = hybrid_with_module("qwen3-next", tmp_path / "target")
    drafter, shipped = (
        new(target, output="trimmed", draft_vocab_size=9),
        load_drafter("mtp", target),
    )
    for name, tensor in shipped.state_dict().items():
        assert torch.equal(drafter.state_dict()[name], tensor)


@pytest.mark.parametrize("declared", [False, True])
def test_experts_in_one_tensor_are_read_too(declared: bool, tmp_path: Path) -> None:
    """Also where its config counts layers of multi-token prediction, and does not say which."""
    apart = hybrid_with_module("qwen3.5 experts", tmp_path / "apart")
    fused = hybrid_with_module("qwen3.5 experts", tmp_path / "fused", fused=True)
    if declared:
        fused.config.num_mtp_layers = 1
    one, other = (load_drafter("mtp", target).state_dict() for target in (apart, fused))
    assert "model.layers.0.mlp.experts.gate_up_proj" in one
    for name, tensor in one.items():
        assert torch.equal(other[name], tensor)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_speculators_store_norms_as_the_layer_does(kind: str, tmp_path: Path) -> None:
    target = hybrid_with_module(kind, tmp_path / "target")
    drafter = load_drafter("mtp", target)
    export_drafter(drafter, "speculators", tmp_path / "out")
    written, known = load_file(tmp_path / "out/model.safetensors"), drafter.state_dict()
    found = written["mtp_layers.0.token_layernorm.weight"]
    torch.testing.assert_close(found + 1, known["enorm.weight"])
    again = load_drafter(tmp_path / "out", target).state_dict()
    for name, tensor in known.items():
        torch.testing.assert_close(again[name], tensor)
    check_decoding(target, load_drafter(tmp_path / "out", target))


def test_of_several_files_those_that_hold_it_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = hybrid_with_module(
        "qwen3.5", tmp_path, changes={"layers.1.norm.weight": torch.ones(32)}
    )
    with caplog.at_level(logging.WARNING):
        whole = load_drafter("mtp", target).state_dict()
    assert "2 layers for multi-token prediction" in caplog.text
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    places = {n: f"{'b' if 'mtp.fc' in n else 'a' if 'mtp' in n else 'text'}" for n in tensors}
    for place in set(places.values()) - {"text"}:  # the others are not opened
        part = {name: tensors[name] for name, held in places.items() if held == place}
        save_file(part, tmp_path / f"{place}.safetensors")
    index = {"weight_map": {name: f"{place}.safetensors" for name, place in places.items()}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, tensor in load_drafter("mtp", target).state_dict().items():
        assert torch.equal(whole[name], tensor)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(OptionError, match=r"can be read \(.*b.safetensors is missing\)") as caught:
        load_drafter("mtp", target)
    one_line(caught.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"norm.weight": None}, "mtp.norm.weight is missing, unknown or"),
        ({"pre_fc_norm_hidden.weight": None}, "mtp.pre_fc_norm_hidden.weight is missing"),
        ({"fc.weight": None}, "hold mtp.layers.0.input_layernorm.weight, of a kind that is not"),
        ({"embed_tokens.weight": torch.ones(64, 32)}, "it embeds tokens by itself"),
        (
            {"layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1)},
            "weight_scale_inv is missing, unk",
        ),
        (
            {"layers.0.mlp.up_proj.weight": torch.ones(2, 2)},
            "up_proj.weight is missing, unknown or of another shape",
        ),
    ],
)
def test_why_a_module_cannot_be_read_is_said(
    changes: dict[str, Tensor | None],
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = hybrid_with_module("qwen3.5", tmp_path, changes=changes)
    match = rf"holds no module .* can be read \(.*{reason}.*\); train one \(drafter.family=mtp"
    with pytest.raises(OptionError, match=match) as caught:
        load_drafter("mtp", target)
    one_line(caught.value)
    with caplog.at_level(logging.WARNING, "headstart.heads.mtp"):
        new(target)
    assert "Training starts with a new one." in caplog.text


def test_a_target_without_a_module_is_not_suspected_of_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    RECURRENT["qwen3.5"]().save_pretrained(tmp_path)
    target = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(OptionError, match=r"can be read; train one"):
        load_drafter("mtp", target)
    with caplog.at_level(logging.WARNING, "headstart.heads.mtp"):
        new(target)
    assert not caplog.text


def test_the_module_of_a_model_that_sees_images(tmp_path: Path) -> None:
    """Its language model is what is loaded by its name, and the module is that one's."""
    language_model = hybrid_with_module("qwen3.5", tmp_path)
    expected = load_drafter("mtp", language_model).state_dict()
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
        "out_hidden_size": 32, "num_position_embeddings": 16, "patch_size": 4,
    }  # fmt: skip
    tf.Qwen3_5Config(
        text_config=language_model.config.to_dict(), vision_config=vision,
        architectures=["Qwen3_5ForConditionalGeneration"],
    ).save_pretrained(tmp_path)  # fmt: skip
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {n.replace("model.", "model.language_model.", 1): t for n, t in tensors.items()}
    tensors["model.visual.merger.norm.weight"] = torch.ones(16)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    target: Any = tf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    drafter = load_drafter("mtp", target)
    for name, tensor in expected.items():
        assert torch.equal(drafter.state_dict()[name], tensor)
    check_decoding(target, drafter)


@pytest.mark.parametrize("kind", [kind for kind in RECURRENT if kind not in REFUSED])
def test_a_new_module_attends_and_starts_as_the_feature_itself(kind: str, tmp_path: Path) -> None:
    """But for the token, of which it adds a little; then it learns, and drafts as it was saved."""
    torch.manual_seed(1)
    target = RECURRENT[kind]().eval()
    drafter = new(target, depths=2)
    (layer,) = drafter.model.layers
    names = {name.rpartition(".")[2] for name, _ in layer.named_modules()}
    assert {"self_attn", "mixer"} & names and {"o_proj", "out_proj"} & names
    assert not {"conv", "conv1d", "mamba", "linear_attn", "A_log"} & names
    assert norm_scale(target) is not None
    ids, _ = prompts([12])
    features, where = target.get_decoder()(ids)[0], torch.ones_like(ids).bool()
    weight = drafter.eh_proj.weight
    of_token = weight[:, :32].clone()
    with torch.no_grad():
        weight[:, :32] = 0
        states = drafter.draft_hidden_states(features, ids, where, 2)
        torch.testing.assert_close(states[0], features.flatten(0, 1), rtol=1e-4, atol=1e-4)
        weight[:, :32] = of_token
    loss = drafter.draft_hidden_states(features.detach(), ids, where, 2).square().mean()
    loss.backward()
    torch.optim.SGD(drafter.parameters(), lr=0.1).step()
    save_drafter(drafter, tmp_path, Manifest("mtp", "it", fingerprint(target)))
    again = load_drafter(tmp_path, target)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    check_decoding(target, again)


@pytest.mark.parametrize("kind", REFUSED)
def test_targets_without_a_layer_that_attends_alone_are_refused(kind: str) -> None:
    with pytest.raises(OptionError, match=rf"{REFUSED[kind]}.*eagle3") as caught:
        new(RECURRENT[kind]())
    one_line(caught.value)
