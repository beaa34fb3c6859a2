"""Drafters: one file a family, and the few things that drafters and runtime share in `core`.

What imports torch is imported on first use.
"""

from typing import TYPE_CHECKING

if __name__ != "headstart.heads":
    raise ImportError(f"imported as {__name__!r}; write `from headstart.heads import …` instead.")

from .core import (
    FINAL,
    ArtifactError,
    DecodingError,
    HeadstartError,
    OptionError,
    UnsupportedTarget,
)
from .families import FAMILIES, Family, family
from .later import names_of

if TYPE_CHECKING:
    from .public import *

__getattr__, __dir__ = names_of(__name__)
