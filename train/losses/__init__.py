"""What drafters minimise: the divergences, the labels, and the sums over depths and positions."""

from .divergences import LOSSES, Loss

__all__ = ["LOSSES", "Loss"]
