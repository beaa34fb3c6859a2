"""Layering and layout: who imports whom, how long files are, what is documented and what is not."""

import ast
import graphlib
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from headstart.commands import COMMANDS
from tests.support.modules import LINKED, module_names, package_files
from tests.support.paths import ROOT

MAY_IMPORT = {
    "heads": {"heads"},
    "infer": {"heads", "infer"},
    "train": {"heads", "infer", "train", "recipes"},
    "recipes": set(),
    "headstart": {"heads", "infer", "train", "recipes", "headstart"},
}
MAX_LINES, MAX_README_LINES = 400, 155


def imported_names(source: str, package: str) -> set[str]:
    """Every dotted name that `source`, a module in `package`, imports, wherever the import is."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = ast.unparse(node.func).rpartition(".")[2]
            if function in ("import_module", "__import__"):
                names.add(str(node.args[0].value))
    return names


def package_of(name: str, path: Path) -> str:
    return name if path.name == "__init__.py" else name.rpartition(".")[0]


def wrong_imports(source: str, layer: str, package: str) -> set[str]:
    """The packages that a module in `layer` imports and may not."""
    found = set()
    for name in imported_names(source, package):
        first, *rest = name.split(".")
        if first in LINKED:
            found.add(f"bare {first}")  # a second copy of the package, or somebody else's
        elif first == "headstart" and rest != ["__version__"]:
            found.add(rest[0] if rest and rest[0] in LINKED else "headstart")
    return found - MAY_IMPORT[layer]


def import_cycle(sources: dict[str, tuple[str, str]]) -> list[str]:
    """The modules of one import cycle, or none.

    Args:
        sources: (package, source) of each module by name. `from a.b import c` depends on the module
            a.b.c if there is one, and on a.b otherwise.
    """
    graph = {}
    for name, (package, source) in sources.items():
        imported = imported_names(source, package)
        modules = {each if each in sources else each.rpartition(".")[0] for each in imported}
        graph[name] = (modules & sources.keys()) - {name}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_packages_import_in_one_direction(layer: str) -> None:
    files = {name: path for name, path in module_names().items() if path in package_files(layer)}
    assert files
    for name, path in files.items():
        assert not wrong_imports(path.read_text(), layer, package_of(name, path)), path


@pytest.mark.parametrize(
    ("source", "layer", "package", "found"),
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
def test_a_wrong_import_is_found(source: str, layer: str, package: str, found: set[str]) -> None:
    assert wrong_imports(source, layer, package) == found


def test_no_import_cycle() -> None:
    modules = module_names().items()
    sources = {name: (package_of(name, path), path.read_text()) for name, path in modules}
    assert len(sources) > 50
    assert not import_cycle(sources)


@pytest.mark.parametrize(
    ("first", "second", "length"),
    [
        ("from .b import x", "from .a import y", 3),
        ("from . import b", "def f():\n    from p.a import y", 3),
        ("from . import b", "import p.a", 3),
        ("from .b import x", "import torch", 0),
        ("x = 1", "from p.a import x", 0),
    ],
)
def test_an_import_cycle_is_found(first: str, second: str, length: int) -> None:
    assert len(import_cycle({"p.a": ("p", first), "p.b": ("p", second)})) == length


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in module_names().values()}
    assert not {str(path) for path, length in lengths.items() if length > MAX_LINES}
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


# Words that once named things of this project and that no reader of the field would know.
BANNED = re.compile(
    r"\b(house|rooms|twins?|roads?|lessons?|foretold|foretells?|spoken|hears?|dialects?|contenders?)\b",
    re.IGNORECASE,
)


def test_words_are_plain() -> None:
    for path in module_names().values():
        found = BANNED.search(path.read_text().replace("_", " "))
        assert not found, f"{path}: {found and found.group()}"
    assert BANNED.search("Hear what the contenders say") and not BANNED.search("the rest")


@pytest.mark.parametrize("package", LINKED)
def test_a_package_refuses_another_name(package: str) -> None:
    spec = importlib.util.spec_from_file_location(package, ROOT / package / "__init__.py")
    assert spec and spec.loader
    with pytest.raises(ImportError, match=f"headstart.{package}"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("package", LINKED)
def test_the_symlinks_are_relative(package: str) -> None:
    link = ROOT / "headstart" / package
    assert link.is_symlink()
    assert os.readlink(link) == f"../{package}"


def test_every_package_is_installed_and_typed() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    packages = {name for name, path in module_names().items() if path.name == "__init__.py"}
    assert set(tool["setuptools"]["packages"]) == packages
    assert {f"headstart/{package}" for package in LINKED} < set(tool["pyright"]["include"])
    for package in (*LINKED, "headstart"):
        assert (ROOT / package / "py.typed").exists(), package


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]
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
    assert "quickstart" in {file.stem for file in files}
    assert set(shipped_recipes()) == {file.stem for file in files}
    for file in files:
        assert load_recipe(file).name == file.stem
        assert file.read_text().startswith("# "), f"{file} opens with a header comment"


def test_every_launch_file_parses(capsys: pytest.CaptureFixture[str]) -> None:
    import yaml
    from accelerate.commands.config.config_args import load_config_from_file

    from headstart.cli import main
    from headstart.train.processes.engine import deepspeed_settings

    folder = ROOT / "recipes" / "launch"
    assert main(["launch-file"]) == 0
    names = capsys.readouterr().out.split()
    assert names == [
        "ddp", "ddp_cpu", "fsdp2", "nodes", "zero2", "zero2_offload", "zero3", "zero3_offload",
    ]  # fmt: skip
    assert {f"{name}.yaml" for name in names} == {path.name for path in folder.iterdir()}
    for name in names:
        assert main(["launch-file", name]) == 0
        file = Path(capsys.readouterr().out.strip())
        assert file == folder / f"{name}.yaml" and file.read_text().startswith("# ")
        load_config_from_file(str(file))  # refuses unknown keys
        stated = yaml.safe_load(file.read_text()).get("deepspeed_config", {})
        environment = {f"ACCELERATE_DEEPSPEED_{k.upper()}": str(v) for k, v in stated.items()}
        environment["ACCELERATE_USE_DEEPSPEED"] = "true" if stated else "false"
        settings = deepspeed_settings(environment, bf16=True)
        assert (settings is None) == (not name.startswith("zero"))
        if settings is not None:
            zero = settings["zero_optimization"]
            assert zero["stage"] == int(name[4])
            assert ("offload_optimizer" in zero) == name.endswith("offload")
            assert ("offload_param" in zero) == (name == "zero3_offload")
            assert settings["torch_autocast"]["enabled"] and not settings["bf16"]["enabled"]


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


LACKING = {
    "datasets", "deepspeed", "fastapi", "liger_kernel", "llguidance", "openai", "prometheus_client",
    "pydantic", "torchao",
}  # fmt: skip
"""What a machine with a GPU to measure on need not have; `docs/gpu.md` runs the tests there."""


def test_tests_are_collected_where_packages_are_missing() -> None:
    """One module that cannot be imported stops all of them."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert len(files) > 100
    for file in files:
        for node in ast.parse(file.read_text()).body:
            names = imported_names(ast.unparse(node), "tests") if _imports(node) else set()
            found = {name.partition(".")[0] for name in names} & LACKING
            assert not found, f"{file} imports {found}; use pytest.importorskip"


def test_no_file_of_tests_imports_another() -> None:
    """What several need is in `tests/support`."""
    of_tests = re.compile(r"^(?:from|import) tests\.(?:\w+\.)*test_", re.MULTILINE)
    for file in sorted((ROOT / "tests").rglob("*.py")):
        assert not of_tests.search(file.read_text()), file
    assert of_tests.search("from tests.infer." + "test_loop import x")


def _imports(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def documented_folders(text: str) -> Iterator[tuple[str, str]]:
    """(folder, purpose) of each line of the tree in docs/layout.md, four columns a level."""
    drawing = re.search(r"```text\n\.\n(.*?)```", text, re.DOTALL)
    assert drawing, "docs/layout.md has a fenced `text` block that starts with a line `.`"
    folders: list[str] = []
    for line in drawing.group(1).splitlines():
        entry = re.fullmatch(r"((?:[│ ] {3})*)[├└]── (\S+)/ *(.*)", line)
        assert entry, f"not a folder and its purpose: {line}"
        folders[len(entry.group(1)) // 4 :] = [entry.group(2)]
        yield "/".join(folders), entry.group(3)


def test_the_documented_layout_is_complete() -> None:
    documented = dict(documented_folders((ROOT / "docs" / "layout.md").read_text()))
    for folder, purpose in documented.items():
        assert (ROOT / folder).is_dir() and purpose, folder
    tracked = [path.relative_to(ROOT).parent for path in tracked_files()]
    folders = {parent.as_posix() for path in tracked for parent in (path, *path.parents)} - {"."}
    mirrored = {folder for folder in folders if folder.startswith(("tests/", "."))}
    assert folders - mirrored <= documented.keys()


def test_a_wrong_layout_is_found() -> None:
    drawing = "```text\n.\n├── a/   first\n│   └── b/  second\n└── c/\n```"
    assert list(documented_folders(drawing)) == [("a", "first"), ("a/b", "second"), ("c", "")]
    with pytest.raises(AssertionError, match="not a folder"):
        list(documented_folders("```text\n.\n├── a.py  a file\n```"))
