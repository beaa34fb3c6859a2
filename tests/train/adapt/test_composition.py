"""The recipe of an adaptation, for every family, from the drafter's own recipe or its family's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.heads import FAMILIES, Manifest, family, fingerprint, load_drafter, save_drafter
from headstart.heads.artifacts.source import DrafterSource
from headstart.heads.artifacts.trimming import save_trimmed
from headstart.train.adapt.composition import check_adaptable, compose
from headstart.train.adapt.earlier import Earlier, find_earlier
from headstart.train.adapt.traffic import AdaptError, longest, read_traffic
from headstart.train.checks.plan import plan_run
from headstart.train.fit.warm_start import start_from
from headstart.train.recipe import keys_of, load_recipe, recipe_of
from tests.support.bytewise import save_target

TRAINED = sorted(n for n in FAMILIES if family(n).trainable and n != "medusa2")


@pytest.fixture
def traffic(tmp_path: Path) -> Path:
    path = tmp_path / "traffic.jsonl"
    with path.open("w") as file:
        for number in range(60):
            ids = {"prompt_token_ids": [number] * 9, "token_ids": [7] * (10 + number % 3)}
            line = {"prompt": f"{number} what", "completion": "that", **ids}
            line["sampling"] = {"temperature": 0.7, "top_p": 0.9} if number else {"temperature": 0}
            file.write(json.dumps(line) + "\n")
    return path


def saved(folder: Path, name: str, recipe: dict[str, Any] | None = None, **more: Any) -> str:
    """A drafter without training for a tiny target."""
    target, _ = save_target(folder / "target")
    kind: Any = family(name)
    options = {**FAMILIES[name].small, **more}
    drafter = kind(kind.config_class.for_target(target, **options)).bind(target)
    drafter.init_from_target()
    manifest = Manifest(name, str(folder / "target"), fingerprint(target), recipe=recipe or {})
    return str(save_drafter(drafter, folder / "drafter", manifest, ""))


@pytest.mark.parametrize("name", TRAINED)
def test_any_family_goes_on_from_its_own_weights(name: str, tmp_path: Path, traffic: Path) -> None:
    options = dict(FAMILIES[name].small)
    keys = keys_of(load_recipe("quickstart").to_dict())
    keys["drafter"] = {"family": name, **options}
    keys["train"] |= {"learning_rate": 1e-3, "loss": "forward_kl"}
    source = DrafterSource(saved(tmp_path, name, recipe_of(keys).to_dict()))
    recipe = compose(source, read_traffic(str(traffic)), Earlier(), out=tmp_path / "out")
    assert recipe.train.from_ == source.name and recipe.train.loss == "forward_kl"
    assert recipe.train.learning_rate == 1e-3 and recipe.train.epochs == 3
    assert plan_run(recipe).drafter.config.family_name() == name  # the weights fit
    assert recipe.decode.rule == "coupled" and recipe.decode.temperature == 0.7
    assert recipe.decode.top_p == 0.9 and recipe.decode.new_tokens == 12
    assert recipe.distill.writer == "given" and recipe.folder == tmp_path / "out"
    assert recipe.decode.prompts == 8 and recipe.decode.validation_prompts == 4


def test_packed_rows_have_room_for_the_longest_request(tmp_path: Path, traffic: Path) -> None:
    keys = keys_of(load_recipe("quickstart").to_dict())
    keys["drafter"] = {"family": "medusa", **FAMILIES["medusa"].small}
    keys["distill"] |= {"prefix_tokens": 8, "new_tokens": 8}
    keys["train"] |= {"packing": True, "packed_length": 16}
    source = DrafterSource(saved(tmp_path, "medusa", recipe_of(keys).to_dict()))
    recipe = compose(source, read_traffic(str(traffic)), Earlier(), out=tmp_path / "out")
    assert recipe.train.packed_length == recipe.distill.max_length == 21


@pytest.mark.parametrize("name", TRAINED)
def test_a_drafter_without_a_recipe_has_its_family_s(
    name: str, tmp_path: Path, traffic: Path
) -> None:
    source = DrafterSource(saved(tmp_path, name))
    recipe = compose(source, read_traffic(str(traffic)), Earlier(), out=tmp_path / "out",
                     overrides=["target.dtype=float32"])  # fmt: skip
    given = load_recipe(f"{name.replace('_', '-')}+1x80gb", ["target.model=x"])
    assert recipe.train.loss == given.train.loss
    assert recipe.train.learning_rate == given.train.learning_rate
    assert plan_run(recipe).drafter.config.family_name() == name


def trimmed(folder: Path, name: str) -> tuple[DrafterSource, Any]:
    """An artifact that `headstart trim` makes of `saved`, and its drafter."""
    keys = keys_of(load_recipe("quickstart").to_dict())
    keys["drafter"] = {"family": name, **FAMILIES[name].small}
    whole = DrafterSource(saved(folder, name, recipe_of(keys).to_dict()))
    target, tokenizer = save_target(folder / "target")
    drafter: Any = load_drafter(whole, target, tokenizer)
    ids = torch.arange(1, 38, 2)
    return DrafterSource(
        str(save_trimmed(drafter, whole, tokenizer, ids, folder / "less"))
    ), drafter


@pytest.mark.parametrize("name", ["medusa", "hydra", "eagle3", "dflash"])
def test_a_trimmed_drafter_goes_on_with_its_own_tokens(
    name: str, tmp_path: Path, traffic: Path
) -> None:
    source, whole = trimmed(tmp_path, name)
    recipe = compose(source, read_traffic(str(traffic)), Earlier(), out=tmp_path / "out")
    assert recipe.train.from_ == source.name
    assert plan_run(recipe).drafter.config.family_name() == name  # the weights fit
    kind: Any = family(name)
    config = kind.config_class.for_target(whole.target, **recipe.drafter.options)
    fresh = kind(config).bind(whole.target)
    start_from(source.name, fresh)
    assert fresh.draft_vocabulary.tolist() == list(range(1, 38, 2))


def test_a_trimmed_draft_model_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    source, _ = trimmed(tmp_path, "draft_model")
    with pytest.raises(AdaptError, match="adapt the one that it was made from"):
        check_adaptable(source)


def test_low_rank_factors_are_trained_anew_on_the_merged_student(
    tmp_path: Path, traffic: Path
) -> None:
    keys = keys_of(load_recipe("draft-model").to_dict())
    keys["drafter"] = {"family": "draft_model", "layers": 1, "lora": {"rank": 2}}
    source = DrafterSource(saved(tmp_path, "draft_model", recipe_of(keys).to_dict()))
    recipe = compose(source, read_traffic(str(traffic)), Earlier(), out=tmp_path / "out")
    assert recipe.drafter.options == {"model": source.name, "lora": {"rank": 2}}
    assert recipe.train.from_ is None
    plan_run(recipe)


def test_text_of_the_old_target_is_not_added_for_another(tmp_path: Path, traffic: Path) -> None:
    source, found = DrafterSource(saved(tmp_path, "medusa")), []
    for target in (None, str(tmp_path / "target")):
        earlier = Earlier(rows=tmp_path / "rows")
        recipe = compose(source, read_traffic(str(traffic)), earlier, target, tmp_path / "out",
                         overrides=["target.dtype=float32"])  # fmt: skip
        found.append(recipe.distill.earlier)
    assert found == [str(tmp_path / "rows"), None]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("runs/x/heads", "runs/x-adapted"),
        ("runs/x-adapted/heads-1a2b3c4d", "runs/x-adapted-2"),
        ("runs/x-adapted-9/heads", "runs/x-adapted-10"),
        ("models/mine", "runs/mine-adapted"),
    ],
)
def test_each_adaptation_has_a_folder_of_its_own(
    tmp_path: Path, traffic: Path, monkeypatch: pytest.MonkeyPatch, name: str, expected: str
) -> None:
    saved(tmp_path, "medusa")
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / "drafter").rename(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    found = compose(DrafterSource(name), read_traffic(str(traffic)), Earlier(),
                    overrides=["target.dtype=float32"])  # fmt: skip
    assert str(found.folder) == expected
    assert find_earlier(DrafterSource(name)) == Earlier()


def test_traffic_says_what_most_requests_were(traffic: Path) -> None:
    found = read_traffic(str(traffic))
    assert (found.requests, found.sampling) == (60, {"temperature": 0.7, "top_p": 0.9})
    assert longest(found.wholes) == 21 and longest([]) is None
    assert found.writers == {(None, None): 60}


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [({}, {"temperature": 1.0}), ({"top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9}), (None, {})],
)
def test_requests_that_name_no_temperature_were_sampled_at_1(
    tmp_path: Path, sampling: Any, expected: dict[str, float]
) -> None:
    path = tmp_path / "traffic.jsonl"
    path.write_text(json.dumps({"prompt": "a", "completion": "b", "sampling": sampling}))
    assert read_traffic(str(path)).sampling == expected


def test_traffic_without_a_request(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(AdaptError, match="no request found"):
        read_traffic(str(tmp_path / "empty.jsonl"))
