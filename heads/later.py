"""Packages whose public names are imported on first use (PEP 562)."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def names_of(package: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package: it finds a name in the package's module `public`.

    A name is kept, so that the package is asked once for it.
    """

    def find(name: str) -> Any:
        if not name.startswith("_"):
            found, own = vars(import_module(f"{package}.public")), vars(import_module(package))
            if name in found:
                return own.setdefault(name, found[name])
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
