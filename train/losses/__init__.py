"""What drafters minimise: the divergences, the labels, and the sums over depths and positions."""

from .divergences import LOSSES, Loss, loss_of

__all__ = ["LOSSES", "Loss", "loss_of"]
