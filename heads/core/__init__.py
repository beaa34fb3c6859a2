"""What drafters and runtime share: the token tree, the slab cache, one tree forward, sampling.

Errors are imported with it, all else on first use: what needs no torch does not wait for it.
"""

from typing import TYPE_CHECKING

from ..later import names_of
from .errors import (
    ArtifactError,
    DecodingError,
    HeadstartError,
    OptionError,
    UnsupportedTarget,
    brief,
    counted,
)
from .final import FINAL
from .paths import parents_of_paths

if TYPE_CHECKING:
    from .public import *

__getattr__, __dir__ = names_of(__name__)
