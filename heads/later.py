"""Packages whose public names are imported on first use (PEP 562)."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def names_of(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package, for the names in its module `public`.

    A name that was asked for is kept, so that the package is asked once for it.
    """

    def find(name: str) -> Any:
        # `from . import module` asks for the module's name before the module is imported.
        if not name.startswith("_") and find_spec(f"{package}.{name}") is None:
            found, own = vars(import_module(f"{package}.public")), vars(import_module(package))
            if name in found:
                return own.setdefault(name, found[name])
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        found = {**vars(import_module(f"{package}.public")), **vars(import_module(package))}
        return sorted(name for name in found if not name.startswith("_"))

    return find, names
