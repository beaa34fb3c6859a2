"""Heads that start from another head of their family."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.heads import FAMILIES, Manifest, OptionError, TrainableDrafter, family, save_drafter
from headstart.heads.artifacts.manifest import fingerprint
from headstart.train.fit.warm_start import start_from
from headstart.train.recipe import parse_recipe
from tests.support.tiny import VOCAB, one_line, tiny


def head(name: str, target: str = "llama", **options: Any) -> TrainableDrafter:
    return head_of(name, tiny(target), **options)


def head_of(name: str, model: Any, **options: Any) -> TrainableDrafter:
    kind = family(name)
    config: Any = kind.config_class
    made = kind(config.for_target(model, **{**FAMILIES[name].small, **options})).double()
    made.bind(model)
    assert isinstance(made, TrainableDrafter)
    made.init_from_target(torch.arange(VOCAB))
    return made


def saved(made: TrainableDrafter, folder: Path) -> str:
    manifest = Manifest(made.config.family_name(), "tiny", fingerprint(made.target))
    return str(save_drafter(made, folder / "head", manifest, "# card\n"))


@torch.no_grad()
def moved(made: TrainableDrafter) -> TrainableDrafter:
    for parameter in made.parameters():
        parameter.add_(torch.randn_like(parameter))
    return made


TRAINED = [
    "medusa", "hydra", "redrafter", "mlp_speculator", "eagle", "eagle3", "dflash", "mtp",
    "draft_model",
]  # fmt: skip


@pytest.mark.parametrize("name", TRAINED)
def test_the_first_weights_are_the_other_heads(name: str, tmp_path: Path) -> None:
    """Also those of a head that was trained for another target."""
    before = moved(head(name))
    if name == "hydra":
        before.config.embedding_scale = 3.5
    place, made = saved(before, tmp_path), head(name)
    assert start_from(place, made) == place
    for key, tensor in before.state_dict().items():
        assert torch.equal(made.state_dict()[key], tensor), key
    if name == "hydra":
        assert made.config.embedding_scale == 3.5
    if name not in ("mtp", "draft_model"):  # whose layers are of the target's kind
        start_from(place, head(name, "qwen3"))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [("medusa", {"heads": 3}, r"at bias, expected \(1, 3, 32\)"),
     ("hydra", {}, "is a medusa head, expected a hydra"),
     ("medusa", {"heads": 2, "output": "shared"}, "at output, expected nothing")],
)  # fmt: skip
def test_anything_else_is_refused(
    name: str, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    place = saved(moved(head("medusa", heads=2, output="own")), tmp_path)
    other = head(name, **options)
    before = {key: tensor.clone() for key, tensor in other.state_dict().items()}
    with pytest.raises(OptionError, match=said) as caught:
        start_from(place, other)
    assert "train.from" in one_line(caught.value)
    assert all(torch.equal(tensor, before[key]) for key, tensor in other.state_dict().items())


def test_other_features_are_refused(tmp_path: Path) -> None:
    place = saved(head("eagle3", feature_layers=[0, 1, 1]), tmp_path)
    with pytest.raises(OptionError, match=r"feature_layers \[0, 1, 1\], expected \[1, 0, 1\]"):
        start_from(place, head("eagle3", feature_layers=[1, 0, 1]))


@pytest.mark.parametrize(
    ("name", "options"), [("dflash", {}), ("eagle3", {}), ("pard", {"layers": 1})]
)
def test_another_mask_token_is_refused(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    place = saved(head(name, mask_token_id=7, **options), tmp_path)
    assert start_from(place, head(name, mask_token_id=7, **options)) == place
    with pytest.raises(OptionError, match=r"has (mask_token_id|pard_token) 7, expected 8"):
        start_from(place, head(name, mask_token_id=8, **options))


@pytest.mark.parametrize("name", ["draft_model", "pard", "mtp", "eagle"])
def test_layers_that_attend_otherwise_are_refused(name: str, tmp_path: Path) -> None:
    """By a line that names only what differs: the shapes of all weights are the same."""
    place = saved(head(name), tmp_path)
    target = tiny("llama")
    config = type(target.config)(**target.config.to_dict() | {"num_attention_heads": 8})
    config.num_key_value_heads, config.head_dim = 4, config.head_dim // 2
    other = head_of(name, type(target)(config).double().eval())
    with pytest.raises(OptionError, match="num_attention_heads") as caught:
        start_from(place, other)
    assert "hidden_size" not in str(caught.value) and len(one_line(caught.value)) < 400


def test_a_plain_language_model_is_no_head(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "model")
    with pytest.raises(OptionError, match="is checkpoint, expected a medusa head"):
        start_from(str(tmp_path / "model"), head("medusa"))


def test_the_key_of_a_recipe_is_from() -> None:
    data = {"name": "r", "target": {"model": "m"}, "drafter": {"family": "medusa"}}
    recipe = parse_recipe(data | {"train": {"from": "some/head"}})
    assert recipe.train.from_ == "some/head"
    assert recipe.to_dict()["train"]["from"] == "some/head"
    assert "from_" not in recipe.to_dict()["train"]
