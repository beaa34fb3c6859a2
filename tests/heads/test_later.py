"""Names that packages import on first use are found, listed, and kept."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGES = ["headstart.heads", "headstart.heads.core", "headstart.infer"]


@pytest.mark.parametrize("name", PACKAGES)
def test_a_packages_names_are_those_of_its_public_module(name: str) -> None:
    package = import_module(name)
    public = import_module(f"{name}.public")
    names = [each for each in vars(public) if not each.startswith("_")]
    assert names and set(names) <= set(dir(package))
    for each in names:
        assert getattr(package, each) is getattr(public, each)
        assert vars(package)[each] is getattr(public, each)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_name_that_there_is_not_is_refused(name: str) -> None:
    with pytest.raises(AttributeError, match=f"'{name}' has no attribute 'Speculater'"):
        import_module(name).Speculater  # noqa: B018


def test_a_module_may_be_imported_before_its_package_is_asked_for_a_name(tmp_path: Path) -> None:
    """`from . import other` asks the package for `other`, which must not import the public names:
    these are made of the module that is being imported."""
    package = tmp_path / "package"
    package.mkdir()
    later = (
        "from headstart.heads.later import names_of\n\n__getattr__, __dir__ = names_of(__name__)\n"
    )
    for name, text in {
        "__init__": later,
        "public": "from .one import ONE\n",
        "one": "from . import other\n\nONE = other.OTHER + 1\n",
        "other": "OTHER = 1\n",
    }.items():
        (package / f"{name}.py").write_text(text)
    code = "import package.one, package; assert package.ONE == 2, package.ONE"
    here = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""}
    subprocess.run([sys.executable, "-c", code], check=True, env=here)
