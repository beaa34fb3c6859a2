"""PARD: its drafts against a plain model's on mask tokens, training in one pass, and its files."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from headstart.heads import (
    FINAL,
    ArtifactError,
    Manifest,
    OptionError,
    fingerprint,
    load_drafter,
    save_drafter,
)
from headstart.heads.artifacts.export import export_drafter
from headstart.heads.artifacts.source import DrafterSource
from headstart.heads.core import capture
from headstart.heads.draft_model import DraftModel
from headstart.heads.pard import Pard, PardConfig
from headstart.infer import Speculator
from headstart.reports.description import describe
from headstart.reports.foreign import describe_foreign
from headstart.train.losses.draft_loss import IGNORED, head_labels, thinned_depths
from tests.support.tiny import VOCAB, letters, one_line, prompts, tiny

K = 4
FEATURES = {"feature_layers": [FINAL, 1], "feature_scale": 0.5}


def student(name: str) -> Any:
    """Another random model of a family; `eager llama` attends eagerly."""
    how, _, name = name.rpartition(" ")
    model = copy.deepcopy(tiny(name, 2))
    if how:
        model.set_attn_implementation(how)
    return model


def drafter(name: str = "llama", **options: Any) -> Pard:
    """A drafter of the tiny target around another random model, with a random projection."""
    layers, model = options.get("feature_layers", ()), student(name)
    made = Pard.of(
        model, depths=K, mask_token_id=VOCAB - 1, feature_layers=layers,
        feature_scale=options.get("feature_scale", 0.02),
    ).eval()  # fmt: skip
    if layers:
        torch.nn.init.normal_(made.model.target_proj.weight, std=0.3)
        made.model.target_proj.double()
    return made.bind(tiny("llama"))


def text(rows: int = 2, length: int = 16) -> Tensor:
    return torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(6))


def plain(made: Pard, tokens: Tensor, features: Tensor) -> Tensor:
    """The definition: the model on the text and its masks alone, one row.  # [K, V]

    Args:
        tokens: [1, T], the newest token last; features: [1, T - 1, F], of the tokens before it.
    """
    masks = tokens.new_full((1, K - 1), VOCAB - 1)
    read = torch.cat([tokens, masks], 1)
    embedded = made.model.get_input_embeddings()(read)
    if made.config.feature_layers:
        before = torch.cat([torch.zeros_like(features[:, :1]), features], 1)  # [1, T, F]
        before = torch.cat([before, before[:, -1:].expand(-1, K - 1, -1)], 1)
        scale, weight = made.config.feature_scale, made.model.target_proj.weight
        embedded = embedded + scale * before @ weight.T
    return made.model(inputs_embeds=embedded).logits[0, -K:]


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, FEATURES], ids=["tokens", "features"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2", "eager llama"])
def test_training_is_the_plain_model_on_masks(name: str, options: dict[str, Any]) -> None:
    """Also where layers have windows, where attention is eager, and where positions are learned."""
    made, tokens = drafter(name, **options), text()
    features = capture(tiny("llama"), list(made.config.feature_layers), tokens)
    where = torch.ones_like(tokens, dtype=torch.bool)
    states = made.draft_hidden_states(features, tokens, where, K)
    found = made.draft_logits(1)(states).unflatten(1, tokens.shape)  # [K, B, T, V]
    for row in range(2):
        for at in range(3, 16 - K):  # the last position with a feature; its next token is newest
            part = slice(row, row + 1), slice(0, at + 2)
            expected = plain(made, tokens[part], features[row : row + 1, : at + 1])
            close = 1e-4 if name.startswith("eager") else 1e-9  # its softmax is in float32
            torch.testing.assert_close(found[:, row, at], expected, rtol=close, atol=close)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, FEATURES], ids=["tokens", "features"])
def test_packed_documents_are_read_alone(options: dict[str, Any]) -> None:
    made, tokens = drafter(**options), text(rows=1, length=20)
    layers, cut = list(made.config.feature_layers), 9
    alone = [tokens[:, :cut], tokens[:, cut:]]
    features = torch.cat([capture(tiny("llama"), layers, each) for each in alone], 1)
    positions = torch.cat([torch.arange(cut), torch.arange(20 - cut)]).unsqueeze(0)
    where = torch.ones_like(tokens, dtype=torch.bool)
    packed = made.draft_hidden_states(features, tokens, where, K, positions)
    for first, part in ((0, alone[0]), (cut, alone[1])):
        length = part.shape[1]
        own = features[:, first : first + length]
        expected = made.draft_hidden_states(own, part, where[:, :length], K)
        known = slice(first, first + length - K)
        torch.testing.assert_close(packed[:, known], expected[:, : length - K])
    without = made.draft_hidden_states(features, tokens, where, K)
    assert (without - packed)[:, cut : 20 - K].abs().max() > 1e-3, "the control"


@torch.no_grad()
def test_what_is_not_asked_for_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    made, tokens = drafter(), text()
    where = torch.rand(2, 16) < 0.6
    count = int(where.sum())
    deepest = torch.randint(1, K + 1, (count,))
    wanted = torch.arange(1, K + 1).unsqueeze(1) <= deepest
    wanted[0] = torch.rand(count) < 0.5  # a label may be missing above
    widths: list[int] = []
    run = type(made.model.model).forward
    monkeypatch.setattr(
        type(made.model.model), "forward",
        lambda self, *given, **how: (
            widths.append(how["position_ids"].shape[1]), run(self, *given, **how)
        )[1],
    )  # fmt: skip
    none = torch.empty(2, 16, 0)
    whole = made.draft_hidden_states(none, tokens, where, K)
    part = made.draft_hidden_states(none, tokens, where, K, wanted=wanted)
    inside = (torch.arange(16) < 16 - K).expand(2, -1)[where]
    chosen = wanted & inside
    torch.testing.assert_close(part[chosen], whole[chosen], rtol=1e-10, atol=1e-10)
    masks = torch.zeros(2, 16, dtype=torch.long)
    masks[where] = (wanted * torch.arange(K).unsqueeze(1)).amax(0)
    assert widths == [16 + (K - 1) * int(where.sum(1).max()), 16 + int(masks.sum(1).max())]


def test_each_depth_is_asked_of_a_share_of_the_positions() -> None:
    config: Any = PardConfig(hidden_size=32, vocab_size=VOCAB, depths=6, kept=0.7, least_kept=0.3)
    made = Pard(config_with_student(config))
    assert made.depth_shares == pytest.approx([1.0, 0.7, 0.49, 0.343, 0.3, 0.3])
    assert made.passes(1000) == pytest.approx(3.133)
    tokens = torch.randint(VOCAB, (4, 3000), generator=torch.Generator().manual_seed(1))
    supervised = torch.ones_like(tokens, dtype=torch.bool)
    labels = head_labels(tokens, supervised, 6)
    found = thinned_depths(labels, tokens, supervised, made.depth_shares, step=5)
    kept = (found != IGNORED)[..., :-7]
    assert kept.double().mean((1, 2)).tolist() == pytest.approx(made.depth_shares, abs=0.02)
    assert not (kept[1:] & ~kept[:-1]).any(), "a depth without the one before it"
    one = tokens[2:3]
    alone = thinned_depths(
        head_labels(one, supervised[2:3], 6), one, supervised[2:3], made.depth_shares, step=5
    )
    assert torch.equal(alone[:, 0], found[:, 2])
    other = thinned_depths(labels, tokens, supervised, made.depth_shares, step=6)
    assert not torch.equal(other, found)


def config_with_student(config: Any) -> Any:
    config.student = tiny("llama").config.to_dict()
    config.mask_token_id = VOCAB - 1
    return config


@torch.no_grad()
def test_features_are_dropped_for_some_rows_in_training_alone() -> None:
    made, tokens = drafter(**FEATURES), text(rows=40)
    features = capture(tiny("llama"), [FINAL, 1], tokens)
    where = torch.ones_like(tokens, dtype=torch.bool)
    made.config.feature_dropout = 0.5
    with_them = made.draft_hidden_states(features, tokens, where, K)
    without = made.draft_hidden_states(torch.zeros_like(features), tokens, where, K)
    found = made.train().draft_hidden_states(features, tokens, where, K)
    made.eval()
    each = found.unflatten(1, (40, 16))
    rows = [(each - all_.unflatten(1, (40, 16))).abs().amax((0, 2, 3)) < 1e-12
            for all_ in (with_them, without)]  # fmt: skip
    assert (rows[0] ^ rows[1]).all() and 10 < rows[0].sum() < 30


@pytest.mark.parametrize("options", [{}, FEATURES], ids=["tokens", "features"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_the_text_is_that_of_generate(name: str, options: dict[str, Any]) -> None:
    target, made = tiny("llama"), drafter(name, **options)
    ids, mask = prompts([13, 7, 10, 3])
    given = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    expected = target.generate(ids, **given)
    for tree in (f"chain:{K}", "best-first:9,3,3", [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]):
        assert torch.equal(Speculator(target, made, tree=tree).generate(ids, **given), expected)


def test_a_drafter_that_knows_the_text_drafts_all_of_it() -> None:
    """The target itself, were its masks true tokens: only depth 1 of such a model is right."""
    target = tiny("llama")
    made = Pard.of(target, depths=1, mask_token_id=VOCAB - 1).eval().bind(target)
    speculator = Speculator(target, made, tree="chain:1")
    speculator.generate(prompts([9])[0], max_new_tokens=40, do_sample=False, pad_token_id=0)
    assert speculator.stats.tau == pytest.approx(2, abs=0.06)


# Its files.


@pytest.mark.parametrize("options", [{}, FEATURES], ids=["tokens", "features"])
def test_an_artifact_is_a_language_model_that_says_how_it_drafts(
    options: dict[str, Any], tmp_path: Path
) -> None:
    made, target = drafter(**options), tiny("llama")
    manifest = Manifest("pard", "tiny-llama", fingerprint(target))
    save_drafter(made, tmp_path / "heads", manifest)
    config = json.loads((tmp_path / "heads/config.json").read_text())
    assert (config["model_type"], config["pard_token"], config["para_num"]) == ("llama", 63, K)
    again = load_drafter(tmp_path / "heads", target)
    assert type(again) is Pard and again.config.depths == K
    assert again.config.feature_layers == list(options.get("feature_layers", ()))
    for key, tensor in made.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[key], tensor)
    plainly: Any = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "heads", dtype=torch.float64)
    tokens = text()
    with torch.no_grad():
        torch.testing.assert_close(plainly(tokens).logits, tiny("llama", 2)(tokens).logits)


def published(folder: Path, **written: Any) -> Path:
    """A folder as PARD's authors publish it."""
    tiny("llama", 2).save_pretrained(folder)
    letters().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"spd_type": "pard"} | written))
    return folder


def test_what_its_authors_publish_is_known_by_its_config(tmp_path: Path) -> None:
    folder = published(tmp_path / "pard", pard_token=50)
    made = load_drafter(folder, tiny("llama"), letters())
    assert type(made) is Pard and (made.config.mask_token_id, made.config.depths) == (50, 12)
    plainly = load_drafter(published(tmp_path / "plain"), tiny("llama"), letters())
    assert type(plainly) is DraftModel
    folder = published(tmp_path / "wrong", pard_token=VOCAB)
    with pytest.raises(ArtifactError, match=r"mask_token_id is 64; expected 0 … 63") as caught:
        load_drafter(folder, tiny("llama"), letters())
    one_line(caught.value)


def test_a_projection_that_is_pickled_is_read_where_that_is_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = published(
        tmp_path / "pard2", pard_token=50, spd_type="pard2", pard2=True, pard2_scale=0.5,
        pard2_target_dim=64, pard2_target_layers=[-1, -2],
    )  # fmt: skip
    weight = torch.randn(32, 64, dtype=torch.float64)
    torch.save({"target_proj.weight": weight}, folder / "warp_model.bin")
    target = tiny("llama")
    without = load_drafter(folder, target, letters())
    assert not without.config.feature_layers and "allow_pickle" in caplog.text
    made: Any = load_drafter(folder, target, letters(), allow_pickle=True)
    last = target.config.num_hidden_layers
    assert made.config.feature_layers == [FINAL, last - 1] and made.config.feature_scale == 0.5
    assert torch.equal(made.model.target_proj.weight, weight)
    unsaid: Any = PardConfig.from_dict({"pard_token": 50, "pard2_target_layers": [-1]})
    assert unsaid.feature_scale == 0.02
    bias = {"target_proj.weight": weight, "target_proj.bias": torch.ones(32)}
    torch.save(bias, folder / "warp_model.bin")
    with pytest.raises(ArtifactError, match=r"has target_proj\.bias in warp_model\.bin") as caught:
        load_drafter(folder, target, letters(), allow_pickle=True)
    one_line(caught.value)
    with pytest.raises(ArtifactError, match=r"reads features of its target, which vllm") as caught:
        export_drafter(made, "vllm", tmp_path / "out", letters())
    one_line(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depths": 0}, "depths is 0; expected at least 1"),
        ({"kept": 1.5}, "kept is 1.5; expected 0 … 1"),
        ({"mask_token_id": VOCAB}, "mask_token_id is 64; expected 0 … 63"),
        ({"lora": {"rank": 2}, "feature_layers": [FINAL]}, "both set"),
        ({"feature_dropout": 1.0, "feature_layers": [FINAL]}, "1 excluded"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        PardConfig.for_target(tiny("llama"), layers=1, **options)
    one_line(caught.value)


def test_inspect_shows_how_it_drafts(tmp_path: Path) -> None:
    made = drafter(**FEATURES)
    save_drafter(made, tmp_path / "own", Manifest("pard", "tiny", fingerprint(tiny("llama"))))
    found = describe(DrafterSource(tmp_path / "own"))
    assert found["problem"] is None and not found["ignored"]
    assert found["options"]["depths"] == K and found["options"]["mask_token_id"] == VOCAB - 1
    assert found["feature_layers"] == [FINAL, 1] and found["options"]["feature_scale"] == 0.5
    theirs = describe_foreign(DrafterSource(published(tmp_path / "theirs", pard_token=50)))
    assert (theirs["family"], theirs["options"]["pard_token"]) == ("pard", 50)
