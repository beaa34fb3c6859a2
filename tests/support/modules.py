"""The product's modules, by the names that they are imported by."""

from pathlib import Path

from tests.support.paths import ROOT

LINKED = ("heads", "infer", "train", "recipes")
"""Packages at the top of the checkout, imported as headstart.NAME; headstart/ links to them."""


def package_files(package: str) -> list[Path]:
    """The modules of a package; those behind the links in headstart/ belong to other packages."""
    folder = ROOT / package
    return sorted(path for path in folder.rglob("*.py") if path.resolve().is_relative_to(folder))


def module_names() -> dict[str, Path]:
    """Every product module by its dotted name."""
    found = {}
    for package in (*LINKED, "headstart"):
        for path in package_files(package):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts if package == "headstart" else ("headstart", *parts))
            found[name.removesuffix(".__init__")] = path
    return found
