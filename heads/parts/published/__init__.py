"""Checkpoints of other projects: how their configs and tensors are named, for reading and writing.

A family's file has the names once, a function that reads a checkpoint (see
`StoredDrafter.from_checkpoint`) and those that write one in each format (see
`StoredDrafter.exports`).
"""
