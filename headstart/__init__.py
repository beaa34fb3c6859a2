"""headstart: draft heads for causal language models, and exact decoding with them.

    speculator = headstart.load("ORG/MODEL", "ORG/DRAFTER")
    output = speculator.generate(**inputs, max_new_tokens=128)

`load` makes a `Speculator`, which decodes; a `Batcher` decodes the requests of several threads
together. A `Grammar` is a form that text follows; a `Recorder` keeps requests, for
`headstart adapt`. New families of drafters derive from `Drafter` and `DrafterConfig`.

The public names are imported on first use, so that `import headstart` and `headstart --help` stay
light: nothing here loads torch until a name is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headstart.heads import Drafter as Drafter
    from headstart.heads import DrafterConfig as DrafterConfig
    from headstart.infer import Batcher as Batcher
    from headstart.infer import Grammar as Grammar
    from headstart.infer import Recorder as Recorder
    from headstart.infer import Speculator as Speculator
    from headstart.infer import load as load

__version__ = "0.1.0.dev0"

_LAYER_OF = {
    **dict.fromkeys(("Drafter", "DrafterConfig"), "heads"),
    **dict.fromkeys(("Batcher", "Grammar", "Recorder", "Speculator", "load"), "infer"),
}

__all__ = [
    "Batcher", "Drafter", "DrafterConfig", "Grammar", "Recorder", "Speculator", "__version__",
    "load",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name and keep it for the next time."""
    if name not in _LAYER_OF:
        raise AttributeError(f"module 'headstart' has no attribute {name!r}")
    globals()[name] = getattr(import_module(f"headstart.{_LAYER_OF[name]}"), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted(__all__)
