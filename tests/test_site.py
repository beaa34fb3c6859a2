"""The site: its reference names every key and command, its pages quote what the program says."""

import ast
import dataclasses
import importlib.util
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headstart.commands import COMMANDS
from headstart.heads.families import FAMILIES, family
from headstart.train.recipe import load_recipe, schema
from tests.support.documents import documents, help_examples
from tests.support.modules import module_names
from tests.support.paths import ROOT


@cache
def site(name: str) -> ModuleType:
    """A module of docs/site, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "site" / f"{name}.py")
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_key_of_a_recipe_is_named() -> None:
    page = site("reference").recipe_page()
    sections = dict(site("reference").sections())
    named = {"", "target", "corpus", "corpus.sources", "distill.openai", "train.on_policy"}
    assert named < sections.keys()
    count = 0
    for path, cls in sections.items():
        for field in dataclasses.fields(cls):
            key = f"{path}.{field.name.removesuffix('_')}".lstrip(".")
            assert f"| `{key}` |" in page, key
            count += 1
    assert count > 100


def test_every_option_of_a_family_is_named() -> None:
    _, _, page = site("reference").recipe_page().partition("\n## drafter\n")
    for name in FAMILIES:
        _, _, own = page.partition(f"\n### family: {name}\n")
        own = own.partition("\n### ")[0]
        config: Any = family(name).config_class
        for option in config.OPTIONS:
            assert f"| `drafter.{option}` |" in own, (name, option)


def test_every_key_has_a_meaning_and_every_family_a_line() -> None:
    page = site("reference").recipe_page()
    assert not re.findall(r"^\| `[\w.]+` \|.*\|  \|$", page, re.MULTILINE)
    for name in FAMILIES:
        about = page.partition(f"\n### family: {name}\n\n")[2].partition("\n")[0]
        assert len(about) > 20 and about[0].isupper() and about.endswith("."), (name, about)


def test_a_kind_is_said_in_words() -> None:
    kind = site("reference")._kind
    assert kind(Any) == "text" and kind(int | float | None) == "number or `null`"


def test_keys_say_what_the_schema_says() -> None:
    keys = {key.name: key for key in site("reference").keys_of(schema.Train)}
    assert keys["from"].meaning.startswith("a drafter of the same family")
    assert keys["warmup_ratio"].allowed == "≥ 0, < 1" and keys["warmup_ratio"].default == "0.1"
    assert "`cross_entropy`, `soft_cross_entropy`" in keys["loss"].allowed
    assert keys["on_policy"].section is schema.OnPolicy
    above = {key.name: key for key in site("reference").keys_of(schema.Distill)}["writer"].meaning
    assert above.startswith("own: the target continues") and above.endswith("as they stand")


def test_every_command_and_argument_is_named() -> None:
    page = site("reference").commands_page()
    for name in COMMANDS:
        _, found, own = page.partition(f"\n## {name}\n" if name != COMMANDS[0] else f"## {name}\n")
        assert found, name
        own = own.partition("\n## ")[0]
        for example in help_examples()[name]:
            assert example.text in own
        parser = site("reference")._commands()[name]
        for action in parser._actions:
            for flag in action.option_strings or [str(action.metavar)]:
                assert flag in own, (name, flag)


def said() -> str:
    """All texts of the packages' sources, one a line, with … for what is filled in."""
    texts = []
    for path in module_names().values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"%\w", "…", node.value))
    return "\n".join(texts)


def test_troubleshooting_quotes_what_is_printed() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = [m for m in re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE) if " " in m]
    printed = said()
    assert len(quoted) > 25
    for message in quoted:
        assert message in printed, message
    assert "the drafter is of no use" not in printed


def test_recipes_in_pages_parse(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "from-a-to-z.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my-model.yaml").write_text(found)
    recipe = load_recipe(tmp_path / "my-model.yaml")
    assert recipe.name == "my-model" and recipe.hardware is not None


def test_every_page_is_in_the_navigation() -> None:
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [path for path in documents() if path.is_relative_to(ROOT / "docs")]
    for page in pages:
        assert f": {page.relative_to(ROOT / 'docs').as_posix()}" in listed, page


def test_pictures_are_those_that_the_script_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = site("pictures")
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    for name in ("tree", "mask", "round_", "acceptance", "written"):
        getattr(pictures, name)()
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in (ROOT / "docs" / "pictures").iterdir()}
    assert len(drawn) == 5 and drawn == kept


@pytest.mark.docs
def test_the_site_is_built(tmp_path: Path) -> None:
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = (tmp_path / "site" / "reference" / "recipe.html").read_text(encoding="utf-8")
    assert "train.learning_rate" in built and "generated:" not in built
    built = (tmp_path / "site" / "reference" / "commands.html").read_text(encoding="utf-8")
    assert "<td><code>--compile auto|on|off</code></td>" in built
