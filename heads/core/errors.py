"""The errors a user can cause; each message is one line: found, expected, what to do."""

MALFORMED = (
    ArithmeticError, AttributeError, IndexError, KeyError, RecursionError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
"""What torch, transformers and readers of formats raise where a file's values are of another kind
or size than they expect. Only what is done with such values alone is guarded by it."""


def brief(reason: object, length: int | None = 160) -> str:
    """A message on one line, cut where it is long."""
    return " ".join(str(reason).split())[:length]


def counted(number: float, unit: str) -> str:
    """A number of things, and what they are called.

    >>> counted(8, "batch"), counted(1, "text"), counted(0, "tree")
    ('8 batches', '1 text', '0 trees')
    """
    several = "" if number == 1 else "es" if unit.endswith(("ch", "s")) else "s"
    return f"{number:,.0f} {unit}{several}"


class HeadstartError(ValueError):
    """Base of all errors that a different input would avoid."""


class UnsupportedTarget(HeadstartError):
    """The target cannot be driven by a token tree (for example, its cache cannot roll back)."""


def undrivable(name: str, reason: str) -> UnsupportedTarget:
    """The error for a model, named by its type, that no token tree can drive."""
    return UnsupportedTarget(f"{name} {reason}; decode it plainly, with model.generate.")


class ArtifactError(HeadstartError):
    """A saved drafter is missing, damaged, or was trained for another target."""


class OptionError(HeadstartError):
    """An option, or a combination of options, that has no meaning or no exact form."""


class DecodingError(HeadstartError):
    """Decoding cannot go on: the target's logits are NaN, or its context is full."""
