"""Training: recipe, corpus, self-distillation, losses, trainer, validation by real decoding.

Nothing heavy is imported here, so that a mistyped recipe is answered at once.
"""

from collections.abc import Sequence

if __name__ != "headstart.train":
    raise ImportError(f"imported as {__name__!r}; write `from headstart.train import …` instead.")

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Train what a recipe describes: `RECIPE [a.b=value …] [--fresh]`; returns the exit status."""
    from .command import main as run

    return run(argv)
