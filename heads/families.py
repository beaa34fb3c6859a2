"""The drafter families: one record each, which is all that registers a family."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .core import OptionError

if TYPE_CHECKING:
    from .drafter import Drafter


@dataclass(frozen=True)
class Family:
    """What is known of a family before its code is imported.

    Attributes:
        name: as in recipes and manifests.
        place: where its class is, `MODULE:CLASS`.
        recipe: the shipped recipe that trains it for the quickstart's target.
        small: options of a drafter for a target of a few thousand weights, such as a test's.
        large: options of one for a target of billions of weights; others keep their defaults.
    """

    name: str
    place: str
    recipe: str = ""
    small: Mapping[str, Any] = field(default_factory=dict)
    large: Mapping[str, Any] = field(default_factory=dict)


_TRIMMED = {"output": "trimmed", "draft_vocab_size": 32_000}

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "draft_model",
            "headstart.heads.draft_model:DraftModel",
            recipe="draft-model",
            small={"layers": 1},
            large={"layers": 1},
        ),
        Family("eagle", "headstart.heads.eagle:Eagle", recipe="eagle"),
        Family(
            "eagle3",
            "headstart.heads.eagle3:Eagle3",
            recipe="eagle3",
            small={"depths": 3},
            large=_TRIMMED,
        ),
        Family(
            "hydra",
            "headstart.heads.hydra:Hydra",
            recipe="hydra",
            small={"heads": 3, "layers": 2, "prefix": True},
            large={"layers": 4, "prefix": True, **_TRIMMED},
        ),
        Family("lookup", "headstart.heads.lookup:Lookup", recipe="lookup"),
        Family(
            "medusa",
            "headstart.heads.medusa:Medusa",
            recipe="quickstart",
            small={"heads": 3},
            large={"heads": 5, "output": "shared"},
        ),
        Family(
            "medusa2",
            "headstart.heads.medusa2:Medusa2",
            recipe="medusa2",
            small={"heads": 3, "rank": 4},
            large={"heads": 5, "output": "shared"},
        ),
        Family(
            "redrafter",
            "headstart.heads.redrafter:ReDrafter",
            recipe="redrafter",
            small={"depths": 3},
            large=_TRIMMED,
        ),
    )
}
"""Every family, by name. A new drafter adds its record here."""


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
    return getattr(importlib.import_module(module), attribute)
