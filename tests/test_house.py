"""The rules of the house: which room may import which, and what every room and file must be."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.paths import ROOT

ROOMS = ("heads", "infer", "train", "recipes")
MAY_IMPORT = {
    "heads": {"heads"},
    "infer": {"heads", "infer"},
    "train": {"heads", "infer", "train", "recipes"},
    "recipes": set(),
    "headstart": {"heads", "infer", "train", "recipes", "headstart"},
}


def room_files(room: str) -> list[Path]:
    # headstart/ holds symlinks to the other rooms, which are not part of it.
    if room == "headstart":
        return sorted((ROOT / room).glob("*.py")) + sorted((ROOT / room).glob("reports/*.py"))
    return sorted((ROOT / room).rglob("*.py"))


def imported_names(source: str, package: str) -> set[str]:
    """Every dotted name that `source`, a module in `package`, imports, wherever it stands."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join(parents if node.level else []) + ("." if node.level else "")
            names |= {f"{base}{node.module or ''}.{a.name}".replace("..", ".") for a in node.names}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func
            called = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
            if called in ("import_module", "__import__"):
                names.add(str(node.args[0].value))
    return names


def wrong_arrows(source: str, room: str, package: str) -> set[str]:
    """The imports of `source` that `room` may not make, as room names."""
    found = set()
    for name in imported_names(source, package):
        first, *rest = name.split(".")
        if first in ROOMS:
            found.add(f"bare {first}")  # a second copy of the room, or somebody else's package
        elif first == "headstart" and rest != ["__version__"]:
            found.add(rest[0] if rest and rest[0] in ROOMS else "headstart")
    return found - MAY_IMPORT[room]


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_no_arrow_runs_back(room: str) -> None:
    files = room_files(room)
    assert files
    for file in files:
        inside = file.relative_to(ROOT).parent.parts
        package = ".".join(inside if room == "headstart" else ("headstart", *inside))
        assert not wrong_arrows(file.read_text(), room, package), file


@pytest.mark.parametrize(
    ("source", "room", "package", "found"),
    [
        ("from headstart.infer import load", "heads", "headstart.heads", {"infer"}),
        ("import headstart.train.recipe", "infer", "headstart.infer", {"train"}),
        ("from headstart import train", "infer", "headstart.infer", {"train"}),
        ("from headstart import load", "heads", "headstart.heads", {"headstart"}),
        ("import headstart", "train", "headstart.train", {"headstart"}),
        ("from ..infer import loop", "heads", "headstart.heads", {"infer"}),
        ("from ...train import x", "heads", "headstart.heads.core", {"train"}),
        ("from .. import infer", "heads", "headstart.heads", {"infer"}),
        ("def f():\n    from headstart.infer import x", "heads", "headstart.heads", {"infer"}),
        ("import_module('headstart.infer.loop')", "heads", "headstart.heads", {"infer"}),
        ("import heads", "train", "headstart.train", {"bare heads"}),
        ("from .core import tree", "heads", "headstart.heads", set()),
        ("from ..drafter import Step", "heads", "headstart.heads.core", set()),
        ("from headstart.heads import Step", "infer", "headstart.infer", set()),
        ("from headstart import __version__", "heads", "headstart.heads", set()),
        ("import torch, headroom", "heads", "headstart.heads", set()),
    ],
)
def test_the_arrow_check_sees(source: str, room: str, package: str, found: set[str]) -> None:
    assert wrong_arrows(source, room, package) == found


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_refuses_another_name(room: str) -> None:
    spec = importlib.util.spec_from_file_location(room, ROOT / room / "__init__.py")
    assert spec and spec.loader
    with pytest.raises(ImportError, match=f"headstart.{room}"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("room", ROOMS)
def test_the_symlinks_are_relative(room: str) -> None:
    link = ROOT / "headstart" / room
    assert link.is_symlink()
    assert os.readlink(link) == f"../{room}"


def test_every_package_is_installed_and_typed() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    inside = {path.parent for room in ROOMS for path in (ROOT / room).rglob("__init__.py")}
    packages = {"headstart." + ".".join(path.relative_to(ROOT).parts) for path in inside}
    assert set(tool["setuptools"]["packages"]) == packages | {"headstart"}
    assert {f"headstart/{room}" for room in ROOMS} < set(tool["pyright"]["include"])
    for room in (*ROOMS, "headstart"):
        assert (ROOT / room / "py.typed").exists(), room


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["generate", "--help"], ["--version"]]
)
def test_help_imports_no_torch(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom headstart.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'rich', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "headstart" in done.stdout


def test_every_recipe_parses() -> None:
    from headstart.train.recipe import load_recipe, shipped_recipes

    files = sorted((ROOT / "recipes").glob("*.yaml"))
    assert {"quickstart", "stories260k"} <= {file.stem for file in files}
    assert set(shipped_recipes()) == {file.stem for file in files}
    for file in files:
        assert load_recipe(file).name == file.stem
        assert file.read_text().startswith("# "), f"{file} opens with a header comment"


def test_every_launch_file_parses() -> None:
    import json

    import yaml
    from accelerate.commands.config.config_args import load_config_from_file

    folder = ROOT / "recipes" / "launch"
    files = sorted(path.name for path in folder.iterdir())
    assert files == [
        "ddp.yaml", "ddp_cpu.yaml", "zero2.json", "zero2.yaml", "zero3.json", "zero3.yaml",
    ]  # fmt: skip
    for file in folder.glob("*.yaml"):
        load_config_from_file(str(file))  # refuses unknown keys
        nested = yaml.safe_load(file.read_text()).get("deepspeed_config", {})
        if nested:
            settings = json.loads((ROOT / nested["deepspeed_config_file"]).read_text())
            assert settings["zero_optimization"]["stage"] == int(file.stem[-1])


def tracked_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    paths = {ROOT / name for name in listing.stdout.split("\0") if name}
    return sorted(path for path in paths if path.is_file() and not path.is_symlink())


# In pieces, so that this file holds none of what it looks for.
FOREIGN = re.compile("|".join([
    r"/ho" r"me/\w", r"/ro" r"ot/", r"/Us" r"ers/\w", r"/wo" r"rk/", r"/t" r"mp/hs", r"/o" r"pt/",
    r"py" r"pi\.org", r"pythonho" r"sted\.org", r"download\.py" r"torch\.org", r"extra-in" r"dex",
]))  # fmt: skip


def test_no_file_names_a_machine_or_a_registry() -> None:
    files = tracked_files()
    assert len(files) > 20
    for file in files:
        found = FOREIGN.search(file.read_text(encoding="utf-8", errors="replace"))
        assert not found, f"{file}: {found and found.group()}"
    assert FOREIGN.search("pip install --extra-" + "index-url x")
    assert FOREIGN.search("cd /wo" + "rk/main")


def readme_tree() -> set[str]:
    """The paths drawn in the README's tree: each level is indented by four columns."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    drawing = re.search(r"```text\n\.\n(.*?)```", text, re.DOTALL)
    assert drawing, "README.md has a fenced `text` block that starts with a line `.`"
    paths, folders = set(), []
    for line in drawing.group(1).splitlines():
        entry = re.match(r"((?:[│ ] {3})*)[├└]── (\S+)", line)
        assert entry, line
        depth, name = len(entry.group(1)) // 4, entry.group(2)
        folders[depth:] = [name.rstrip("/")]
        paths.add("/".join(folders) + ("/" if name.endswith("/") else ""))
    return paths


def test_the_readme_tree_is_true() -> None:
    drawn = readme_tree()
    for path in drawn:
        assert (ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file(), path
    unspoken = {"__init__.py", "__main__.py", "py.typed"}
    files = [file for room in MAY_IMPORT for file in room_files(room)]
    files += [path for path in (ROOT / "recipes").rglob("*") if path.is_file()]
    names = {
        file.relative_to(ROOT).as_posix()
        for file in files
        if file.name not in unspoken and "__pycache__" not in file.parts
    }
    assert names <= drawn, f"not in the README's tree: {sorted(names - drawn)}"
