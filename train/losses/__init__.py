"""What drafters minimise: the divergences, the labels, and the sums over depths and positions."""

from .divergences import LOSSES, WEIGHTS, Loss, loss_of

__all__ = ["LOSSES", "WEIGHTS", "Loss", "loss_of"]
