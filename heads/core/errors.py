"""The errors a user can cause; each message is one line: found, expected, what to do."""


class HeadstartError(ValueError):
    """Base of all errors that a different input would avoid."""


class UnsupportedTarget(HeadstartError):
    """The target cannot be driven by a token tree (for example, its cache cannot roll back)."""


class ArtifactError(HeadstartError):
    """A saved drafter is missing, damaged, or was trained for another target."""


class OptionError(HeadstartError):
    """An option, or a combination of options, that has no meaning or no exact form."""


class DecodingError(HeadstartError):
    """Decoding cannot go on: the target's logits are NaN, or its context is full."""
