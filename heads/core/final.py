"""The number of the hidden state that a target's output layer reads."""

FINAL = -1
"""Feature layer: the hidden state after the last norm, which the output layer reads."""
