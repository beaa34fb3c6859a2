"""The recipe's schema is strict: every mistake is named by its key's path."""

import subprocess
import sys
from pathlib import Path

import pytest

from headstart.train.recipe import (
    Recipe,
    RecipeError,
    load_recipe,
    loading,
    parse_recipe,
    shipped_recipes,
)


def least() -> dict:
    return {"name": "r", "target": {"model": "m"}, "drafter": {"family": "medusa"}}


def with_key(path: str, value: object) -> dict:
    data = least()
    *sections, last = path.split(".")
    section = data
    for name in sections:
        section = section.setdefault(name, {})
    section[last] = value
    return data


def test_defaults_and_drafter_options() -> None:
    recipe = parse_recipe(with_key("drafter.heads", 4))
    assert recipe.drafter.family == "medusa"
    assert recipe.drafter.options == {"heads": 4}
    assert recipe.corpus.source == "stdlib"
    assert recipe.target.scratch is None
    assert recipe.folder == Path("runs/r")


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("corpus.max_byte", 3, ["corpus.max_byte: unknown key", "'max_bytes'"]),
        ("trian", {}, ["trian: unknown key", "'train'"]),
        ("corpus.max_bytes", "3", ["corpus.max_bytes", "the string '3'", "an integer"]),
        ("corpus.max_bytes", True, ["corpus.max_bytes", "boolean", "an integer"]),
        ("corpus.max_bytes", 3.0, ["corpus.max_bytes", "the number 3.0", "an integer"]),
        ("corpus.max_bytes", None, ["corpus.max_bytes", "null"]),
        ("corpus.max_bytes", 0, ["corpus.max_bytes", "greater than 0"]),
        ("corpus.held_out", 1, ["corpus.held_out", "less than 1"]),
        ("corpus.held_out", -0.1, ["corpus.held_out", "at least 0"]),
        ("corpus.held_out", float("nan"), ["corpus.held_out", "nan"]),
        ("train.learning_rate", float("inf"), ["train.learning_rate", "inf"]),
        ("train.learning_rate", True, ["train.learning_rate", "a number"]),
        ("train.lr", 1e-3, ["train.lr: unknown key (did you mean 'learning_rate'?)"]),
        (
            "target.device_map",
            "foo",
            ["target.device_map: found 'foo'", "auto, balanced, ", "a dev"],
        ),
        ("target.device_map", "auot", ["did you mean 'auto'"]),
        ("target.device_map", {"": "gpu"}, ["target.device_map: found 'gpu' for all", "cuda:0"]),
        ("train.max_seconds", "long", ["train.max_seconds", "a number or null"]),
        ("train.report_to", [3], ["train.report_to: found the list [3]", "a list of strings"]),
        ("chat.tools", [3], ["chat.tools: found the list [3]", "a list of mappings"]),
        ("corpus.columns", {"text": 3}, ["corpus.columns", "a mapping to strings or null"]),
        ("train.loss", "forward_kk", ["train.loss: found 'forward_kk'", "'forward_kl'"]),
        ("train.loss", {"kl": 1}, ["train.loss: found 'kl'", "one of cross_entropy"]),
        ("train.loss", {3: 1}, ["train.loss: found 3", "one of cross_entropy"]),
        ("train.loss", {"forward_kl": 0}, ["train.loss: found 0 for forward_kl", "greater than 0"]),
        ("train.loss", {"forward_kl": "1"}, ["found '1' for forward_kl", "a weight"]),
        ("train.loss", {"forward_kl": True}, ["found True for forward_kl", "a weight"]),
        ("train.loss", {"forward_kl": float("inf")}, ["found inf for forward_kl", "finite"]),
        ("train.loss", {"cross_entropy": 1}, ["train.loss: found weights of cross_entropy alone"]),
        ("train.loss", {}, ["train.loss: found weights of no loss"]),
        ("train.loss", 3, ["train.loss", "a string or a mapping"]),
        ("train.position_weights", "much", ["train.position_weights", "much", "confidence"]),
        ("corpus", [1], ["corpus: found the list", "source, sources, config"]),
        ("corpus", None, ["corpus: found null"]),
        ("decode.rule", "gredy", ["decode.rule", "did you mean 'greedy'"]),
        ("decode.tree", 4, ["decode.tree", "a string or a list"]),
        ("decode.tree", [[0], ["a"]], ["decode.tree: path 1 is ['a']", "integers"]),
        ("decode.tree", "best-first:8,3,4", ["found best-first", "fixed shape", "--tree"]),
        ("decode.tree", "chain:2+chain:3", ["decode.tree: found chain:2+chain:3", "sparse:N"]),
        ("target.dtype", "fp32", ["target.dtype", "float32"]),
        ("target.scratch", {}, ["target: expected exactly one of model and scratch"]),
        ("target.model", None, ["target: expected exactly one of model and scratch"]),
        ("drafter.family", 1, ["drafter.family", "a string"]),
        ("name", "a/b", ["name: 'a/b'"]),
        ("shares", "../a", ["shares: '../a'"]),
        ("shares", "", ["shares: ''"]),
        ("seed", -1, ["seed", "at least 0"]),
        ("seed", 2**32, ["seed: found 4294967296", "less than 4294967296"]),
        ("7", 1, ["7: unknown key"]),
    ],
)
def test_mistakes_are_named(path: str, value: object, said: list[str]) -> None:
    with pytest.raises(RecipeError) as error:
        parse_recipe(with_key(path, value))
    message = str(error.value)
    assert "\n" not in message
    for part in said:
        assert part in message


@pytest.mark.parametrize(
    "places", ["auto", "balanced_low_0", "cuda:1", "cpu", {"": 0}, {"model.layers.0": "disk"}]
)
def test_places_of_a_target(places: object) -> None:
    data = least() | {"target": {"model": "me/model", "device_map": places}}
    assert parse_recipe(data).target.device_map == places


@pytest.mark.parametrize("key", ["name", "drafter", "target"])
def test_missing_keys_are_named(key: str) -> None:
    data = least()
    del data[key]
    with pytest.raises(RecipeError, match=f"^{key}: missing"):
        parse_recipe(data)
    with pytest.raises(RecipeError, match=r"^drafter\.family: missing"):
        parse_recipe(least() | {"drafter": {"heads": 4}})


def test_the_right_values_pass() -> None:
    data = with_key("train.learning_rate", 1) | {
        "decode": {"tree": [[0], [0, 0], [1]]},
        "target": {"scratch": {"max_seconds": None, "max_tokens": 10}},
    }
    data["train"] |= {"loss": {"cross_entropy": 1, "total_variation": 1.8}}
    recipe = parse_recipe(data)
    assert recipe.train.loss == {"cross_entropy": 1, "total_variation": 1.8}
    assert type(recipe.train.learning_rate) is float
    assert recipe.decode.tree == [[0], [0, 0], [1]]
    assert recipe.target.scratch is not None
    assert recipe.target.scratch.max_seconds is None


def test_overrides(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("name: r\ntarget: {model: m}\ndrafter: {family: medusa}\n")
    recipe = load_recipe(
        file,
        [
            "train.learning_rate=8e-3",
            "drafter.heads=3",
            "target.model=null",
            "target.scratch.layers=2",
            "decode.tree=chain:2",
            "train.max_seconds=1.5e3",
        ],
    )
    assert recipe.train.learning_rate == 0.008
    assert recipe.train.max_seconds == 1500.0
    assert recipe.drafter.options == {"heads": 3}
    assert recipe.target.scratch is not None and recipe.target.scratch.layers == 2
    assert recipe.decode.tree == "chain:2"
    for bad in ["train.max_steps", "=3", "a..b=1", "name.x=1", "seed=[", "train.max_step=3"]:
        with pytest.raises(RecipeError):
            load_recipe(file, [bad])


def test_a_base_gives_what_is_not_changed(tmp_path: Path) -> None:
    base = "name: b\nseed: 5\ntarget: {model: m, dtype: bfloat16}\n"
    base += "drafter: {family: medusa, heads: 4}\ntrain: {max_steps: 9, batch_size: 2}\n"
    (tmp_path / "b.yaml").write_text(base)
    middle = "base: b.yaml\nname: m\ntrain: {batch_size: 3}\n"
    (tmp_path / "m.yaml").write_text(middle)
    text = "base: m.yaml\nname: r\ndrafter: {family: redrafter, depths: 3}\n"
    (tmp_path / "r.yaml").write_text(text + "target: {model: null, scratch: {}}\n")
    recipe = load_recipe(tmp_path / "r.yaml", ["train.max_steps=10"])
    assert (recipe.name, recipe.seed, recipe.target.dtype) == ("r", 5, "bfloat16")
    assert (recipe.train.max_steps, recipe.train.batch_size) == (10, 3)
    assert recipe.drafter.options == {"depths": 3}  # and no heads
    assert recipe.target.model is None and recipe.target.scratch is not None
    assert load_recipe(tmp_path / "m.yaml").drafter.options == {"heads": 4}
    (tmp_path / "q.yaml").write_text("base: quickstart\nname: q\n")
    quickstart = load_recipe("quickstart").to_dict()
    assert load_recipe(tmp_path / "q.yaml").to_dict() == {**quickstart, "name": "q"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("base: nowhere\nname: r\n", "no recipe 'nowhere'"),
        ("base: r.yaml\nname: r\n", "based on r.yaml itself"),
        ("base: quickstart\n", "name: missing"),
        ("base: [a]\nname: r\n", "a: no part 'a'"),
        ("base: [1]\nname: r\n", "base: found the list"),
        ("base: []\nname: r\n", "base: found the list"),
        ("train: {report_to: [wandbb]}\nbase: quickstart\nname: r\n", "did you mean 'wandb'"),
        ("base: quickstart\nname: r\ntrian: {}\n", "trian: unknown key"),
        ("base: quickstart\nname: r\ntrain: {max_step: 3}\n", "did you mean 'max_steps'"),
    ],
)
def test_a_base_is_checked(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(RecipeError, match=said) as error:
        load_recipe(tmp_path / "r.yaml")
    assert "\n" not in str(error.value)


def test_the_folder_of_a_run_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"is a folder; .* the settings that it was started with"):
        load_recipe(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: r\nname: s\n", "name: given twice"),
        ("corpus: {columns: {prompt:task}}\n", "space behind the colon: {prompt: task}"),
        ("chat: {template_kwargs: {'a:b':}}\n", "space behind the colon: {a: b}"),
        ("- 1\n", "expected a mapping"),
        ("", "found null"),
        ("a: [\n", "not valid YAML"),
        ("a: !!python/object:os.system {}\n", "not valid YAML"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError, match=said) as error:
        load_recipe(file)
    assert "\n" not in str(error.value)


def test_shipped_recipes_parse_by_name() -> None:
    shipped = shipped_recipes()
    assert "quickstart" in shipped
    for name in shipped:
        assert load_recipe(name).name == name
    with pytest.raises(RecipeError, match="did you mean 'quickstart'"):
        load_recipe("quikstart")


@pytest.mark.parametrize("name", shipped_recipes())
def test_what_a_shipped_recipe_shares_is_the_same(name: str) -> None:
    recipe = load_recipe(name)
    if recipe.shares is not None:
        other = load_recipe(recipe.shares)
        for part in ("corpus", "target", "distill", "seed", "output"):
            assert getattr(recipe, part) == getattr(other, part), part


@pytest.mark.parametrize("setting", ["temperature=1.0", "temperature=0.5", "top_p=0.8", "top_k=9"])
def test_sampling_needs_a_rule_that_samples(setting: str) -> None:
    name = setting.partition("=")[0]
    said = f"found greedy, .* decode.{name} .* set decode.rule=coupled .*decode.{name}=null"
    with pytest.raises(RecipeError, match=said):
        load_recipe("quickstart", [f"decode.{setting}"])
    assert load_recipe("quickstart", [f"decode.{setting}", "decode.rule=coupled"])


def test_to_dict_round_trip() -> None:
    recipe = load_recipe("quickstart")
    data = recipe.to_dict()
    data["drafter"] = {"family": recipe.drafter.family, **recipe.drafter.options}
    assert parse_recipe(data) == recipe
    assert isinstance(recipe, Recipe)


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from headstart.train import recipe; recipe.load_recipe('quickstart'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_another_family_of_own_model_says_whose_settings_it_keeps(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_warned", set())
    for _ in range(2):
        load_recipe("own-model", ["drafter.family=eagle3"])
    (said,) = caplog.messages
    assert "eagle3+1x80gb" in said and "loss soft_cross_entropy, learning_rate 5e-05" in said
    caplog.clear()
    load_recipe("own-model", ["drafter.family=eagle3", "train.learning_rate=5e-5"])
    assert "learning_rate" not in caplog.text and "loss soft_cross_entropy" in caplog.text
    caplog.clear()
    for quiet in (["drafter.family=medusa"], ["drafter.family=lookup"], ["drafter.heads=3"]):
        load_recipe("own-model", quiet)
    load_recipe("eagle3+1x80gb")
    assert not caplog.messages
