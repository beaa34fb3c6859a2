"""The drafter families: one record each, which is all that registers a family."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .core import OptionError
from .drafter import Drafter


@dataclass(frozen=True)
class Family:
    """What is known of a family before its code is imported.

    Attributes:
        name: as in recipes and manifests.
        place: where its class is, `MODULE:CLASS`; a module without dots is one of this package.
        small: options of a drafter for a target of a few thousand weights, such as a test's.
        large: options of one for a target of billions of weights; others keep their defaults.
    """

    name: str
    place: str
    small: Mapping[str, Any] = field(default_factory=dict)
    large: Mapping[str, Any] = field(default_factory=dict)


_SHARED = {"heads": 5, "output": "shared"}
_TRIMMED = {"output": "trimmed", "draft_vocab_size": 32_000}
_PREFIX = {"layers": 4, "prefix": True, **_TRIMMED}

_FAMILIES = (
    Family("draft_model", "draft_model:DraftModel", {"layers": 1}, {"layers": 1}),
    Family("eagle", "eagle:Eagle"),
    Family("eagle3", "eagle3:Eagle3", {"depths": 3}, _TRIMMED),
    Family("hydra", "hydra:Hydra", {"heads": 3, "layers": 2, "prefix": True}, _PREFIX),
    Family("lookup", "lookup:Lookup"),
    Family("medusa", "medusa:Medusa", {"heads": 3}, _SHARED),
    Family("medusa2", "medusa2:Medusa2", {"heads": 3, "rank": 4}, _SHARED),
    Family("redrafter", "redrafter:ReDrafter", {"depths": 3}, _TRIMMED),
)
FAMILIES = {family.name: family for family in _FAMILIES}
"""Every family, by name. A new drafter adds its record to those above."""


def family(name: str) -> type[Drafter]:
    """The class of a drafter family, imported when first asked for.

    Raises:
        OptionError: no family of that name.
    """
    if name not in FAMILIES:
        raise OptionError(
            f"drafter.family is {name!r}; expected one of: {', '.join(sorted(FAMILIES))}."
        )
    module, _, attribute = FAMILIES[name].place.partition(":")
    module = module if "." in module else f"{__package__}.{module}"
    return getattr(importlib.import_module(module), attribute)
