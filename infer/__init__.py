"""The decode loop: trees, acceptance rules, target runner, and the Speculator over them.

What imports torch is imported on first use.
"""

from typing import TYPE_CHECKING

if __name__ != "headstart.infer":
    raise ImportError(f"imported as {__name__!r}; write `from headstart.infer import …` instead.")

from headstart.heads.later import names_of

if TYPE_CHECKING:
    from .public import *

__getattr__, __dir__ = names_of(__name__)
