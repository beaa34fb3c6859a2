"""headstart: draft heads for causal language models, and exact decoding with them.

The public names are imported on first use, so that `import headstart` and `headstart --help` stay
light: nothing here loads torch until a name is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headstart.heads import Drafter as Drafter
    from headstart.heads import DrafterConfig as DrafterConfig
    from headstart.infer import Speculator as Speculator
    from headstart.infer import load as load

__version__ = "0.1.0.dev0"

_PACKAGE_OF = {
    "Drafter": "headstart.heads",
    "DrafterConfig": "headstart.heads",
    "Speculator": "headstart.infer",
    "load": "headstart.infer",
}

__all__ = ["Drafter", "DrafterConfig", "Speculator", "__version__", "load"]


def __getattr__(name: str) -> Any:
    """Import a public name and keep it for the next time."""
    if name not in _PACKAGE_OF:
        raise AttributeError(f"module 'headstart' has no attribute {name!r}")
    value = getattr(import_module(_PACKAGE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
