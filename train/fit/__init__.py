"""The trainer of drafters: the loss on a target, batches, checkpoints, validation by decoding."""
