"""Published variants of EAGLE-3: their equations while decoding and training, and their exports."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from headstart.heads import ArtifactError, OptionError, family, load_drafter
from headstart.heads.artifacts.export import export_drafter, largest_difference
from headstart.infer import Speculator
from tests.support.drafters import deep
from tests.support.published_eagle import KEPT, SAID, published, random
from tests.support.published_eagle3 import TARGET, VARIANTS
from tests.support.tiny import VOCAB, one_line, prompts, tiny

EXPORTS = {
    "narrow": {"vllm", "sglang", "original"},
    "EAGLE-3.1": {"vllm", "speculators"},
    "fc_norm": {"vllm", "speculators"},
    "window": {"vllm", "speculators"},
    "two layers": {"vllm", "speculators"},
    "a share of each head": {"vllm"},
    "a share, with norms": {"vllm"},
    "q and k norms": {"vllm", "speculators"},
    "of all": {"vllm", "speculators"},
    "P-EAGLE": {"vllm", "speculators"},
    "P-EAGLE of two layers": {"vllm", "speculators"},
}


def loaded(
    name: str, folder: Path, target: Any = None, **said: Any
) -> tuple[Any, dict[str, Tensor]]:
    variant, tensors = VARIANTS[name], VARIANTS[name].tensors()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(variant.config | said))
    save_file(tensors, folder / "model.safetensors")
    return load_drafter(folder, tiny("llama") if target is None else target), tensors


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_it_follows_the_published_equations_along_every_path(name: str, tmp_path: Path) -> None:
    drafter, tensors = loaded(name, tmp_path / name)
    variant = VARIANTS[name]
    assert drafter.dtype == torch.float64 and drafter.draft_vocabulary.equal(KEPT)
    texts, features = torch.randint(VOCAB, (2, 14)), random(2, 14, 3 * TARGET)
    state = drafter.start(2, 40)
    drafter.prefill(state, features[:, :4], texts[:, :4], torch.tensor([4, 1]))
    done = torch.tensor([3, 0])
    for count in (torch.tensor([1, 1]), torch.tensor([2, 3]), torch.tensor([1, 2])):
        row = torch.arange(2).unsqueeze(1)
        places = done.unsqueeze(1) + torch.arange(4)
        drafter.reserve(state, int((done + count).max()), 4 + 6)
        step = drafter.begin(state, features[row, places], texts[row, places + 1], count)
        done = done + count
        levels = [torch.randint(VOCAB, (2, wide)) for wide in (2, 3, 1)]
        parents, steps = [[-1, -1], [1, 1, 0], [3]], [step]
        if not drafter.independent:
            for level, parent in zip(levels, parents, strict=True):
                steps.append(drafter.extend(state, level, torch.tensor([parent] * 2)))
        for row in range(2):
            end = int(done[row])
            text, own = texts[row, 1 : end + 1].tolist(), features[row, :end]
            if drafter.independent:
                assert step.logits.shape[1] == drafter.max_depth == 4
                for depth in range(4):
                    expected = variant.logits(tensors, own, text + [0] * depth)
                    torch.testing.assert_close(
                        step.logits[row, depth], expected, rtol=1e-5, atol=1e-5
                    )
                continue
            a, b, c, d, e, f = torch.cat([level[row] for level in levels]).tolist()
            paths = [[[]], [[a], [b]], [[b, c], [b, d], [a, e]], [[b, d, f]]]
            for found, nodes in zip(steps, paths, strict=True):
                for node, path in enumerate(nodes):
                    expected = variant.logits(tensors, own, text + path)
                    torch.testing.assert_close(
                        found.logits[row, node], expected, rtol=1e-5, atol=1e-5
                    )


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_training_sees_the_same(name: str, tmp_path: Path) -> None:
    """Two documents in a row; with activations computed again, the states are the same."""
    drafter, tensors = loaded(name, tmp_path / name)
    tokens, features = torch.randint(VOCAB, (1, 22)), random(1, 22, 3 * TARGET)
    positions = torch.cat([torch.arange(9), torch.arange(13)]).unsqueeze(0)
    where = torch.zeros(1, 22, dtype=torch.bool)
    where[0, [0, 4, 12, 17]] = True
    found = drafter.draft_hidden_states(features, tokens, where, 4, positions=positions)
    drafter.checkpoint_activations()
    again = drafter.draft_hidden_states(features, tokens, where, 4, positions=positions)
    torch.testing.assert_close(found, again, rtol=1e-12, atol=1e-12)
    for depth in range(1, 5):
        logits = drafter.draft_logits(depth)(found[depth - 1])
        torch.testing.assert_close(drafter.draft_output(depth)(found[depth - 1]), logits)
        for row, at in enumerate((0, 4, 12, 17)):
            start = 0 if at < 9 else 9
            text = tokens[0, start + 1 : at + depth + 1].tolist()
            expected = VARIANTS[name].logits(tensors, features[0, start : at + 1], text)
            torch.testing.assert_close(logits[row], expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["P-EAGLE", "P-EAGLE of two layers"])
def test_what_is_not_asked_for_is_not_computed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, _ = loaded(name, tmp_path / name)
    tokens, features = torch.randint(VOCAB, (2, 16)), random(2, 16, 3 * TARGET)
    where = torch.rand(2, 16) < 0.6
    wanted = torch.arange(1, 5).unsqueeze(1) <= torch.randint(1, 5, (int(where.sum()),))  # [K, M]
    widths: list[int] = []
    run = drafter.model.forward

    def counted(**how: Any) -> Any:
        widths.append(how["inputs_embeds"].shape[1])
        return run(**how)

    monkeypatch.setattr(drafter.model, "forward", counted)
    whole = drafter.draft_hidden_states(features, tokens, where, 4)
    part = drafter.draft_hidden_states(features, tokens, where, 4, wanted=wanted)
    chosen = wanted & (torch.arange(16) < 12).expand(2, -1)[where]
    torch.testing.assert_close(part[chosen], whole[chosen], rtol=1e-10, atol=1e-10)
    masks = torch.zeros(2, 16, dtype=torch.long)
    masks[where] = wanted.sum(0) - 1
    assert widths == [16 + 3 * int(where.sum(1).max()), 16 + int(masks.sum(1).max())]


def test_each_depth_is_asked_of_a_share_of_the_positions() -> None:
    kind: Any = family("eagle3")

    def made(**options: Any) -> Any:
        return kind(kind.config_class.for_target(tiny("llama"), depths=4, **options))

    at_once, one_by_one = made(mask_token_id=3), made()
    assert at_once.depth_shares == pytest.approx([1.0, 0.7, 0.49, 0.343])
    assert at_once.passes(1000) == pytest.approx(2.533)
    assert one_by_one.depth_shares is None and one_by_one.passes(1000) == 4
    with pytest.raises(OptionError, match=r"drafter\.kept"):
        made(kept=0.5)


@pytest.mark.parametrize("name", VARIANTS)
def test_decoding_is_exact(name: str, tmp_path: Path) -> None:
    drafter, _ = loaded(name, tmp_path / name)
    ids, _ = prompts([7])
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    text = Speculator(tiny("llama"), drafter).generate(ids, **options)
    assert torch.equal(text, Speculator(tiny("llama")).generate(ids, **options))


@pytest.mark.parametrize("form", ["vllm", "sglang", "tensorrt-llm", "llama.cpp", "speculators"])
def test_a_head_that_reads_the_final_state_goes_out(form: str, tmp_path: Path) -> None:
    """To engines that hand it over as it is; one whose `fc` changes it goes nowhere."""
    tensors = published(3, "midlayer.")
    del tensors["fc.weight"], tensors["embed_tokens.weight"]
    config = SAID | {"eagle_config": {"use_aux_hidden_state": False}}
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "head" / "model.safetensors")
    drafter: Any = load_drafter(tmp_path / "head", tiny("llama"))
    if form not in ("vllm", "sglang"):
        with pytest.raises(ArtifactError, match="it reads what the target's last norm returns"):
            export_drafter(drafter, form, tmp_path / "out")
        return
    export_drafter(drafter, form, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eagle_config"] == {"use_aux_hidden_state": False}
    assert "eagle_aux_hidden_state_layer_ids" not in config
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.keys() == sorted(tensors)
        assert all(file.get_tensor(name).equal(tensors[name]) for name in tensors)
    drafter.fc.weight.data[0, 1] = 0.5
    with pytest.raises(ArtifactError) as caught:
        export_drafter(drafter, form, tmp_path / "other")
    assert "without fc and norms before it" in one_line(caught.value)


def test_other_names_of_norms_mean_the_same(tmp_path: Path) -> None:
    """SGLang's first ones of `fc_norm`, and ModelOpt's of `norm_output`, which stands apart."""
    one, tensors = loaded("fc_norm", tmp_path / "one")
    config = dict(VARIANTS["fc_norm"].config)
    del config["fc_norm"], config["norm_output"]
    config |= {"use_aux_norm": True, "eagle_config": {"return_hidden_post_norm": True}}
    names = {f"fc_norm.{i}.": f"aux_norm_{name}." for i, name in enumerate(("low", "mid", "high"))}
    for old, new in names.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "other" / "model.safetensors")
    other: Any = load_drafter(tmp_path / "other", tiny("llama"))
    assert other.config.fc_norm and other.config.norm_output
    assert largest_difference(one, other) <= 1e-12


def test_other_names_of_layers_mean_the_same() -> None:
    """ModelOpt numbers several layers so."""
    variant, cls = VARIANTS["two layers"], family("eagle3")
    tensors = variant.tensors()
    theirs = {name.replace("layers.", "midlayer.", 1): t for name, t in tensors.items()}
    first, second = (cls.from_checkpoint(variant.config, each) for each in (tensors, theirs))
    assert first is not None and second is not None
    assert first[0] == second[0] and first[1].keys() == second[1].keys()


@pytest.mark.parametrize("name", VARIANTS)
def test_it_goes_out_to_what_can_run_it(name: str, tmp_path: Path) -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}
    drafter, _ = loaded(name, tmp_path / name, deep(), **ids)
    for form in ("vllm", "sglang", "speculators", "original"):
        if form not in EXPORTS[name]:
            with pytest.raises(ArtifactError) as caught:
                export_drafter(drafter, form, tmp_path / form)
            assert "cannot run this drafter" in one_line(caught.value)
            continue
        line = export_drafter(drafter, form, tmp_path / form)
        config = json.loads((tmp_path / form / "config.json").read_text())
        if form == "speculators" and drafter.independent:  # of these vLLM reads the layers' alone
            normed = config["transformer_layer_config"].get("fc_norm", False)
            assert normed == drafter.config.fc_norm
        if name == "narrow":
            assert config["target_hidden_size"] == TARGET
        assert drafter.independent == ("parallel_drafting" in (line or "")) or form != "vllm"
        again = load_drafter(tmp_path / form, deep())
        assert largest_difference(drafter, again, seed=5) <= 1e-12
        limits = {"max_position_embeddings": 256}  # the target's, which engines ask for
        expected = drafter.config.to_dict()
        assert again.config.to_dict() == expected | {"layer": expected["layer"] | limits}
