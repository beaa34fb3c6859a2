"""The examples in the docstrings hold.

Modules are imported by name: a run by path would load a second copy of each package.
"""

import doctest
import importlib
import types

import pytest

from tests.support.modules import module_names

MODULES = [name for name in module_names() if not name.endswith("__main__")]
NEEDS = {"headstart.heads.core.kernels": "triton"}  # comes with torch where there is CUDA


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_examples_are_found() -> None:
    assert "headstart.heads.core.tree" in MODULES
    assert doctest.testmod(importlib.import_module("headstart.infer.trees.paths")).attempted > 0


def test_a_wrong_example_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    module = types.ModuleType("wrong", ">>> 1 + 1\n3\n")
    assert doctest.testmod(module).failed == 1
    assert "Expected" in capsys.readouterr().out
