"""What the configs of drafters declare: settings, their ranges, and the shapes of the weights.

Nothing here imports torch or transformers, so that an artifact's files are judged at once.
"""
