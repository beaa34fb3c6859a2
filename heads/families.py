"""The drafter families: one record each, which is all that registers a family."""

from __future__ import annotations

import importlib
from collections import ChainMap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .core import OptionError
from .declared.fields import Fields

if TYPE_CHECKING:
    from .drafter import Drafter


@dataclass(frozen=True)
class Family:
    """What is known of a family before its code is imported.

    Attributes:
        name: as in recipes and manifests.
        place: where its class is, `MODULE:CLASS`; a module without dots is one of this package.
        declared: where its `Fields` are, `MODULE:CLASS` in `declared`, so that its files are judged
            without torch; empty for a family whose class alone knows them.
        small: options of a drafter for a target of a few thousand weights, such as a test's.
        large: options of one for a target of billions of weights; others keep their defaults.
    """

    name: str
    place: str
    declared: str = ""
    small: Mapping[str, Any] = field(default_factory=dict)
    large: Mapping[str, Any] = field(default_factory=dict)


_SHARED = {"heads": 5, "output": "shared"}
_TRIMMED = {"output": "trimmed", "draft_vocab_size": 32_000}
_DEPTHS, _HYDRA = {"depths": 3}, {"heads": 3, "layers": 2, "prefix": True}
_PREFIX = {"layers": 4, "prefix": True, **_TRIMMED}
_PARALLEL = {"layers": 1, "depths": 3}

_BLOCK = {"layers": 1, "depths": 4}
_EXIT = "early_exit"
_MLP, _STAGES = "mlp_speculator", {"heads": 3, "inner_dim": 24}

_FAMILIES = (
    Family("dflash", "dflash:DFlash", "dflash:DFlashFields", _BLOCK),
    Family("draft_model", "draft_model:DraftModel", "", {"layers": 1}, {"layers": 1}),
    Family("eagle", "eagle:Eagle", "eagle:EagleFields"),
    Family("eagle3", "eagle3:Eagle3", "eagle:Eagle3Fields", _DEPTHS, _TRIMMED),
    Family(_EXIT, f"{_EXIT}:EarlyExit", f"{_EXIT}:EarlyExitFields", {}, _TRIMMED),
    Family("hydra", "hydra:Hydra", "hydra:HydraFields", _HYDRA, _PREFIX),
    Family("lookup", "lookup:Lookup", "lookup:LookupFields"),
    Family("medusa", "medusa:Medusa", "medusa:MedusaFields", {"heads": 3}, _SHARED),
    Family("medusa2", "medusa2:Medusa2", "medusa:Medusa2Fields", {"heads": 3, "rank": 4}, _SHARED),
    Family(_MLP, f"{_MLP}:MlpSpeculator", f"{_MLP}:MlpSpeculatorFields", _STAGES, _TRIMMED),
    Family("mtp", "mtp:Mtp", "", _DEPTHS, _TRIMMED),
    Family("pard", "pard:Pard", "", _PARALLEL, {"layers": 1}),
    Family("recycling", "recycling:Recycling", "recycling:RecyclingFields"),
    Family("redrafter", "redrafter:ReDrafter", "redrafter:ReDrafterFields", _DEPTHS, _TRIMMED),
    Family("retrieval", "retrieval:Retrieval", "retrieval:RetrievalFields"),
    Family("suffix", "suffix:Suffix", "suffix:SuffixFields", {"max_tokens": 512}),
)
FAMILIES = {family.name: family for family in _FAMILIES}
"""Every family that a recipe can name, by name. A new drafter adds its record to those above."""

_G4 = "gemma4_assistant"
PUBLISHED = {_G4: Family(_G4, f"{_G4}:Gemma4Assistant", f"{_G4}:Gemma4AssistantFields")}
"""Families whose drafters are not trained here, each for targets of one kind alone."""

KNOWN = ChainMap(PUBLISHED, FAMILIES)
"""Every family whose drafters can be loaded."""


def with_article(name: str) -> str:
    """A family's name after its article, for sentences: `a medusa`, `an eagle`."""
    return f"{'an' if name[0] in 'aei' or name.startswith(('mtp', 'mlp')) else 'a'} {name}"


def check_family(name: str) -> None:
    """Refuse a name that is no family's, with an OptionError."""
    if name not in KNOWN:
        raise OptionError(
            f"drafter.family is {name!r}; expected one of: {', '.join(sorted(FAMILIES))}."
        )


def family(name: str) -> type[Drafter]:
    """The class of a drafter family, imported when first asked for.

    Raises:
        OptionError: no family of that name.
    """
    check_family(name)
    return _imported(KNOWN[name].place, str(__package__))


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Refuse a family, or what can be told of its options without a target and without torch.

    Raises:
        OptionError: no such family or option, one that is not trained here, an option without
            effect, or a number that no drafter has.
    """
    if name in PUBLISHED:
        raise OptionError(
            f"drafter.family is {name!r}, whose drafters are not trained here; load one that was "
            f"published, or expected one of: {', '.join(sorted(FAMILIES))}."
        )
    kind = declared_by(name)
    if kind is None:
        return
    kind.check_options(name, options)
    with suppress(TypeError):  # values of another kind are refused with the target
        kind(**options).validate_ranges()


def declared_by(name: str) -> type[Fields] | None:
    """What a family's config declares, read without torch; None where its class alone knows it.

    Raises:
        OptionError: no family of that name.
    """
    check_family(name)
    place = KNOWN[name].declared
    return _imported(place, f"{__package__}.declared") if place else None


def is_language_model(name: str) -> bool:
    """Whether a family's drafters are saved as language models; those with `Fields` never are.

    Raises:
        OptionError: no family of that name.
    """
    return declared_by(name) is None and family(name).saved_as_language_model


def _imported(place: str, package: str) -> Any:
    """The class at `MODULE:CLASS`; a module without dots is one of the package."""
    module, _, attribute = place.partition(":")
    module = module if "." in module else f"{package}.{module}"
    return getattr(importlib.import_module(module), attribute)
