"""The examples in the docstrings hold.

Modules are imported by name: a run by path would load a second copy of each room.
"""

import doctest
import importlib
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def module_names() -> list[str]:
    rooms = {room: (ROOT / room).rglob("*.py") for room in ("heads", "infer", "train", "recipes")}
    files = [("headstart", file) for files in rooms.values() for file in files]
    files += [("", file) for file in (ROOT / "headstart").glob("*.py")]
    names = [
        ".".join([parent, *file.relative_to(ROOT).with_suffix("").parts]).strip(".")
        for parent, file in files
        if file.name != "__main__.py"
    ]
    return sorted(name.removesuffix(".__init__") for name in names)


MODULES = module_names()
NEEDS = {
    f"headstart.heads.core.{name}": "triton"  # comes with torch where there is CUDA
    for name in ("attention_kernel", "move_kernel")
}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_examples_are_found() -> None:
    assert "headstart.heads.core.tree" in MODULES
    assert doctest.testmod(importlib.import_module("headstart.reports.tables")).attempted > 0


def test_a_wrong_example_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    module = types.ModuleType("wrong", ">>> 1 + 1\n3\n")
    assert doctest.testmod(module).failed == 1
    assert "Expected" in capsys.readouterr().out
