"""Names that packages import on first use are found, listed, and kept."""

from importlib import import_module

import pytest

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
